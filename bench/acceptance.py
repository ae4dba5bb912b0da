"""How many drafts are right: by drafting mode, temperature, profile, position in the output, and in loops or not.

    python -m bench.acceptance MODEL --drafter FOLDER [--task products] [--temperatures 0,0.6,1]
        [--profiles 5_4_16,5_8_32] [--modes topk,shared,suffix,merged] [--prompts N] [--n N] [--max-tokens N]
        [--device cuda] [--dtype bfloat16] [--out DIR]

A pass emits its accepted drafts and one bonus token. Accept length, bonus included, pooled: emitted tokens / passes;
mean: the mean over requests of their own; accepted / passes is the same without the bonus. By position: where in the
output the pass began. In loops: passes whose last 8 tokens stood before within the 64 tokens in front of them.
modes: topk, the K best of q (what SGLang and fastrl draft); shared, the K best of log q + noise; suffix, the model-free
drafter; merged, shared and suffix together. All modes emit the same tokens; what differs is how many passes it takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import record
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig, derive_seed
from tlt_engine.cli.tasks import identity, load_tasks, suited
from tlt_engine.models import load_model
from tlt_engine.models.eagle import EagleModel
from tlt_engine.models.loader import LoadedModel

MODES: dict[str, dict[str, Any]] = {
    "topk": {"method": "learned", "shared_noise": False, "ranking": "q"},
    "shared": {"method": "learned"},
    "suffix": {"method": "model_free"},
    "merged": {"method": "learned", "merge_model_free": True},
}
BORDERS = (128, 512, 2048)  # of output positions
GRAM, LOOK_BACK = 8, 64


@dataclass(frozen=True)
class PassSeen:
    """One verification pass of one sample. start: output tokens before it."""

    start: int
    accepted: int
    in_loop: bool


class Watched:
    """Stands before a drafter and notes what became of its drafts."""

    def __init__(self, drafter: Any) -> None:
        self.passes: list[PassSeen] = []
        self._observe = drafter.observe
        drafter.observe = self.observe

    def observe(self, context: Any, accepted: int) -> None:
        ids = context.token_ids
        start = len(ids) - accepted - 1
        self.passes.append(PassSeen(start - context.prompt_len, accepted, in_loop(ids[:start])))
        self._observe(context, accepted)


def in_loop(ids: Sequence[int]) -> bool:
    """The last GRAM tokens stood before, within the LOOK_BACK tokens in front of them."""
    last, before = list(ids[-GRAM:]), list(ids[-GRAM - LOOK_BACK : -1])
    return len(last) == GRAM and any(before[i : i + GRAM] == last for i in range(len(before) - GRAM + 1))


def length(passes: Sequence[PassSeen]) -> float:
    return 1 + sum(p.accepted for p in passes) / len(passes) if passes else 0.0


@dataclass(frozen=True)
class Measured:
    pooled: float
    mean: float
    per_position: list[float]
    by_position: dict[str, float]
    in_loops: float
    outside_loops: float
    loop_share: float
    tokens: int
    ids: list[list[int]]

    @property
    def told(self) -> str:
        by_depth, by_position = ([round(x, 3) for x in self.per_position],
                                 {k: round(x, 2) for k, x in self.by_position.items()})
        return (f"pooled {self.pooled:.3f}, mean {self.mean:.3f}, by depth {by_depth}, by position {by_position}, "
                f"in loops {self.in_loops:.2f} ({self.loop_share:.0%} of passes), outside {self.outside_loops:.2f}")

    def kinds(self) -> dict[str, float]:
        """What is recorded, by name."""
        return {"pooled": self.pooled, "mean": self.mean, "outside_loops": self.outside_loops, **self.by_position,
                **({"in_loops": self.in_loops} if self.loop_share else {})}


def measure(
    loaded: LoadedModel, drafter: EagleModel | None, prompts: Sequence[Any], mode: str, profile: Profile,
    temperature: float, *, n: int, max_tokens: int, seed: int, batch: int,
) -> Measured:
    spec = SpeculationConfig(profile=profile, min_chance=0.0, **MODES[mode])
    model = loaded.model
    engine = RolloutEngine(
        loaded, EngineConfig(dtype=str(model.dtype).removeprefix("torch."), device=model.device.type,
                             max_num_seqs=batch, speculation=spec),
        drafter=drafter if spec.method == "learned" else None,
    )
    watched = Watched(engine.drafter)
    params = [SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens, detokenize=False,
                             seed=derive_seed(seed, 0, identity(p))) for p in prompts]
    outputs = engine.generate(prompts, params)
    samples = [s for o in outputs for s in o.outputs]
    counts, seen = engine.spec_counts, watched.passes
    edges = list(zip((0, *BORDERS), BORDERS))
    loops = [p for p in seen if p.in_loop]
    return Measured(
        pooled=counts.accept_length, mean=statistics.fmean(s.spec.accept_length for s in samples),
        per_position=[a / d for a, d in zip(counts.accepted_per_position, counts.drafted_per_position) if d],
        by_position={
            f"{low}-{high}": length(part) for low, high in edges if (part := [p for p in seen if low <= p.start < high])
        },
        in_loops=length(loops), outside_loops=length([p for p in seen if not p.in_loop]),
        loop_share=len(loops) / max(len(seen), 1), tokens=counts.emitted, ids=[s.token_ids for s in samples],
    )


def profile_of(text: str) -> Profile:
    depth, top_k, verify = (int(part) for part in text.split("_"))
    return Profile(depth, top_k, verify)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", type=Path, help="a drafter's folder; without one only the mode suffix")
    parser.add_argument("--task", default="products")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--profiles", default="5_4_16,5_8_32")
    parser.add_argument("--modes", default="topk,shared,suffix,merged")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=9_000, help="of questions and noise: keep it apart from training's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)

    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    drafter = None
    if args.drafter is not None:
        from tlt_engine.models.eagle_checkpoint import load_drafter

        drafter = load_drafter(args.drafter, loaded.model)
    modes = [m for m in args.modes.split(",") if drafter is not None or m == "suffix"]
    prompts = suited(load_tasks(args.task, args.prompts, args.seed).questions, loaded.tokenizer)
    command = f"python -m bench.acceptance {args.model} --task {args.task}"
    for temperature in (float(t) for t in args.temperatures.split(",")):
        for text in args.profiles.split(","):
            profile = profile_of(text)
            found: dict[str, Measured] = {}
            for mode in modes:
                m = found[mode] = measure(
                    loaded, drafter, prompts, mode, profile, temperature, n=args.n, max_tokens=args.max_tokens,
                    seed=args.seed, batch=args.batch,
                )
                where = {"temperature": temperature, "mode": mode, "D": profile.depth, "K": profile.top_k,
                         "V": profile.verify, "task": args.task, "model": args.model, "dtype": args.dtype}
                print(f"T={temperature} {text} {mode}: {m.told}", flush=True)
                for kind, value in m.kinds().items():
                    record("drafter", "accept_length", value, "tokens a pass", where | {"kind": kind},
                           command=command, runs=1, folder=args.out)
            if {"topk", "shared"} <= found.keys():
                record("drafter", "accept.shared_vs_topk", found["shared"].pooled / found["topk"].pooled, "",
                       {"temperature": temperature, "V": profile.verify, "profile": text, "task": args.task,
                        "model": args.model, "dtype": args.dtype}, command=command, folder=args.out)
            if args.dtype == "float32":  # whatever drafts, the tokens are the same
                assert len({str(m.ids) for m in found.values()}) <= 1, "modes emitted different tokens"


if __name__ == "__main__":
    main()
