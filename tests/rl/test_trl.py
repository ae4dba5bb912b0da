"""TRL's GRPOTrainer, for real: full fine-tuning and LoRA, the official path and the one where TRL reads our
log-probabilities."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.rl.common import DIGITS, even_share, lora_config, policy, tokenizer
from tlt_engine import EngineConfig, RolloutEngine, SpeculationConfig
from tlt_engine.rl.trl import TRLRollouts, _groups

PROMPTS = [f"{a} {b}" for a in DIGITS[:4] for b in DIGITS[:2]]
CONFIG = EngineConfig(page_size=4, max_num_seqs=16, speculation=SpeculationConfig(method="model_free"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def make_trainer(tmp_path, model, *, lora: bool = False, steps: int = 3, conversational: bool = False, **fields):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollout_func = fields.pop("rollout_func", None)
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS] if conversational else PROMPTS
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
        max_steps=steps, learning_rate=5e-2 if lora else 5e-3, report_to=[], logging_steps=1, save_strategy="no",
        use_cpu=True, bf16=False, beta=0.0, temperature=1.0, disable_tqdm=True, **fields,
    )
    return GRPOTrainer(
        model=model, reward_funcs=even_share, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(), rollout_func=rollout_func, peft_config=lora_config() if lora else None,
    )


def rollouts_of(model, **more) -> TRLRollouts:
    return TRLRollouts(RolloutEngine(copy.deepcopy(model), CONFIG, tokenizer=tokenizer()), run_seed=1, **more)


def logged(trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_the_importance_ratio_is_one(tmp_path, peft):
    model = policy()
    base = {n: t.clone() for n, t in model.state_dict().items()}
    rollouts = rollouts_of(model)  # before the trainer: PEFT puts its layers into the model itself
    trainer = make_trainer(tmp_path, model, lora=peft == "lora", vllm_importance_sampling_correction=True)
    rollouts.attach(trainer)
    trainer.train()
    for kind in ("min", "mean", "max"):
        ratios = logged(trainer, f"sampling/importance_sampling_ratio/{kind}")
        assert len(ratios) == 3 and all(abs(r - 1) < 1e-4 for r in ratios), (kind, ratios)
    assert all(d < 1e-4 for d in logged(trainer, "sampling/sampling_logp_difference/max"))
    assert rollouts.engine.weight_version == "2"
    trained = {n.removeprefix("base_model.model.").replace(".base_layer", ""): t
               for n, t in trainer.model.state_dict().items() if "lora_" not in n}
    unchanged = [torch.equal(trained[n], t) for n, t in base.items()]
    assert all(unchanged) if peft == "lora" else not any(unchanged[1:3])
    served = rollouts.engine.weight_checksums()
    assert served != RolloutEngine(policy(), CONFIG).weight_checksums(), "the engine has followed the policy"


def test_a_shift_of_the_log_probabilities_is_seen(tmp_path):
    """Sabotage: TRL really reads what we return."""
    model = policy()
    trainer = make_trainer(tmp_path, model, vllm_importance_sampling_correction=True, steps=1)
    rollouts = rollouts_of(model)
    rollouts.attach(trainer)
    honest = rollouts.generate

    def shifted(*args, **kwargs):
        prompts, ids, logprobs, rest = honest(*args, **kwargs)
        return prompts, ids, [[[lp[0] - 0.5] for lp in seq] for seq in logprobs], rest

    rollouts.generate = shifted
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/mean")[0] == pytest.approx(0.5, abs=1e-3)


def test_stale_weights_are_seen(tmp_path):
    """Sabotage: an engine that never gets the new policy has ratios away from 1."""
    model = policy()
    trainer = make_trainer(tmp_path, model, vllm_importance_sampling_correction=True)
    rollouts = rollouts_of(model)
    rollouts.attach(trainer)
    rollouts.sync_weights = lambda: None
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 1e-2


@pytest.mark.parametrize("conversational", [False, True])
def test_the_official_path(tmp_path, conversational):
    model = policy()
    seen = []

    def reward(completions, accept_length, finish_reason, **_):
        seen.extend(zip(accept_length, finish_reason))
        return even_share(completions)

    rollouts = rollouts_of(model)
    trainer = make_trainer(tmp_path, model, rollout_func=rollouts, steps=2, conversational=conversational)
    trainer.reward_funcs = [reward]
    trainer.train()
    assert len(seen) == 16 and all(length >= 1 and why in ("stop", "length") for length, why in seen)
    assert len(logged(trainer, "reward")) == 2
    assert rollouts.engine.weight_version == "1"


def test_rollouts_do_not_depend_on_how_many_processes_share_them():
    """The seeds and sample indices of a batch cut in two are those of the batch whole, a group on the border too."""
    prompts = [[5, i // 4] for i in range(12)]

    def identity(part, offset):
        return [(g.index, g.first + k) for g in _groups(part, 4, offset) for k in range(g.count)]

    whole = identity(prompts, 0)
    assert identity(prompts[:6], 0) + identity(prompts[6:], 6) == whole
    assert len(set(whole)) == 12
    with pytest.raises(ValueError, match="4 times in a row"):
        list(_groups([[1], [2]], 4, 0))


def test_samples_of_a_step_differ_and_a_rerun_is_equal(tmp_path):
    def run():
        model = policy()
        rollouts = rollouts_of(model)
        trainer = make_trainer(tmp_path, model, rollout_func=rollouts, steps=2)
        ids = []
        call = rollouts.__call__
        trainer.rollout_func = lambda prompts, t: ids.append(call(prompts, t)["completion_ids"]) or call(prompts, t)
        trainer.train()
        return ids

    first, second = run(), run()
    assert first == second
    assert all(len({tuple(c) for c in step[:4]}) > 1 for step in first)


def test_the_policy_learns(tmp_path):
    model = policy()
    trainer = make_trainer(tmp_path, model, steps=12, vllm_importance_sampling_correction=True)
    rollouts_of(model).attach(trainer)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert math.fsum(rewards[-3:]) / 3 > math.fsum(rewards[:3]) / 3 + 0.05, rewards
