"""The examples run: the bare loop learns on held-out questions, the TRL program trains on a tiny model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.rl.common import tokenizer
from tests.tiny import tiny_hf_model
from tlt_engine import EngineConfig, RolloutEngine, SpeculationConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_bare_loop_learns_on_held_out_questions():
    loop = example("custom_loop")
    result = loop.main(["--steps", "110"])
    assert result["after"] > result["before"] + 0.1, result
    assert result["ratio_error"] < 1e-4, "the engine's log-probabilities are the policy's own"
    assert len((EXAMPLES / "custom_loop.py").read_text().splitlines()) < 150


def test_without_updates_of_the_engine_the_ratios_show_it(monkeypatch):
    """Sabotage: rollouts of a stale policy are seen in the loop's own check."""
    loop = example("custom_loop")
    monkeypatch.setattr(loop.RolloutEngine, "update_weights", lambda *args, **kwargs: None)
    assert loop.main(["--steps", "3"])["ratio_error"] > 1e-3


def test_training_is_the_same_to_the_bit_with_an_adapting_drafter_and_without(monkeypatch):
    """Rollouts, rewards, gradients: nothing of the policy's history knows of speculation."""
    policies = []

    def train(plain: bool, seed_shift: int = 0):
        loop = example("custom_loop")
        make = loop.new_policy
        loop.new_policy = lambda seed: policies.append(make(seed)) or policies[-1]
        if plain:
            off = SpeculationConfig(method="off")
            loop.new_engine = lambda policy, seed: (
                RolloutEngine(policy, EngineConfig(page_size=4, max_num_seqs=128, speculation=off)), NoDrafter())
        derive = loop.derive_seed
        loop.derive_seed = lambda run, step, uid: derive(run + seed_shift, step, uid)
        loop.main(["--steps", "6", "--drafter-budget", "0.05"])
        return policies[-1].state_dict()

    speculative, plain = train(plain=False), train(plain=True)
    assert all(torch.equal(speculative[n], plain[n]) for n in plain)
    other = train(plain=True, seed_shift=1)
    assert not all(torch.equal(other[n], plain[n]) for n in plain), "other noise trains another policy"


class NoDrafter:
    def train_drafter(self, budget_s):
        return {"accept_length": 1.0}


def test_its_reward_counts_the_right_prefix():
    loop = example("custom_loop")
    assert loop.reward((3, 5), [3, 4, 5, loop.EOS]) == 1
    assert loop.reward((3, 5), [3, 4, 4, loop.EOS]) == 0.5
    assert loop.reward((3, 5), [3, 4, 5]) == 0.75 and loop.reward((3, 5), [4]) == 0
    train, held_out = loop.questions(0)
    assert not set(train) & set(held_out) and len(train) + len(held_out) == 55


@pytest.mark.parametrize("options", [["--path", "official"], ["--lora"]])
def test_the_trl_program_runs(tmp_path, options):
    tiny_hf_model(vocab_size=32, max_position_embeddings=64, eos_token_id=1).save_pretrained(tmp_path / "model")
    words = tokenizer()
    words.save_pretrained(tmp_path / "model")
    program = example("grpo_trl")
    trainer = program.main([
        str(tmp_path / "model"), "--steps", "2", "--prompts", "8", "--max-tokens", "8", "--train", "32", "--test", "8",
        "--output", str(tmp_path / "out"), *options,
    ])
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(rewards) == 2


def test_its_questions_are_disjoint():
    train, test = example("grpo_trl").split_questions(200, 50, 0)
    texts = [{row["prompt"][0]["content"] for row in part} for part in (train, test)]
    assert len(texts[0]) == 200 and len(texts[1]) == 50 and not texts[0] & texts[1]
