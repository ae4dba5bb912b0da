"""The learned drafter: from zero on its target's own rollouts, and behind a policy that moves. What it costs is
bench.training's.

    python -m bench.drafter learns                                       # CPU: a tiny target, as in the tests
    python -m bench.drafter train --model MODEL [--minutes 10] [--out DIR]
    python -m bench.drafter table --model MODEL --drafter FOLDER [--temperatures 0,0.6,1]
    python -m bench.drafter shift --model MODEL --drafter FOLDER [--seeds 3]

learns: share of first drafts (K = 1, shared noise) that the target took on held-out prompts, untrained, trained, and of
bigram counts of the same rollouts. train: minutes from zero, then accept length by mode on test questions. shift:
accept length before the target moves, behind it, and won back.
MODEL: a folder or 'demo' (SmolLM2-135M-Instruct). Prompts: reasoning-gym products, chain_sum and gsm_symbolic, training
and test questions disjoint by their text; on a machine without it `--questions FILE`, which the part `questions` wrote.
bench/gpu_training.sh runs all of it. train writes the drafter to DIR/drafter for `shift` and bench.acceptance.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import measure, profile_of
from bench.results import record
from tlt_engine import EngineConfig, RolloutEngine, SpeculationConfig
from tlt_engine.cli.tasks import chat
from tlt_engine.cli.train_drafter import Settings, draw, train
from tlt_engine.models import load_model
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import LoadedModel
from tlt_engine.rl.adaptive import AdaptiveConfig
from tlt_engine.training.loss import LossConfig
from tlt_engine.training.records import DrawPolicy
from tlt_engine.training.trainer import TrainerConfig

COMMAND = "python -m bench.drafter"
TASKS: dict[str, dict[str, int]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "gsm_symbolic": {},
}
LOST, WON_BACK_S = 0.4, 60.0  # accept length a shift must cost; seconds of training to win it back
NEVER = 10**9  # large batches decode faster without speculation


def keep(
    out: Path | None, part: str, metric: str, value: float, unit: str, params: dict[str, Any], quiet: bool = False,
    **more: Any,
) -> None:
    if not quiet:
        print(f"{metric} {params}: {value:.5g} {unit}", flush=True)
    record("drafter", metric, value, unit, params, command=f"{COMMAND} {part}", folder=out, **more)


# ---------------------------------------------------------------- questions


def questions(train_each: int, test_each: int, seed: int) -> tuple[list[Any], list[Any], dict[str, int]]:
    """(training prompts, test prompts, distinct counts). Item i of a dataset is drawn from Random(seed + i), so one
    dataset a task, repeated questions dropped, cut in two."""
    from reasoning_gym import create_dataset

    train_part: list[list[Any]] = []
    test_part: list[Any] = []
    for name, settings in TASKS.items():
        wanted = train_each + test_each
        dataset = create_dataset(name, size=3 * wanted, seed=seed, **settings)
        texts = list(dict.fromkeys(entry["question"] for entry in dataset))
        if len(texts) < wanted:
            raise ValueError(f"{name}: expected {wanted} distinct questions, got {len(texts)}; ask for fewer")
        train_part.append([chat(t) for t in texts[:train_each]])
        test_part.extend(chat(t) for t in texts[train_each:wanted])
    mixed = [prompt for group in zip(*train_part) for prompt in group]  # every batch has all tasks
    return mixed, test_part, {"train_questions": len(mixed), "test_questions": len(test_part)}


def asked_of(args: argparse.Namespace) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The file's questions, or fresh ones."""
    if args.questions is None:
        return questions(args.train_each, args.test_each, args.seed)
    held = json.loads(args.questions.read_text())
    return held["train"], held["test"], held["counts"]


def part_questions(args: argparse.Namespace, out: Path | None) -> None:
    """For a machine without reasoning-gym."""
    train_part, test_part, counts = questions(args.train_each, args.test_each, args.seed)
    args.questions.write_text(json.dumps({"train": train_part, "test": test_part, "counts": counts}))
    print(counts)


