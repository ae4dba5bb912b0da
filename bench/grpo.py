"""GRPO on reasoning-gym's products, with speculation and a drafter that follows the policy, and without.

    python -m bench.grpo questions FILE                    # train and test questions, disjoint; needs reasoning-gym
    python -m bench.grpo identical --asked FILE --to RUNS  # (a) batch-invariant, deterministic trainer
    python -m bench.grpo reward --asked FILE --to RUNS     # (b), (c): default bf16, seeds x (adaptive, off), frozen
    python -m bench.grpo speed --asked FILE --to RUNS      # rollout seconds, alone on the GPU, one run after the other
    python -m bench.grpo run --asked FILE --to RUNS --mode default --drafter adaptive --seed 0        # one of them

identical and reward start their runs as processes side by side, as no time counts there; each writes RUNS/NAME.json
behind every step, so one that is cut short tells what it has. identical: the SHA-256 of all token ids of each step with
speculation + adapting drafter and without; both runs train on their own rollouts, so one differing token would show in
all steps behind it. reward: paired gap of the mean reward over the last third of the steps (at most 20), with and
without speculation, with its 95 % interval over seeds; every tenth step 64 rollouts are generated again with
speculation off under the same weights and compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

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
from tlt_engine.engine.equality import compare_runs
from tlt_engine.models import LoadedModel, load_model
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.rl.adaptive import AdaptiveConfig, AdaptiveDrafter
from tlt_engine.training.trainer import TrainerConfig

COMMAND = "python -m bench.grpo"
MODEL = "SmolLM2-135M-Instruct Q4_1, dequantised"
GROUP = 8
PHASES = ("rollout", "train", "update", "drafter")
COMPARED = 64  # samples generated again without speculation
STARTED = time.perf_counter()
CAPTURE = 0.25  # of the samples are recorded for the drafter: more than it can train on in its budget
NEAR = 0.1  # nats between the two best scores: what bf16 passes of different row counts may turn round
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # 97.5 %, by number of seeds
Questions = list[tuple[str, str]]  # question, answer


@dataclass
class Run:
    """One training run. steps: one entry each, as one_step returns it.
    compared: one entry for each step whose samples were generated again. held_out: reward before and behind it all."""

    mode: str
    drafter: str
    seed: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.drafter}-{self.seed}"

    def of(self, what: str) -> list[Any]:
        return [step[what] for step in self.steps]

    def seconds(self, phase: str, since: int = 0) -> float:
        return sum(step["seconds"].get(phase, 0.0) for step in self.steps[since:])

    def write(self, folder: Path) -> None:
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self)))


def read(folder: Path, mode: str, drafter: str, seed: int) -> Run:
    return Run(**json.loads((folder / f"{mode}-{drafter}-{seed}.json").read_text()))


# ---------------------------------------------------------------- questions


def write_questions(file: Path, entries: int) -> None:
    """The task's own mix, in which one-digit questions come again and again; every fifth distinct question is held out
    with all its repetitions."""
    from reasoning_gym import create_dataset

    dataset = create_dataset("products", size=entries, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
    pairs = [(entry["question"], entry["answer"]) for entry in dataset]
    distinct = list(dict.fromkeys(question for question, _ in pairs))
    test = set(random.Random(0).sample(distinct, len(distinct) // 5))
    parts = {"train": [p for p in pairs if p[0] not in test], "test": [p for p in pairs if p[0] in test]}
    file.write_text(json.dumps(parts))
    print({name: (len(part), len(set(map(tuple, part)))) for name, part in parts.items()}, "entries, distinct")


def drawn(train: Questions, count: int, seed: int, step: int) -> Questions:
    """Distinct within a step: noise is a function of the question's seed."""
    order = random.Random(derive_seed(seed, step, "questions")).sample(train, len(train))
    return list(dict(map(tuple, order)).items())[:count]


