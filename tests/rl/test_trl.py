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
    fields.setdefault("per_device_train_batch_size", 8)
    config = GRPOConfig(
        output_dir=str(tmp_path), num_generations=4, max_completion_length=12,
        max_steps=steps, learning_rate=5e-2 if lora else 5e-3, report_to=[], logging_steps=1, save_strategy="no",
        use_cpu=True, bf16=False, beta=0.0, temperature=1.0, disable_tqdm=True, **fields,
    )
    return GRPOTrainer(
        model=model, reward_funcs=even_share, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:4]}) if "eval_strategy" in fields else None,
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
    rollouts._sync = lambda trainer: None
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

        def recorded(prompts, trainer):
            output = rollouts(prompts, trainer)
            ids.append(output["completion_ids"])
            return output

        trainer.rollout_func = recorded
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


def test_training_again_sends_the_weights_again(tmp_path):
    """A second train() counts its steps from 0, as the first one did when it sent the weights last."""
    model = policy()
    trainer = make_trainer(tmp_path, model, steps=1, vllm_importance_sampling_correction=True)
    rollouts = rollouts_of(model)
    rollouts.attach(trainer)
    trainer.train()
    trainer.train()
    assert all(d < 1e-4 for d in logged(trainer, "sampling/sampling_logp_difference/max"))
    fresh = RolloutEngine(policy(), CONFIG).weight_checksums()
    assert rollouts.engine.weight_checksums() != fresh


def test_turns_after_tools_are_a_group_each():
    """TRL asks for the samples that called a tool with num_generations=1: other prompts, any number of them."""
    from types import SimpleNamespace

    model = policy()
    rollouts = rollouts_of(model)
    rollouts.attach(trainer := make_trainer_stub(model))
    first = rollouts.generate([[5, 6]] * 4, None, 4)[1]
    after = [[5, 6, *ids, 7] for ids in first[:3]]
    prompts, ids, logprobs, _ = rollouts.generate(after, None, 1)
    assert prompts == after and [len(a) for a in ids] == [len(b) for b in logprobs] and all(ids)
    with pytest.raises(ValueError, match="4 times in a row"):
        rollouts.generate(after, None, 4)
    assert isinstance(trainer, SimpleNamespace)


def make_trainer_stub(model):
    from types import SimpleNamespace

    model.train()
    return SimpleNamespace(
        model=model, num_generations=4, num_generations_eval=4, temperature=1.0, top_p=1.0, top_k=0, min_p=None,
        repetition_penalty=1.0, max_completion_length=8, eos_token_ids=[1], use_vllm=False, vllm_mode="server",
        vllm_importance_sampling_correction=True, _generate_single_turn=None,
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(generation_kwargs=None),
        accelerator=SimpleNamespace(process_index=0, unwrap_model=lambda m: m),
    )


def test_failed_samples_do_not_reach_the_loss():
    """A policy that has diverged gives no distribution: TRL would train on what came before, or on nothing."""
    model = policy()
    rollouts = rollouts_of(model)
    rollouts.attach(make_trainer_stub(model))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="no valid distribution"):
        rollouts.generate([[5, 6]] * 4, None, 4)


def test_generation_settings_have_vllms_names_and_unknown_ones_are_named():
    model = policy()
    rollouts = rollouts_of(model, min_tokens=2)
    trainer = make_trainer_stub(model)
    trainer.args.generation_kwargs = {"presence_penalty": 0.5}
    rollouts.attach(trainer)
    assert all(len(ids) >= 2 for ids in rollouts.generate([[5, 6]] * 4, None, 4)[1])
    trainer.args.generation_kwargs = {"num_beams": 4}
    with pytest.raises(ValueError, match="num_beams"):
        rollouts.generate([[5, 6]] * 4, None, 4)


def test_evaluation_and_several_generations_a_step(tmp_path):
    """steps_per_generation below gradient_accumulation_steps: two batches are rolled out at one global step, and an
    evaluation with its own group size; none repeats another's noise, and all ratios are 1."""
    model = policy()
    trainer = make_trainer(
        tmp_path, model, steps=2, vllm_importance_sampling_correction=True, gradient_accumulation_steps=2,
        steps_per_generation=1, eval_strategy="steps", eval_steps=1, num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    rollouts = rollouts_of(model)
    rollouts.attach(trainer)
    seeds, generate = [], rollouts.engine.generate

    def recorded(prompts, params):
        seeds.append((trainer.model.training, trainer.state.global_step, tuple((p.seed, p.n) for p in params)))
        return generate(prompts, params)

    rollouts.engine.generate = recorded
    trainer.train()
    training = [s for s in seeds if s[0]]
    assert [step for _, step, _ in training] == [0, 0, 1, 1] and len(seeds) > len(training)
    every = [seed for _, _, call in seeds for seed, _ in call]
    assert len(set(every)) == len(every)
    assert all(n == (4 if mode else 2) for mode, _, call in seeds for _, n in call)
    assert all(d < 1e-4 for d in logged(trainer, "sampling/sampling_logp_difference/max"))


def test_a_resumed_training_rolls_out_what_the_unbroken_one_did(tmp_path):
    def run(resume: str | None) -> tuple[list, list[float]]:
        model = policy()
        rollouts = rollouts_of(model)
        trainer = make_trainer(tmp_path, model, steps=4, vllm_importance_sampling_correction=True)
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
        rollouts.attach(trainer)
        calls, generate = [], rollouts.generate

        def recorded(prompts, images, num_generations, profiler=None):
            out = generate(prompts, images, num_generations)
            calls.append((trainer.state.global_step, out[1]))
            return out

        rollouts.generate = recorded
        trainer.train(resume_from_checkpoint=resume)
        return calls, logged(trainer, "sampling/sampling_logp_difference/max")

    unbroken, _ = run(None)
    resumed, differences = run(str(tmp_path / "checkpoint-2"))
    assert [step for step, _ in resumed] == [2, 3] and resumed == unbroken[2:]
    assert all(d < 1e-4 for d in differences)