def engine_for(loaded: LoadedModel, drafter: EagleModel, args: argparse.Namespace) -> RolloutEngine:
    model = loaded.model
    spec = SpeculationConfig(method="learned", profile=profile_of(args.profiles.split(",")[0]), min_chance=0.0)
    tokens = args.batch * min(args.max_tokens + 256, loaded.config.context_limit)
    return RolloutEngine(
        loaded, EngineConfig(dtype=str(model.dtype).removeprefix("torch."), device=model.device.type,
                             max_num_seqs=args.batch, num_pages=tokens // 16, max_num_batched_tokens=8192,
                             speculation=spec), drafter=drafter,
    )


def settings_of(args: argparse.Namespace, minutes: float, seed: int) -> Settings:
    return Settings(
        minutes=minutes, batch=args.round // args.n, n=args.n, temperature=1.0, max_tokens=args.max_tokens,
        profile=profile_of(args.profiles.split(",")[0]), draft_vocab=None, learning_rate=args.learning_rate,
        train_share=args.train_share, seed=seed,
    )


def config_of(args: argparse.Namespace, rate: float, seed: int) -> AdaptiveConfig:
    """Swaps at the end of each piece of training only: no rollout runs meanwhile. rate: of both learning rates."""
    loss = LossConfig(steps=args.unroll, decay=args.decay, chunk_elements=2**27)
    trainer = TrainerConfig(
        lr=rate * args.learning_rate, muon_lr=rate * args.muon_rate, weight_decay=args.weight_decay,
        micro_rows=args.micro_rows, loss=loss, seed=seed, draw=DrawPolicy(max_age=0, long_share=0.0),
    )
    return AdaptiveConfig(trainer=trainer, slice_ms=1000.0, buffer_bytes=args.buffer_gib * 2**30, publish_every=10**9)


def fresh(loaded: LoadedModel, seed: int, **shape: Any) -> EagleModel:
    model = EagleModel(EagleConfig.for_target(loaded.config, **shape), dtype=loaded.model.dtype,
                       device=loaded.model.device).bind(loaded.model)
    model.initialise(torch.Generator().manual_seed(seed))
    model.start_from_target()
    return model


# ---------------------------------------------------------------- from zero


def part_train(args: argparse.Namespace, out: Path | None) -> None:
    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    asked, test, counts = asked_of(args)
    shape = {} if args.units is None else {"intermediate_size": args.units}
    engine = engine_for(loaded, fresh(loaded, args.seed, **shape), args)
    settings, config = settings_of(args, args.minutes, args.seed), config_of(args, 1.0, args.seed)
    pieces = []
    for done in train(engine, asked, settings, drafting=NEVER, config=config):
        pieces.append(done)
        print({n: round(v, 3) for n, v in vars(done).items() if v}, flush=True)
    trained = engine.drafter.model  # type: ignore[union-attr]
    folder = (out or Path("out")) / "drafter"
    from tlt_engine.models.eagle_checkpoint import export_drafter

    export_drafter(trained, folder, to="sglang")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(folder.parent / "drafter.png", pieces)
    del engine
    where = {"model": args.model, "dtype": args.dtype, "tasks": sorted(TASKS), **counts}
    how = {"steps": pieces[-1].steps, "micro_rows": args.micro_rows, "tokens": sum(p.tokens for p in pieces),
           "rollout_s": round(sum(p.rollout_s for p in pieces), 1), "units": trained.config.intermediate_size}
    keep(out, "train", "train.minutes", pieces[-1].minutes, "min", where | how)
    table(args, out, loaded, trained, test, where)


def part_table(args: argparse.Namespace, out: Path | None) -> None:
    """Of a drafter that `train` wrote."""
    from tlt_engine.models.eagle_checkpoint import load_drafter

    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    _, test, counts = asked_of(args)
    where = {"model": args.model, "dtype": args.dtype, "tasks": sorted(TASKS), **counts}
    table(args, out, loaded, load_drafter(args.drafter, loaded.model), test, where)


