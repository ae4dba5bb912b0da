"""GRPO on reasoning-gym's products, with speculation and a drafter that follows the policy, and without.

    python -m bench.grpo identical [MODEL options] --steps 60 --out DIR    # (a) batch-invariant, deterministic trainer
    python -m bench.grpo reward --seeds 3 --steps 60 --out DIR             # (b) and (c): default bf16

identical: the SHA-256 of all token ids of each step with speculation + adapting drafter and without; both runs train on
their own rollouts, so one differing token would show in all steps behind it. reward: paired gap of the mean reward over
the last third of the steps (at most 20), with and without speculation, with its 95 % interval over seeds; every tenth
step 64 rollouts are generated again with speculation off under the same weights and compared. Times are of each phase.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.drafter import fresh
from bench.results import record
from tlt_engine import (
    EngineConfig,
    Profile,
    RequestOutput,
    RolloutEngine,
    SamplingParams,
    SpeculationConfig,
    derive_seed,
)
from tlt_engine.cli.tasks import chat, last_number
from tlt_engine.models import load_model
from tlt_engine.rl.adaptive import AdaptiveConfig, AdaptiveDrafter
from tlt_engine.training.trainer import TrainerConfig

COMMAND = "python -m bench.grpo"
GROUP = 8
PHASES = ("rollout", "train", "update", "drafter")
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # 97.5 %, by number of seeds


@dataclass
class Run:
    """One training run. seconds: by phase."""

    digests: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    regenerated: int = 0
    differing: int = 0


def questions(train: int, test: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    from reasoning_gym import create_dataset

    dataset = create_dataset("products", size=4 * (train + test), seed=seed * 100_000, min_terms=2, max_terms=2,
                             min_digits=1, max_digits=2)
    distinct = list({entry["question"]: entry["answer"] for entry in dataset}.items())
    random.Random(seed).shuffle(distinct)
    if len(distinct) < train + test:
        raise ValueError(f"products: expected {train + test} distinct questions, got {len(distinct)}; ask for fewer")
    return distinct[:train], distinct[train : train + test]


class Trainer:
    """GRPO in fp32, one clipped update a step, samples in micro-batches of one length class each."""

    def __init__(self, source: str, device: str, learning_rate: float, micro_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self.policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).train()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=learning_rate, weight_decay=0.0)
        self.micro_tokens = micro_tokens

    def step(self, outputs: Sequence[RequestOutput], rewards: torch.Tensor) -> None:
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten().tolist()
        rows = [(o.prompt_token_ids, s.token_ids, s.sampled_logprobs, a)
                for (o, s), a in zip(((o, s) for o in outputs for s in o.outputs), advantages) if a != 0]
        if not rows:
            return
        rows.sort(key=lambda r: len(r[0]) + len(r[1]))
        total = sum(len(r[1]) for r in rows)
        self.optimizer.zero_grad()
        while rows:
            width = len(rows[-1][0]) + len(rows[-1][1])
            count = max(self.micro_tokens // width, 1)
            (self._loss(rows[-count:]) / total).backward()
            del rows[-count:]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    def _loss(self, rows: Sequence[Any]) -> torch.Tensor:
        device = self.policy.device
        width = max(len(p) + len(a) for p, a, _, _ in rows)
        ids, old, weight = (torch.zeros(len(rows), width, dtype=d) for d in (torch.int64, torch.float32, torch.float32))
        for i, (prompt, answer, logprobs, advantage) in enumerate(rows):
            start, end = len(prompt), len(prompt) + len(answer)
            ids[i, :end] = torch.tensor([*prompt, *answer])
            old[i, start:end] = torch.tensor(logprobs)
            weight[i, start:end] = advantage
        ids, old, weight = ids.to(device), old.to(device)[:, 1:], weight.to(device)[:, 1:]
        logits = self.policy(ids).logits[:, :-1].float()
        new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = ((new - old) * (weight != 0)).exp()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum()


def run(
    args: argparse.Namespace, source: str, seed: int, *, speculate: bool, invariant: bool, adapt: bool = True
) -> Run:
    torch.manual_seed(seed)
    trainer = Trainer(source, args.device, args.learning_rate, args.micro_tokens)
    loaded = load_model(source, dtype=args.dtype, device=args.device)
    spec = SpeculationConfig(method="learned", profile=Profile(5, 4, 16), enable_below=args.enable_below) \
        if speculate else SpeculationConfig(method="off")
    engine = RolloutEngine(
        loaded, EngineConfig(dtype=args.dtype, device=args.device, max_num_seqs=args.prompts * GROUP, speculation=spec,
                             max_model_len=1024, batch_invariant=invariant),
        drafter=fresh(loaded, seed) if speculate else None,
    )
    adaptive = AdaptiveDrafter(engine, AdaptiveConfig(trainer=TrainerConfig(lr=1e-3))) if speculate else None
    train, _ = questions(args.questions, 0, 0)
    result = Run()
    for step in range(args.steps):
        asked = random.Random(derive_seed(seed, step, "questions")).sample(train, args.prompts)
        params = [SamplingParams(n=GROUP, max_tokens=args.max_tokens, seed=derive_seed(seed, step, question))
                  for question, _ in asked]
        clock = time.perf_counter()
        before = engine.spec_counts
        outputs = engine.generate([chat(q) for q, _ in asked], params)
        clock = _lap(result, "rollout", clock)
        after = engine.spec_counts
        result.accept_lengths.append((after.emitted - before.emitted) / max(after.passes - before.passes, 1))
        result.digests.append(digest(outputs))
        rewards = torch.tensor([[float(last_number(s.text) == a) for s in o.outputs]
                                for o, (_, a) in zip(outputs, asked)])
        result.rewards.append(rewards.mean().item())
        if speculate and not invariant and step % 10 == 0:
            _compare_plain(engine, asked[: 64 // GROUP], params, outputs, result)
            clock = time.perf_counter()
        trainer.step(outputs, rewards)
        clock = _lap(result, "train", clock)
        engine.update_weights(trainer.policy, weight_version=step + 1)
        clock = _lap(result, "update", clock)
        if adaptive is not None and (adapt or step == 0):
            adaptive.train_drafter(args.drafter_budget)
            _lap(result, "drafter", clock)
        print(f"seed {seed} {'on ' if speculate else 'off'} step {step}: reward {result.rewards[-1]:.3f}, "
              f"accept length {result.accept_lengths[-1]:.2f}", flush=True)
    return result


def _lap(result: Run, phase: str, since: float) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    now = time.perf_counter()
    result.seconds[phase] += now - since
    return now


def _compare_plain(
    engine: RolloutEngine, asked: Sequence[tuple[str, str]], params: Sequence[SamplingParams],
    outputs: Sequence[RequestOutput], result: Run,
) -> None:
    again = engine.generate([chat(q) for q, _ in asked], list(params[: len(asked)]), speculate=False)
    for one, other in zip(outputs, again):
        for a, b in zip(one.outputs, other.outputs):
            result.regenerated += len(b.token_ids)
            same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), None)
            result.differing += same is not None or len(a.token_ids) != len(b.token_ids)


def digest(outputs: Sequence[RequestOutput]) -> str:
    return hashlib.sha256(repr([s.token_ids for o in outputs for s in o.outputs]).encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("identical", "reward"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--questions", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    parser.add_argument("--drafter-budget", type=float, default=1.0, help="seconds of its training a step")
    parser.add_argument("--enable-below", type=int, default=64, help="speculate while at most this many samples run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    source = args.model
    if source == "demo":
        from tlt_engine.models.gguf import demo_model

        source = str(demo_model())
    where = {"model": args.model, "task": "products, 1 to 2 digits", "prompts": args.prompts, "group": GROUP,
             "max_tokens": args.max_tokens, "dtype": args.dtype, "steps": args.steps}

    def keep(metric: str, value: float, unit: str, params: dict[str, Any], **more: Any) -> None:
        print(f"{metric} {params}: {value:.5g} {unit}", flush=True)
        record("rl", metric, value, unit, where | params, command=f"{COMMAND} {' '.join(args.parts)}", folder=args.out,
               **more)

    if "identical" in args.parts:
        if args.device != "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
        invariant = args.device != "cpu"  # on the CPU fp32 is so by itself
        on = run(args, source, 0, speculate=True, invariant=invariant)
        off = run(args, source, 0, speculate=False, invariant=invariant)
        equal = sum(a == b for a, b in zip(on.digests, off.digests))
        keep("grpo.steps", len(on.digests), "", {"mode": "batch-invariant"})
        keep("grpo.steps_identical", equal, "", {"mode": "batch-invariant"})
        keep("grpo.rollout_speedup", off.seconds["rollout"] / on.seconds["rollout"], "x", {"mode": "batch-invariant"})
        for step in range(0, args.steps, max(args.steps // 6, 1)):
            keep("grpo.accept_length", on.accept_lengths[step], "tokens a pass", {"drafter": "adaptive", "step": step})
    if "reward" in args.parts:
        last = min(20, max(args.steps // 3, 1))
        gaps, off_means, speedups = [], [], []
        for seed in range(args.seeds):
            on = run(args, source, seed, speculate=True, invariant=False)
            off = run(args, source, seed, speculate=False, invariant=False)
            means = [statistics.fmean(r.rewards[-last:]) for r in (on, off)]
            gaps.append(means[0] - means[1])
            off_means.append(means[1])
            speedups.append(off.seconds["rollout"] / on.seconds["rollout"])
            keep("grpo.regenerated_differing", on.differing, "samples", {"seed": seed, "tokens": on.regenerated})
            for phase, seconds in on.seconds.items():
                keep("grpo.seconds", seconds, "s", {"seed": seed, "phase": phase, "speculation": True})
        half = STUDENT_T.get(len(gaps), 2.0) * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        keep("grpo.reward_gap", statistics.fmean(gaps), "", {"seeds": args.seeds, "last": last}, runs=len(gaps))
        keep("grpo.reward_gap_ci", half, "", {"seeds": args.seeds, "last": last}, runs=len(gaps))
        keep("grpo.off_spread", max(off_means) - min(off_means), "", {"seeds": args.seeds, "last": last})
        keep("grpo.rollout_speedup", statistics.median(speedups), "x", {"mode": "default"}, runs=len(speedups))
        frozen = run(args, source, 0, speculate=True, invariant=False, adapt=False)
        for step in range(0, args.steps, max(args.steps // 6, 1)):
            keep("grpo.accept_length", frozen.accept_lengths[step], "tokens a pass",
                 {"drafter": "frozen", "step": step})


if __name__ == "__main__":
    main()