def rewards_of(asked: Questions, outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """[question, sample]"""
    return torch.tensor([[float(last_number(s.text) == answer) for s in o.outputs]
                         for o, (_, answer) in zip(outputs, asked)])


# ---------------------------------------------------------------- the trainer


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Inside the trainer's step alone: the engine's steps need no switch for it, and would pay for one."""
    if device == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Trainer:
    """GRPO, one clipped update a step, samples in micro-batches of like length. Weights and sums in fp32, products on a
    GPU in bf16."""

    def __init__(self, source: str, device: str, learning_rate: float, micro_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        self.policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).train()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=learning_rate, weight_decay=0.0)
        self.micro_tokens = micro_tokens
        self.device = device

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
        with deterministic(self.device):
            while rows:
                width = len(rows[-1][0]) + len(rows[-1][1])
                count = max(self.micro_tokens // width, 1)
                (self._loss(rows[-count:]) / total).backward()
                del rows[-count:]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.empty_cache()  # the other processes on the card have their training steps at other times

    def _loss(self, rows: Sequence[Any]) -> torch.Tensor:
        width = max(len(p) + len(a) for p, a, _, _ in rows)
        ids, old, weight = (torch.zeros(len(rows), width, dtype=d) for d in (torch.int64, torch.float32, torch.float32))
        for i, (prompt, answer, logprobs, advantage) in enumerate(rows):
            start, end = len(prompt), len(prompt) + len(answer)
            ids[i, :end] = torch.tensor([*prompt, *answer])
            old[i, start:end] = torch.tensor(logprobs)
            weight[i, start:end] = advantage
        ids, old, weight = ids.to(self.device), old.to(self.device)[:, 1:], weight.to(self.device)[:, 1:]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            logits = self.policy(ids, use_cache=False).logits[:, :-1]
        new = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = ((new - old) * (weight != 0)).exp()
        return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum()


# ---------------------------------------------------------------- one run


def run(args: argparse.Namespace, mode: str, drafter: str, seed: int) -> Run:
    """drafter: "adaptive", "frozen" (trained in the warm-up alone) or "off"."""
    result = Run(mode, drafter, seed)
    torch.manual_seed(seed)
    asked = json.loads(args.asked.read_text())
    trainer = Trainer(args.source, args.device, args.learning_rate, args.micro_tokens)
    engine, adaptive = build(args, mode, drafter, seed)
    if adaptive is not None and args.warm_s > 0:
        warm_up(args, engine, adaptive, asked["train"])
    result.held_out.append(held_out(args, engine, asked["test"], seed))
    for step in range(args.steps):
        if time.perf_counter() - STARTED > args.limit_s:
            break
        result.steps.append(one_step(args, result, engine, trainer, adaptive, asked["train"]))
        result.write(args.to)
        last = result.steps[-1]
        print(f"{result.name} step {step}: reward {last['reward']:.3f}, {last['tokens']} tokens, longest "
              f"{last['longest']}, {last['accepted']} from drafts, accept length {last['accept_length']:.2f}, "
              + ", ".join(f"{k} {v:.2f}" for k, v in last["seconds"].items()), flush=True)
    result.held_out.append(held_out(args, engine, asked["test"], seed + 1000))
    result.write(args.to)
    print(f"{result.name}: held out {result.held_out}, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
    return result


def build(
    args: argparse.Namespace, mode: str, drafter: str, seed: int
) -> tuple[RolloutEngine, AdaptiveDrafter | None]:
    loaded = load_model(args.source, dtype=args.dtype, device=args.device)
    off = drafter == "off"
    spec = SpeculationConfig(method="off") if off else SpeculationConfig(
        method="learned", profile=Profile(*args.profile), enable_below=args.enable_below)
    engine = RolloutEngine(
        loaded, EngineConfig(dtype=args.dtype, device=args.device, max_num_seqs=args.prompts * GROUP, speculation=spec,
                             max_model_len=1024, kv_cache_bytes=args.kv_mb * 2**20,
                             batch_invariant=mode == "invariant" and args.device != "cpu"),  # fp32 on a CPU is so
        drafter=None if off else fresh(loaded, seed),
    )
    adaptive = AdaptiveConfig(capture=CAPTURE, trainer=TrainerConfig(lr=2e-3, micro_rows=2048, capture=False))
    return engine, None if off else AdaptiveDrafter(engine, adaptive)


def fresh(loaded: LoadedModel, seed: int) -> EagleModel:
    model = EagleModel(EagleConfig.for_target(loaded.config), dtype=loaded.model.dtype, device=loaded.model.device)
    model.initialise(torch.Generator().manual_seed(seed))
    model.bind(loaded.model).start_from_target()
    return model


def params_of(args: argparse.Namespace, seed: int, step: int, asked: Questions) -> list[SamplingParams]:
    return [SamplingParams(n=GROUP, max_tokens=args.max_tokens, seed=derive_seed(seed, step, question))
            for question, _ in asked]


def warm_up(args: argparse.Namespace, engine: RolloutEngine, adaptive: AdaptiveDrafter, train: Questions) -> None:
    """The drafter learns the policy of step 0, so that "frozen" is a drafter and not noise."""
    asked = drawn(train, args.prompts, 0, -1)
    engine.generate([chat(q) for q, _ in asked], params_of(args, 0, -1, asked), speculate=False)
    print(adaptive.train_drafter(args.warm_s), flush=True)


def held_out(args: argparse.Namespace, engine: RolloutEngine, test: Questions, seed: int) -> float:
    asked = test[: args.test_questions]
    params = [SamplingParams(max_tokens=args.max_tokens, seed=derive_seed(seed, -2, i)) for i in range(len(asked))]
    return rewards_of(asked, engine.generate([chat(q) for q, _ in asked], params)).mean().item()


def one_step(
    args: argparse.Namespace, result: Run, engine: RolloutEngine, trainer: Trainer, adaptive: AdaptiveDrafter | None,
    train: Questions,
) -> dict[str, Any]:
    seed, step, seconds = result.seed, len(result.steps), {}
    asked = drawn(train, args.prompts, seed, step)
    prompts, params = [chat(q) for q, _ in asked], params_of(args, seed, step, asked)
    before, clock = engine.spec_counts, now()
    outputs = engine.generate(prompts, params)
    seconds["rollout"] = now() - clock
    after, rewards = engine.spec_counts, rewards_of(asked, outputs)
    if result.drafter != "off" and result.mode == "default" and step % 10 == 0:
        result.compared.append({"step": step} | compare_plain(engine, prompts, params, outputs))
    clock = now()
    trainer.step(outputs, rewards)
    seconds["train"] = now() - clock
    clock = now()
    engine.update_weights(trainer.policy, weight_version=step + 1)
    seconds["update"] = now() - clock
    if adaptive is not None and result.drafter == "adaptive":
        clock = now()
        adaptive.train_drafter(args.drafter_budget)
        seconds["drafter"] = now() - clock
    lengths = [len(s.token_ids) for o in outputs for s in o.outputs]
    return {"digest": digest(outputs), "reward": rewards.mean().item(), "tokens": sum(lengths), "longest": max(lengths),
            "drafted": after.drafted - before.drafted, "accepted": after.accepted - before.accepted,
            "accept_length": (after.emitted - before.emitted) / max(after.passes - before.passes, 1),
            "seconds": seconds}


def now() -> float:
    """Seconds, the device idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def compare_plain(
    engine: RolloutEngine, prompts: Sequence[Any], params: Sequence[SamplingParams], outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    count = COMPARED // GROUP
    again = engine.generate(prompts[:count], list(params[:count]), speculate=False)
    found = compare_runs(engine, again, outputs[:count], params[:count])
    margins = [abs(tie.margin) for tie in found.differences]
    return {"samples": found.samples, "tokens": found.tokens, "differing": found.tokens_differing,
            "first_differences": len(margins), "excused": found.excused_ties,
            "near": sum(margin <= NEAR for margin in margins), "margins": margins,
            "logprob_error": found.max_logprob_error}


def digest(outputs: Sequence[RequestOutput]) -> str:
    return hashlib.sha256(repr([s.token_ids for o in outputs for s in o.outputs]).encode()).hexdigest()


# ---------------------------------------------------------------- many runs


def side_by_side(argv: Sequence[str], runs: Sequence[tuple[str, str, int]]) -> None:
    """Each (mode, drafter, seed) in a process of its own. One that fails leaves the steps that it has done."""
    begun = [
        subprocess.Popen([sys.executable, "-m", "bench.grpo", "run", *argv, "--mode", mode, "--drafter", drafter,
                          "--seed", str(seed)])
        for mode, drafter, seed in runs
    ]
    failed = [name for name, process in zip(runs, begun) if process.wait() != 0]
    if failed:
        print(f"FAILED: {failed}", flush=True)


class Results:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._where = {"model": MODEL, "task": "products, 1 to 2 digits",
                       "prompts": args.prompts, "group": GROUP, "max_tokens": args.max_tokens, "dtype": args.dtype}

    def keep(self, metric: str, value: float, unit: str, params: dict[str, Any], **more: Any) -> None:
        print(f"{metric} {params}: {value:.5g} {unit}", flush=True)
        record("rl", f"grpo.{metric}", value, unit, self._where | params, command=f"{COMMAND} {self._args.what}",
               folder=self._args.out, **more)

    def accept_lengths(self, one: Run) -> None:
        lengths = one.of("accept_length")
        for step in range(0, len(lengths), max(len(lengths) // 6, 1)):
            self.keep("accept_length", lengths[step], "tokens a pass",
                      {"mode": one.mode, "drafter": one.drafter, "step": step})


def identical(args: argparse.Namespace) -> None:
    on, off = (read(args.to, "invariant", drafter, args.seed) for drafter in ("adaptive", "off"))
    both = list(zip(on.of("digest"), off.of("digest")))
    equal = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    where = {"mode": "batch-invariant"}
    results = Results(args)
    results.keep("steps", len(both), "", where)
    results.keep("steps_identical", equal, "", where)
    results.keep("tokens_identical", sum(on.of("tokens")[:equal]), "tokens", where)
    results.keep("tokens_from_drafts", sum(on.of("accepted")[:equal]), "tokens", where)
    results.accept_lengths(on)


def reward(args: argparse.Namespace) -> None:
    results, seeds = Results(args), range(args.seeds)
    pairs = [[read(args.to, "default", drafter, seed) for drafter in ("adaptive", "off")] for seed in seeds]
    steps = min(len(one.steps) for pair in pairs for one in pair)
    last = min(20, max(steps // 3, 1))
    means = [[statistics.fmean(one.of("reward")[steps - last : steps]) for one in pair] for pair in pairs]
    gaps = [on - off for on, off in means]
    half = STUDENT_T.get(len(gaps), 2.0) * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    where = {"mode": "default", "seeds": args.seeds, "steps": steps, "last": last}
    spread = [min(gaps), max(gaps)]
    results.keep("reward_gap", statistics.fmean(gaps), "", where, runs=len(gaps), spread=spread)
    results.keep("reward_gap_ci", half, "", where, runs=len(gaps))
    offs = [off for _, off in means]
    results.keep("off_spread", max(offs) - min(offs), "", where)
    for at, stage in ((0, "before"), (-1, "behind")):
        for i, drafter in enumerate(("adaptive", "off")):
            values = [pair[i].held_out[at] for pair in pairs]
            results.keep("held_out_reward", statistics.median(values), "", where | {"drafter": drafter, "stage": stage},
                         spread=[min(values), max(values)], runs=len(values))
    compared = [entry for on, _ in pairs for entry in on.compared]
    for what, unit in (("tokens", "tokens"), ("differing", "tokens"), ("samples", "samples"),
                       ("first_differences", "samples"), ("excused", "samples"), ("near", "samples")):
        more = {"near": NEAR} if what == "near" else {}
        results.keep(f"regenerated.{what}", sum(e[what] for e in compared), unit, where | more, runs=len(compared))
    results.accept_lengths(pairs[0][0])
    results.accept_lengths(read(args.to, "default", "frozen", 0))


def speed(args: argparse.Namespace) -> None:
    """The first step of a run compiles and captures; it does not count."""
    on, off = (run(args, args.mode, drafter, args.seed) for drafter in ("adaptive", "off"))
    results, where = Results(args), {"mode": args.mode, "steps": len(on.steps) - 1}
    results.keep("rollout_speedup", off.seconds("rollout", 1) / on.seconds("rollout", 1), "x", where)
    for one in (on, off):
        for phase in PHASES:
            results.keep("step_seconds", one.seconds(phase, 1) / (len(one.steps) - 1), "s",
                         where | {"drafter": one.drafter, "phase": phase})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("questions", "run", "identical", "reward", "speed"))
    parser.add_argument("file", nargs="?", type=Path, help="of `questions`")
    parser.add_argument("--asked", type=Path, help="what `questions` wrote")
    parser.add_argument("--to", type=Path, help="folder for the runs' own files")
    parser.add_argument("--out", type=Path, help="folder for rl.json (default: bench/results)")
    parser.add_argument("--model", default="demo", help="folder, GGUF file of SmolLM2, or 'demo'")
    parser.add_argument("--mode", choices=("default", "invariant"), default="default")
    parser.add_argument("--drafter", choices=("adaptive", "frozen", "off"), default="adaptive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="of a run's process; no step begins later")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--entries", type=int, default=4096, help="of `questions`")
    parser.add_argument("--test-questions", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--micro-tokens", type=int, default=3072)
    parser.add_argument("--kv-mb", type=int, default=1536)
    parser.add_argument("--profile", type=int, nargs=3, default=(3, 2, 4), metavar=("D", "K", "V"))
    parser.add_argument("--warm-s", type=float, default=8.0, help="seconds of the drafter's training before step 0")
    parser.add_argument("--drafter-budget", type=float, default=0.5, help="seconds of its training a step")
    parser.add_argument("--enable-below", type=int, default=64, help="speculate while at most this many samples run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    listed = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(listed)
    if args.what == "questions":
        write_questions(args.file, args.entries)
        return
    args.to.mkdir(parents=True, exist_ok=True)
    args.source = source_of(args.model)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need; read at first use
    if args.what == "run":
        run(args, args.mode, args.drafter, args.seed)
    elif args.what == "identical":
        side_by_side(listed[1:], [("invariant", drafter, args.seed) for drafter in ("adaptive", "off")])
        identical(args)
    elif args.what == "reward":
        pairs = [("default", drafter, seed) for seed in range(args.seeds) for drafter in ("adaptive", "off")]
        side_by_side(listed[1:], [*pairs, ("default", "frozen", 0)])
        reward(args)
    else:
        speed(args)


def source_of(model: str) -> str:
    from tlt_engine.models.gguf import FOLDER, cache_root, convert, demo_model

    if model == "demo":
        return str(demo_model())
    if not model.endswith(".gguf"):
        return model
    folder = cache_root() / FOLDER
    if not (folder / "config.json").is_file():
        convert(Path(model), folder)
    return str(folder)


if __name__ == "__main__":
    main()
