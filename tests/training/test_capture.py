"""The buffer on a real engine: what it keeps are the target's own hidden states of the emitted tokens, whatever else
goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import shared_hf, tiny_engine
from tests.tiny import prefill_logits
from tests.training.rows import loaded
from tlt_engine import RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.records import DrawPolicy

MODEL = {"num_hidden_layers": 3}
LAYERS, LAST = (1, 2), 3
PROMPTS = [[5, 9, 2, 33, 7, 1, 60, 3, 3], [8], [4, 4, 4, 4], list(range(20, 37))]


def recording(**config: Any) -> tuple[RolloutEngine, HiddenStateBuffer]:
    engine = tiny_engine(model=MODEL, **config)
    buffer = HiddenStateBuffer(LAYERS, LAST, 32, byte_budget=2**22, page_rows=4, stage_rows=16)
    engine.record_hidden(buffer)
    return engine, buffer


def wrong_rows(engine: RolloutEngine, buffer: HiddenStateBuffer) -> list[str]:
    """Kept rows that are not what a prefill of their tokens by the engine's model gives."""
    found = []
    with buffer.draw(10**6, "all", DrawPolicy(max_age=None)) as pieces:
        for piece in pieces:
            assert piece.first == 0
            _, hidden = prefill_logits(engine.model, piece.tokens.tolist(), capture=(*LAYERS, LAST))
            aux, last = loaded(buffer, piece)
            want = torch.cat([hidden[layer] for layer in LAYERS], -1)
            if not torch.allclose(aux, want, atol=1e-4) or not torch.allclose(last, hidden[LAST], atol=1e-4):
                found.append(f"{piece.tokens.tolist()}")
    return found


def kept_texts(buffer: HiddenStateBuffer) -> list[list[int]]:
    with buffer.draw(10**6, "all", DrawPolicy(max_age=None)) as pieces:
        return sorted(piece.tokens.tolist() for piece in pieces)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    """Prompt and output of every sample, without the last token, which was never an input."""
    return sorted([*o.prompt_token_ids, *c.token_ids][:-1] for o in outputs for c in o.outputs)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculating": {"speculation": SpeculationConfig(method="model_free", min_chance=0.0)},
    "few pages, so preemption": {"num_pages": 40, "max_num_batched_tokens": 8},
    "audited": {"speculation": SpeculationConfig(method="model_free", audit=1.0)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kept_rows_are_the_emitted_tokens_hidden_states(name: str) -> None:
    """Every sample of a prompt has the whole prompt before it, which is computed once and trained once."""
    engine, buffer = recording(enable_prefix_caching=False, **CONFIGS[name])
    params = SamplingParams(n=3, max_tokens=25, seed=7, stop_token_ids=[11, 50])
    outputs = engine.generate(PROMPTS, params)
    assert {c.finish_reason for o in outputs for c in o.outputs} == {"stop", "length"}
    if name == "few pages, so preemption":
        assert engine.stats()["preemptions"] > 0
    assert kept_texts(buffer) == texts(outputs)
    assert wrong_rows(engine, buffer) == []
    stats = buffer.stats()
    assert stats["open_sequences"] == 0
    if name != "few pages, so preemption":  # who is thrown out of a family computes its prompt again
        lengths = [[len(o.prompt_token_ids) + len(c.token_ids) - 1 for c in o.outputs] for o in outputs]
        own = [sum(n) - 2 * (len(o.prompt_token_ids) - 1) for n, o in zip(lengths, outputs)]
        assert stats["taken_rows"] == sum(own)
        assert stats["pairs"] == sum(n - 1 for n in own) - 2 * sum(len(p) == 1 for p in PROMPTS)
    buffer.check_integrity()


def test_a_policy_update_in_the_middle_keeps_rows_of_one_policy() -> None:
    engine, buffer = recording()
    engine.add_request([5, 9, 2, 33], SamplingParams(max_tokens=20, seed=7, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.update_weights(dict(shared_hf("llama", 5, **MODEL).state_dict()), weight_version="next")
    while engine.has_unfinished():
        engine.step()
    with buffer.draw(10**6, "all") as pieces:
        assert [(p.first, p.rows, p.record.policy) for p in pieces] == [(0, 23, 1)]
    assert wrong_rows(engine, buffer) == []
    assert buffer.stats()["policy"] == "next" and buffer.stats()["replaced_rows"] > 0


def test_sabotage_without_forks_the_samples_begin_behind_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiddenStateBuffer, "fork", lambda self, source, seq_id, length: None)
    with pytest.raises(AssertionError):
        test_kept_rows_are_the_emitted_tokens_hidden_states("plain")