def table(
    args: argparse.Namespace, out: Path | None, loaded: LoadedModel, trained: EagleModel, test: Sequence[Any],
    where: dict[str, Any],
) -> None:
    """Accept length on test questions by temperature, profile and mode."""
    for temperature in (float(t) for t in args.temperatures.split(",")):
        for profile in (profile_of(p) for p in args.profiles.split(",")):
            found = {}
            here = where | {"temperature": temperature, "D": profile.depth, "K": profile.top_k, "V": profile.verify}
            for mode in args.modes.split(","):
                begin = time.perf_counter()
                m = found[mode] = measure(
                    loaded, trained, test, mode, profile, temperature, n=args.test_n, max_tokens=args.max_tokens,
                    seed=args.seed + 1, batch=args.test_batch,
                )
                print(f"T={temperature} {profile} {mode}: {m.told}, {time.perf_counter() - begin:.1f} s", flush=True)
                for kind, value in m.kinds().items():
                    keep(out, "train", "accept_length", value, "tokens a pass", here | {"mode": mode, "kind": kind},
                         quiet=True)
                for depth, share in enumerate(m.per_position, 1):
                    keep(out, "train", "accept.by_depth", share, "share", here | {"mode": mode, "depth": depth},
                         quiet=True)
            if {"topk", "shared"} <= found.keys():
                keep(out, "train", "accept.shared_vs_topk", found["shared"].pooled / found["topk"].pooled, "x", here)


# ---------------------------------------------------------------- behind a moving policy


