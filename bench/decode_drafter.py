"""Whole engine steps with a learned drafter: the part `drafter` of bench.decode.

    PYTHONPATH=.:kernels python3 -m bench.decode --only drafter,drafter_trace --out DIR [--profiles 5_1_6,5_8_32]

An EAGLE-3 drafter of the target's own sizes with random weights and a draft vocabulary of 32000: nothing of what it
drafts is accepted but by chance, so a step is a verified step. Trees are full (min_chance 0). sd.on_device: share of
the steps that the device drafted by itself.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.decode import COMMAND, MODEL, NEW, PROMPT, start
from bench.results import record
from tlt_engine import EngineConfig, Profile, RolloutEngine, SpeculationConfig
from tlt_engine.engine.device import DeviceFlight, DeviceRunner
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import LoadedModel

DRAFT_VOCAB = 32000


def random_drafter(model: LoadedModel) -> EagleModel:
    target = model.model
    config = EagleConfig.for_target(target.config, draft_vocab_size=DRAFT_VOCAB)
    drafter = EagleModel(config, dtype=target.dtype, device=target.device)
    generator = torch.Generator(target.device).manual_seed(2)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    step = target.config.vocab_size // DRAFT_VOCAB
    drafter.set_vocabulary(torch.arange(DRAFT_VOCAB, device=target.device) * step)
    return drafter


def build(model: LoadedModel, drafter: EagleModel, batch: int, profile: Profile) -> RolloutEngine:
    spec = SpeculationConfig(method="learned", profile=profile, min_chance=0.0)
    pages = batch * -(-(PROMPT + NEW + 2 * profile.verify + 48) // 16)
    config = EngineConfig(
        dtype="bfloat16", device="cuda", max_num_seqs=batch, num_pages=pages, max_model_len=4096,
        max_num_batched_tokens=4096, seed=0, speculation=spec,
    )
    return RolloutEngine(model, config, drafter=drafter)


def parts_ms(engine: RolloutEngine, repeat: int = 20) -> dict[str, float]:
    """Milliseconds of the graphs of a step, each replayed back to back between CUDA events, on the inputs of the last
    step. `extend` goes on by a walk each time: what the engine emits afterwards is nobody's."""
    runner = engine._core.runner
    assert isinstance(runner, DeviceRunner) and runner._graphs is not None and runner._drafting is not None
    flight = runner._latest
    assert isinstance(flight, DeviceFlight) and flight.key is not None, "the last step did not run from a graph"
    found: dict[str, float] = {}
    for name, key in zip(("target", "extend", "levels"), (flight.key, *runner._drafting.keys(flight.key))):
        graph = runner._graphs.get(key, key.rows, capture=False)
        assert graph is not None, f"no graph {key}"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        graph.replay()
        begin.record()
        for _ in range(repeat):
            graph.replay()
        end.record()
        end.synchronize()
        found[name] = begin.elapsed_time(end) / repeat
    return found


def drafter(
    model: LoadedModel, profiles: Sequence[Profile], batches: Sequence[int], out: Path | None, *, traced: bool
) -> None:
    weights = random_drafter(model)
    for profile in profiles:
        for batch in batches:
            if batch * profile.verify > 256:
                continue
            engine = build(model, weights, batch, profile)
            start(engine, batch, 1.0)
            times, before = [], counts(engine)
            while engine.num_running == batch:
                begin = time.perf_counter()
                engine.step()
                times.append((time.perf_counter() - begin) * 1e3)
            times = times[:-2]
            after = counts(engine)
            while engine.has_unfinished():
                engine.step()
            keep(out, profile, batch, times, before, after)
            if traced:
                trace(build(model, weights, batch, profile), profile, batch)
            del engine
            torch.cuda.empty_cache()


def counts(engine: RolloutEngine) -> dict[str, Any]:
    stats = engine.stats()
    return {
        "steps": stats["steps"], "passes": stats["decode_passes"], "rows": stats["decode_rows"],
        "emitted": stats["emitted_tokens"], "drafted": stats["graphs"]["drafting"]["steps"],
        "refused": stats["graphs"]["drafting"]["refused"],
    }


def keep(
    out: Path | None, profile: Profile, batch: int, times: Sequence[float], before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    steps, passes = after["steps"] - before["steps"], after["passes"] - before["passes"]
    share = (after["drafted"] - before["drafted"]) / steps
    rows, length = (after["rows"] - before["rows"]) / passes, (after["emitted"] - before["emitted"]) / passes
    median = statistics.median(times)
    spread = [statistics.quantiles(times, n=20)[i] for i in (0, -1)]
    low, high = spread
    print(f"drafter {profile} batch {batch:3d}: {median:.3f} ms a step [{low:.3f}, {high:.3f}], {steps} steps, "
          f"{share:.0%} drafted on the device {after['refused'] or ''}, {rows:.1f} rows a pass, accept length "
          f"{length:.2f}", flush=True)
    where = MODEL | {"profile": str(profile), "batch": batch, "temperature": 1.0, "draft_vocab": DRAFT_VOCAB}
    record("drafter", "sd.ms", median, "ms", where, command=COMMAND, spread=spread, runs=len(times), folder=out)
    record("drafter", "sd.rows_a_pass", rows, "", where, command=COMMAND, runs=passes, folder=out)
    record("drafter", "sd.on_device", share, "", where, command=COMMAND, runs=steps, folder=out)


def trace(engine: RolloutEngine, profile: Profile, batch: int, steps: int = 20) -> None:
    """The step's graphs alone, and its kernels by time."""
    start(engine, batch, 1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    parts = parts_ms(engine)  # what the samples then emit is no longer theirs
    spent: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.time_range.end - event.time_range.start)
    launches = sum(map(len, spent.values())) / steps
    print(f"    {', '.join(f'{name} {ms:.3f}' for name, ms in parts.items())} ms; {launches:.0f} kernels a step")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:24]:
        print(f"    {sum(times) / steps:8.1f} us a step  {len(times) / steps:6.1f} x {statistics.median(times):6.1f} us"
              f"  {name[:90]}")


def profiles(text: str) -> list[Profile]:
    """Of "5_1_6,5_8_32"."""
    return [Profile(*map(int, one.split("_"))) for one in text.split(",")]

