"""One timed rollout of a list of prompts, with progress, and the figures that the commands print about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from tlt_engine.cli.show import note
from tlt_engine.cli.tasks import identity
from tlt_engine.config import EngineConfig, SamplingParams, SpeculationConfig
from tlt_engine.outputs import CompletionOutput, RequestOutput, SpecCounts
from tlt_engine.rng import derive_seed

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine

PROGRESS_EVERY = 0.1  # seconds between two looks at the counters
LINE_EVERY = 30.0  # seconds between two lines where no bar can move


@dataclass(frozen=True)
class Rollouts:
    """outputs in prompt order. seconds: wall time, prefill included; cpu_seconds: of all our threads, which other work
    on the machine changes little. running: samples in each step. passes: one request in one target forward, prefill
    included; rows: tokens those forwards computed. Counts are of this run alone."""

    outputs: list[RequestOutput]
    seconds: float
    cpu_seconds: float
    running: list[int]
    passes: int
    rows: int

    @property
    def samples(self) -> list[CompletionOutput]:
        return [sample for output in self.outputs for sample in output.outputs]

    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def tokens_per_s(self) -> float:
        """Useful tokens a second: those in the outputs, drafts that were not taken excluded."""
        return self.tokens / self.seconds

    @property
    def spec(self) -> SpecCounts:
        total = SpecCounts()
        for counts in (sample.spec for sample in self.samples):
            for name in ("passes", "rows", "drafted", "accepted", "emitted"):
                setattr(total, name, getattr(total, name) + getattr(counts, name))
            for name in ("drafted_per_position", "accepted_per_position"):
                setattr(total, name, _add(getattr(total, name), getattr(counts, name)))
        return total

    @property
    def accept_length(self) -> float:
        """Committed tokens a decode pass, bonus token included."""
        return self.spec.accept_length


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    size = max(len(left), len(right))
    padded = [[*counts, *[0] * (size - len(counts))] for counts in (left, right)]
    return [a + b for a, b in zip(*padded)]


def roll_out(
    engine: RolloutEngine, prompts: Sequence[Any], params: Sequence[SamplingParams], bars: Progress, title: str
) -> Rollouts:
    """Run all prompts to their ends, stepping the engine ourselves so that the bar moves."""
    total = sum(p.n for p in params)
    task = bars.add_task(title, total=total, tokens=0)
    before = engine.stats()
    start = looked = time.perf_counter()
    cpu_start = time.process_time()
    order = [engine.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step()}
        if (now := time.perf_counter()) - looked > (LINE_EVERY if bars.disable else PROGRESS_EVERY):
            looked, now_stats = now, engine.stats()
            done = sum(now_stats["finished"].values()) - sum(before["finished"].values())
            tokens = now_stats["emitted_tokens"] - before["emitted_tokens"]
            bars.update(task, completed=done, tokens=tokens)
            if bars.disable:
                note(f"{title}: {done} of {total} samples, {tokens:,} tokens, {now - start:.0f} s")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    after = engine.stats()
    bars.update(task, completed=total, tokens=after["emitted_tokens"] - before["emitted_tokens"])
    return Rollouts(
        outputs=[finished[request_id] for request_id in order],
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        running=after["running_per_step"][-(after["steps"] - before["steps"]) :],
        passes=after["passes"] - before["passes"],
        rows=after["rows"] - before["rows"],
    )


def warm_up(engine: RolloutEngine) -> None:
    """Get first-call costs (thread pools, allocator) out of the way, on a prompt that no run uses."""
    engine.generate([[1]], SamplingParams(max_tokens=4, seed=0, ignore_eos=True, detokenize=False))


def params_for(prompts: Sequence[Any], seed: int | None, **shared: Any) -> list[SamplingParams]:
    """One SamplingParams a prompt; its seed depends on the run seed and the prompt's content, not on its place."""
    seeds = [None if seed is None else derive_seed(seed, 0, identity(prompt)) for prompt in prompts]
    return [SamplingParams(seed=s, **shared) for s in seeds]


def pair_of_configs(dtype: str, device: str, method: str) -> tuple[EngineConfig, EngineConfig]:
    """(without, with) speculation, equal in everything else."""
    plain = EngineConfig(dtype=dtype, device=device, speculation=SpeculationConfig(method="off"))
    return plain, EngineConfig(dtype=dtype, device=device, speculation=SpeculationConfig(method=method))