def part_shift(args: argparse.Namespace, out: Path | None) -> None:
    """Fine-tune the target on other text until the drafter has lost LOST; then train it on rollouts of the new policy.
    The frozen drafter is the one that was not trained again. Seeds run side by side, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.side_by_side, mp_context=context) as pool:
        shifts = list(pool.map(one_shift, [args] * args.seeds, range(args.seeds)))
    where = {"model": args.model, "dtype": args.dtype, "side_by_side": args.side_by_side, **asked_of(args)[2]}
    for seed, shift in enumerate(shifts):
        for stage in ("before", "frozen", "recovered"):
            keep(out, "shift", "shift.accept_length", getattr(shift, stage), "tokens a pass",
                 where | {"stage": stage, "seed": seed, "seconds": round(shift.seconds)})
    shares = [s.won_back for s in shifts]
    keep(out, "shift", "shift.recovered_share", statistics.median(shares), "",
         where | {"seeds": args.seeds, "seconds": round(max(s.seconds for s in shifts))},
         spread=[min(shares), max(shares)], runs=args.seeds)


@dataclass(frozen=True)
class Shift:
    """Accept lengths; seconds of rollouts and training after the shift."""

    before: float
    frozen: float
    recovered: float
    seconds: float

    @property
    def won_back(self) -> float:
        return (self.recovered - self.frozen) / (self.before - self.frozen)


def one_shift(args: argparse.Namespace, seed: int) -> Shift:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tlt_engine.models.eagle_checkpoint import load_drafter

    source = args.model
    if source == "demo":
        from tlt_engine.models.gguf import demo_model

        source = str(demo_model())
    asked, test, _ = asked_of(args)
    test = test[:: args.shift_every]
    loaded = load_model(source, dtype=args.dtype, device=args.device)
    drafter = load_drafter(args.drafter, loaded.model)
    accept = partial(_accept_length, loaded, test, args, seed)
    before = accept(drafter)
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(args.device)
    frozen = _move(policy, AutoTokenizer.from_pretrained(source), loaded, partial(accept, drafter), before, seed)
    del policy
    engine = engine_for(loaded, drafter, args)
    began = time.perf_counter()
    settings, config = settings_of(args, args.won_back_s / 60, seed), config_of(args, args.shift_rate, seed)
    for done in train(engine, asked, settings, drafting=NEVER, config=config):
        print(f"seed {seed}", {n: round(v, 3) for n, v in vars(done).items() if v is not None}, flush=True)
    seconds = time.perf_counter() - began
    shift = Shift(before, frozen, accept(engine.drafter.model), seconds)  # type: ignore[union-attr]
    print(f"seed {seed}: {shift}, {shift.won_back:.2f} of the loss won back", flush=True)
    return shift


def _accept_length(
    loaded: LoadedModel, test: Sequence[Any], args: argparse.Namespace, seed: int, model: EagleModel
) -> float:
    profile = profile_of(args.profiles.split(",")[0])
    return measure(loaded, model, test, "shared", profile, 1.0, n=args.test_n, max_tokens=256,
                   seed=args.seed + 7 * seed, batch=args.test_batch).pooled


def _move(policy: Any, tokenizer: Any, loaded: LoadedModel, accept: Any, before: float, seed: int) -> float:
    """Language modelling on the source text of Python's own library, step by step, until it costs the drafter enough.
    Returns the accept length then."""
    text = "\n".join(p.read_text(errors="ignore") for p in sorted(Path(statistics.__file__).parent.glob("[a-m]*.py")))
    ids = torch.tensor(tokenizer(text[: 1_000_000])["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5)
    lost = 0.0
    for step in range(1, 401):
        starts = torch.randint(0, len(ids) - 257, (8,), generator=generator)
        batch = torch.stack([ids[s : s + 257] for s in starts]).to(policy.device)
        loss = policy(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            loaded.model.load_weights(policy)
            now = accept()
            lost = before - now
            print(f"seed {seed}: fine-tuned {step} steps, loss {loss.item():.2f}, accept length {now:.2f}", flush=True)
            if lost >= LOST:
                return now
    raise RuntimeError(f"shift: expected the drafter to lose {LOST} within 400 steps, it lost {lost:.2f}")


def part_learns(args: argparse.Namespace, out: Path | None) -> None:
    from tests.training.test_learns import learned_from_scratch

    begin = time.perf_counter()
    found = learned_from_scratch()
    where = {"model": "tiny llama", "entropy": round(found.trained.entropy, 2)}
    for name, temperature in (("untrained", 1.0), ("bigram", 1.0), ("trained", 1.0), ("greedy", 0.0)):
        drafter = "trained" if name == "greedy" else name
        keep(out, "learns", "accept.first_draft", getattr(found, name).accepted, "share",
             where | {"drafter": drafter, "temperature": temperature})
    keep(out, "learns", "train.minutes", (time.perf_counter() - begin) / 60, "min", where)


PARTS = {"questions": part_questions, "learns": part_learns, "train": part_train, "table": part_table,
         "shift": part_shift}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--questions", type=Path, help="JSON file of questions, as the part `questions` writes it")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--profiles", default="5_8_32", help="the first one is the one that `shift` measures")
    parser.add_argument("--temperatures", default="1")
    parser.add_argument("--modes", default="topk,shared,merged,suffix")
    parser.add_argument("--train-each", type=int, default=1200, help="training questions a task")
    parser.add_argument("--test-each", type=int, default=24, help="test questions a task")
    parser.add_argument("--round", type=int, default=2048, help="samples of a round")
    parser.add_argument("--batch", type=int, default=256, help="samples at once")
    parser.add_argument("--n", type=int, default=4, help="samples a prompt")
    parser.add_argument("--test-n", type=int, default=4)
    parser.add_argument("--test-batch", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--muon-rate", type=float, default=1e-2, help="learning rate of the layer's matrices")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--train-share", type=float, default=1.5, help="seconds of training a second of rollouts")
    parser.add_argument("--micro-rows", type=int, default=4096)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--decay", type=float, default=0.8)
    parser.add_argument("--units", type=int, help="of the drafter's feed-forward layer (default: the target's)")
    parser.add_argument("--buffer-gib", type=int, default=6)
    parser.add_argument("--shift-rate", type=float, default=0.5, help="of the learning rates, behind the shift")
    parser.add_argument("--shift-every", type=int, default=2, help="of the test questions, one in so many")
    parser.add_argument("--won-back-s", type=float, default=WON_BACK_S)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side-by-side", type=int, default=1, help="seeds of `shift` that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if {"shift", "table"} & set(args.parts) and args.drafter is None:
        sys.exit("shift, table: --drafter FOLDER, as `train` writes it to OUT/drafter")
    for part in args.parts:
        PARTS[part](args, args.out)


if __name__ == "__main__":
    main()
