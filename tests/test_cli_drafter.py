"""`tlt train-drafter` and `tlt export` on a tiny model, and the acceptance benchmark on what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import acceptance
from tests.test_cli import answer, tlt
from tests.tiny import tiny_hf_model
from tlt_engine import Profile
from tlt_engine.cli.tasks import chat, suited
from tlt_engine.models import load_model
from tlt_engine.models.eagle_checkpoint import load_drafter

PROMPTS = '{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [7]}\n{"prompt_token_ids": [8, 9, 10]}\n'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafter")
    tiny_hf_model(num_hidden_layers=3, eos_token_id=63).save_pretrained(folder / "model")
    (folder / "p.jsonl").write_text(PROMPTS)
    report = answer(
        "train-drafter", folder / "model", "--out", folder / "out", "--prompts", folder / "p.jsonl", "--minutes", 0.1,
        "--batch", 3, "--n", 4, "--max-tokens", 24, "--profile", "3_2_6", "--draft-vocab", 40, "--plot",
        folder / "plot.png",
    )
    return {"folder": folder, "report": report}


def test_it_trains_saves_and_draws(trained: dict[str, Any]) -> None:
    folder, report = trained["folder"], trained["report"]
    assert report["steps"] >= 1 and report["pieces"] and 0.05 < report["minutes"] < 2
    assert report["pieces"][-1]["loss"] is not None
    assert (folder / "plot.png").stat().st_size > 10_000
    target = load_model(str(folder / "model")).model
    drafter = load_drafter(folder / "out", target)
    assert drafter.config.draft_vocab_size == 40 and 63 in drafter.target_ids.tolist(), "the EOS can be drafted"


def test_an_occupied_folder_is_refused(trained: dict[str, Any]) -> None:
    folder = trained["folder"]
    result = tlt("train-drafter", folder / "model", "--out", folder / "out", "--prompts", folder / "p.jsonl")
    assert result.exit_code == 2 and "--out: expected" in " ".join(result.stderr.split())
    for occupied in (folder / "out", folder / "p.jsonl"):  # the drafter itself; a file
        result = tlt("export", folder / "model", folder / "out", "--out", occupied, "--to", "vllm")
        assert result.exit_code == 2 and "--out: expected a folder" in " ".join(result.stderr.split())
    result = tlt("train-drafter", folder / "model", "--out", folder / "o2", "--prompts", folder / "p.jsonl",
                 "--profile", "tall")
    assert result.exit_code == 2 and "--profile: expected depth_topk_verify" in " ".join(result.stderr.split())


def test_check_takes_its_folder(trained: dict[str, Any]) -> None:
    folder = trained["folder"]
    report = answer("check", folder / "model", "--drafter", folder / "out", "--prompts", folder / "p.jsonl",
                    "--n", 2, "--max-tokens", 12)
    assert report["kept"] and report["tokens_equal"] and report["tokens"] > 0


def test_text_prompts_without_a_chat_template_stay_text() -> None:
    class Tokenizer:
        chat_template: str | None = None

    prompts = ["a", {"prompt_token_ids": [1]}]
    assert suited(prompts, None) == suited(prompts, Tokenizer()) == prompts
    Tokenizer.chat_template = "{{ messages }}"
    assert suited(prompts, Tokenizer()) == [chat("a"), {"prompt_token_ids": [1]}]


@pytest.mark.parametrize("to", ["sglang", "vllm", "speculators"])
def test_export_round_trip(trained: dict[str, Any], tmp_path: Path, to: str) -> None:
    folder = trained["folder"]
    report = answer("export", folder / "model", folder / "out", "--out", tmp_path / to, "--to", to)
    assert report["files"] == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / to / "config.json").read_text())
    assert ("speculators_model_type" in config) == (to == "speculators")
    target = load_model(str(folder / "model")).model
    first, again = load_drafter(folder / "out", target), load_drafter(tmp_path / to, target)
    ours, theirs = dict(first.named_tensors()), dict(again.named_tensors())
    assert set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_training_goes_on_from_a_folder(trained: dict[str, Any], tmp_path: Path) -> None:
    folder = trained["folder"]
    report = answer("train-drafter", folder / "model", "--out", tmp_path / "more", "--prompts", folder / "p.jsonl",
                    "--minutes", 0.01, "--batch", 3, "--max-tokens", 8, "--drafter", folder / "out")
    assert report["pieces"]
    assert load_drafter(tmp_path / "more", load_model(str(folder / "model")).model).config.draft_vocab_size == 40


def test_acceptance_modes_emit_the_same_tokens(trained: dict[str, Any]) -> None:
    folder = trained["folder"]
    loaded = load_model(str(folder / "model"))
    drafter = load_drafter(folder / "out", loaded.model)
    prompts = [[5, 6], [7], [8, 9, 10]]
    found = {
        mode: acceptance.measure(loaded, drafter, prompts, mode, Profile(3, 2, 6), 1.0, n=2, max_tokens=40, seed=1,
                                 batch=8)
        for mode in acceptance.MODES
    }
    assert len({str(m.ids) for m in found.values()}) == 1
    for m in found.values():
        assert m.pooled >= 1 and m.tokens == sum(map(len, m.ids)) and set(m.by_position) == {"0-128"}


def test_loops_are_8_grams_seen_in_the_last_64() -> None:
    loop = list(range(8))
    assert acceptance.in_loop([*loop, 50, *loop]) and acceptance.in_loop([1] * 9)
    assert not acceptance.in_loop(loop) and not acceptance.in_loop([*loop, *range(100, 165), *loop])
    assert not acceptance.in_loop([*loop[1:], 50, *loop])
