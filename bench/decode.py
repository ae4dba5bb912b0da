"""Whole engine steps of a 7B model on one GPU: plain decoding, verification, host gap, memory of the graphs.

    PYTHONPATH=.:kernels python3 -m bench.decode --out DIR [--only plain,verify,profile,graphs,switches,drafter]

The geometry of Qwen2.5-7B (bf16, 14.14 GB of weights read a step) with random weights, prompts of 128 random tokens,
144 new ones. A step is RolloutEngine.step(): schedule, pass, draw, walk, commit, stops, outputs.
Times are medians of its wall time once all requests decode. host.us: what is left of that when the same work is
launched back to back on the GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.results import record
from tlt_engine import DraftTree, EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.device import DeviceFlight, DeviceRunner
from tlt_engine.engine.sample import Request, Sample
from tlt_engine.graphs.buckets import NODES, GraphKey, default_buckets
from tlt_engine.graphs.cache import Graph
from tlt_engine.graphs.capture import CapturedGraph, Capturer
from tlt_engine.models.config import ModelConfig
from tlt_engine.models.loader import LoadedModel
from tlt_engine.models.rope import RopeConfig
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import LoadReport
from tlt_engine.outputs import CompletionOutput
from tlt_engine.scheduler.sequence import Batch, Decode
from tlt_engine.scheduler.sequence import Sequence as DecodingSequence
from tlt_engine.types import StepOutputs

COMMAND = "python -m bench.decode"
PROMPT, NEW, WARM = 128, 144, 16
OFF = SpeculationConfig(method="off")
MODEL = {"geometry": "Qwen2.5-7B", "dtype": "bf16", "prompt": PROMPT, "new": NEW}


QWEN_7B = ModelConfig(
    architecture="qwen2", hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
    head_dim=128, vocab_size=152064, rms_norm_eps=1e-6, tie_word_embeddings=False, qkv_bias=True, o_bias=False,
    mlp_bias=False, qk_norm=False, rope=RopeConfig(theta=1e6, rotary_dim=128), windows=(0,) * 28,
    max_position_embeddings=32768,
)
SMALL = replace(
    QWEN_7B, hidden_size=1024, intermediate_size=2816, num_layers=4, num_heads=8, num_kv_heads=2, vocab_size=32000,
    windows=(0,) * 4,
)


def qwen_7b(max_model_len: int = 4096) -> LoadedModel:
    return random_model(QWEN_7B, max_model_len)


def random_model(config: ModelConfig, max_model_len: int) -> LoadedModel:
    model = Transformer(config, dtype=torch.bfloat16, device="cuda", max_model_len=max_model_len)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, weight in model.named_weights():
        if "norm" in name:
            weight.fill_(1.0)
        else:  # products keep the size of their input, so that logits spread as a real model's do
            weight.normal_(0.0, weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1, generator=generator)
    return LoadedModel(model, config, None, (), LoadReport(()))


class FullTrees:
    """Trees of `nodes` nodes at no cost to speak of: made once, the root replaced. Random tokens: hardly one is right,
    so that every step verifies a full tree and emits one token."""

    def __init__(self, nodes: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._drafts = tuple(torch.randint(0, vocab, (nodes - 1,), generator=generator).tolist())
        self._parents = (-1, *((i - 1) // 3 for i in range(1, nodes)))

    def propose(self, contexts: Sequence[Any]) -> list[DraftTree]:
        trees = []
        for c in contexts:
            keep = c.max_nodes if c.max_depth >= 4 else 1
            trees.append(DraftTree.trusted((c.token_ids[-1], *self._drafts[: keep - 1]), self._parents[:keep]))
        return trees

    def observe(self, context: Any, accepted: int) -> None: ...

    def finish(self, seq_id: int) -> None: ...

    def memory_bytes(self) -> int:
        return 0


def build(model: LoadedModel, batch: int, nodes: int = 1, **config: Any) -> RolloutEngine:
    """nodes > 1: every step verifies a tree of that size."""
    spec = OFF if nodes == 1 else SpeculationConfig(method="custom", profile=Profile(4, 3, nodes))
    pages = batch * -(-(PROMPT + NEW + 2 * nodes + 32) // 16)
    return RolloutEngine(
        model, EngineConfig(dtype="bfloat16", device="cuda", max_num_seqs=batch, num_pages=pages, max_model_len=4096,
                            max_num_batched_tokens=4096, seed=0, speculation=spec, **config),
        drafter=FullTrees(nodes, 152064) if nodes > 1 else None,
    )


def start(engine: RolloutEngine, batch: int, temperature: float) -> None:
    """Queue the batch and step until all of it decodes and is warm."""
    generator = torch.Generator().manual_seed(1)
    for i in range(batch):
        prompt = torch.randint(0, 152064, (PROMPT,), generator=generator).tolist()
        engine.add_request(prompt, SamplingParams(temperature=temperature, max_tokens=NEW, seed=i, ignore_eos=True))
    for _ in range(WARM):
        engine.step()


@dataclass(frozen=True)
class Times:
    """steps: milliseconds of each step in which all requests decode; the last two are left out: nothing follows them.
    graph, device: of one step on the GPU, see device_ms."""

    steps: list[float]
    graph: float
    device: float

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> list[float]:
        """5 % and 95 %."""
        return [statistics.quantiles(self.steps, n=20)[i] for i in (0, -1)]

    def __str__(self) -> str:
        low, high = self.spread
        host = (self.median - self.device) * 1e3
        return (f"{self.median:.3f} ms a step [{low:.3f}, {high:.3f}], graph {self.graph:.3f}, GPU {self.device:.3f}, "
                f"host {host:.0f} us")


def step_times(engine: RolloutEngine, batch: int, temperature: float) -> Times:
    start(engine, batch, temperature)
    times: list[float] = []
    graph = device = float("nan")
    while engine.num_running == batch:
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
        if len(times) == 60:
            graph, device = device_ms(engine)
    while engine.has_unfinished():
        engine.step()
    return Times(times[:60] + times[63:-2], graph, device)


def device_ms(engine: RolloutEngine, repeat: int = 20) -> tuple[float, float]:
    """Milliseconds of the last step's graph alone, and with its draw, walk, commit and the copy of the results: both
    launched back to back, between CUDA events. (What the samples then emit is no longer theirs; the shapes are.)"""
    runner = engine._core.runner
    assert isinstance(runner, DeviceRunner) and runner._graphs is not None
    flight = runner._latest
    assert flight is not None and flight.key is not None, "the last step did not run from a graph"
    graph = runner._graphs.get(flight.key, len(flight.draw.view.trees.tokens), capture=False)
    assert graph is not None
    logits = runner._logits[: len(flight.draw.view.trees.tokens)]

    def timed(draw: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        graph.replay()  # the first launch's latency stays out
        begin.record()
        for _ in range(repeat):
            graph.replay()
            if draw:
                runner._draw(flight.layout, flight.key, flight.draw, StepOutputs(logits), [], False)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeat

    return timed(False), timed(True)


class Watched:
    """The event of a step's results, which notes when they were there."""

    def __init__(self, event: torch.cuda.Event, moments: list[tuple[str, float]]) -> None:
        self._event, self._moments = event, moments

    def synchronize(self) -> None:
        self._event.synchronize()
        self._moments.append(("read", time.perf_counter()))


def read_to_launch(engine: RolloutEngine, batch: int, steps: int = 60) -> list[float]:
    """Microseconds from the read of a verification's tokens to the end of the next graph's launch, sorted: what the GPU
    waits for in the host's code and driver. Other than a difference of step times, it knows no clocks."""
    moments: list[tuple[str, float]] = []
    runner = engine._core.runner
    assert isinstance(runner, DeviceRunner)
    start(engine, batch, 1.0)
    fetch, replay = runner._results.fetch, CapturedGraph.replay

    def launched(graph: CapturedGraph) -> None:
        replay(graph)
        moments.append(("launch", time.perf_counter()))

    with (
        patch.object(runner._results, "fetch", lambda frame: Watched(fetch(frame), moments)),
        patch.object(CapturedGraph, "replay", launched),
    ):
        for _ in range(steps):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    return sorted((after - at) * 1e6 for (what, at), (then, after) in pairwise(moments)
                  if (what, then) == ("read", "launch"))


def plain(model: LoadedModel, batches: Sequence[int], out: Path) -> dict[int, float]:
    medians: dict[int, float] = {}
    for batch in batches:
        engine = build(model, batch)
        for temperature in (0.0, 1.0):
            times = step_times(engine, batch, temperature)
            print(f"plain  batch {batch:3d} T={temperature:.0f}: {times}", flush=True)
            medians.setdefault(batch, times.median)
            where = MODEL | {"batch": batch, "temperature": temperature}
            keep(out, "ar.ms", times.median, "ms", where, times)
            keep(out, "host.us", max(times.median - times.device, 0.0) * 1e3, "us", where | {"V": 1}, times)
        del engine
    return medians


def verify(model: LoadedModel, cases: Sequence[tuple[int, int]], base: dict[int, float], out: Path) -> None:
    for batch, nodes in cases:
        engine = build(model, batch, nodes)
        for temperature in (0.0, 1.0):
            times = step_times(engine, batch, temperature)
            stats = engine.stats()
            rows = stats["decode_rows"] / max(stats["decode_passes"], 1)
            print(f"verify batch {batch:3d} V={nodes} T={temperature:.0f}: {times}; {rows:.1f} rows a pass, accept "
                  f"length {stats['accept_length']:.2f}", flush=True)
            where = MODEL | {"batch": batch, "V": nodes, "temperature": temperature}
            keep(out, "verify.ms", times.median, "ms", where, times)
            keep(out, "host.us", max(times.median - times.device, 0.0) * 1e3, "us", where, times)
            if batch in base:
                record("gpu", "verify.ratio", times.median / base[batch], "x", where, command=COMMAND, folder=out)
        gaps = read_to_launch(engine, batch)
        print(f"verify batch {batch:3d} V={nodes}: {statistics.median(gaps):.0f} us from the tokens' read to the next "
              f"launch [{gaps[0]:.0f}, {gaps[-1]:.0f}]", flush=True)
        record("gpu", "host.read_to_launch_us", statistics.median(gaps), "us", MODEL | {"batch": batch, "V": nodes},
               command=COMMAND, spread=[gaps[0], gaps[-1]], runs=len(gaps), folder=out)
        del engine


def keep(out: Path, metric: str, value: float, unit: str, where: dict[str, Any], times: Times) -> None:
    spread = times.spread if unit == "ms" else None
    record("gpu", metric, value, unit, where, command=COMMAND, spread=spread, runs=len(times.steps), folder=out)


def busy(model: LoadedModel, batch: int, nodes: int, out: Path, steps: int = 30) -> None:
    """Where a step's time goes on the GPU, from a profiler's trace. The profiler itself slows launches, of graphs too:
    the idle time here is an upper bound, host.us the figure."""
    engine = build(model, batch, nodes)
    start(engine, batch, 1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in trace.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    # Each step ends with one copy to the host; whole steps lie between the first such copy and the last.
    copies = [i for i, (_, _, name) in enumerate(spans) if "DtoH" in name]
    steps_of = [spans[i + 1 : j + 1] for i, j in pairwise(copies)]
    ends = [spans[i][1] for i in copies]
    periods = [after - before for before, after in pairwise(ends)]
    gaps = [period - covered(step, end) for step, period, end in zip(steps_of, periods, ends)]
    period, gap, whole = statistics.median(periods), statistics.median(gaps), len(steps_of)
    per_kernel: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in spans[copies[0] + 1 : copies[-1] + 1]:
        per_kernel[name].append(end - begin)
    launches = sum(map(len, steps_of)) / whole
    print(f"trace  batch {batch:3d} V={nodes}: period {period / 1e3:.3f} ms, idle {gap:.0f} us [{min(gaps):.0f}, "
          f"{max(gaps):.0f}], {launches:.0f} launches a step", flush=True)
    for name, times in sorted(per_kernel.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"    {sum(times) / whole:8.1f} us a step  {len(times) / whole:6.1f} x {statistics.median(times):6.1f} us"
              f"  {name[:90]}")
    where = MODEL | {"batch": batch, "V": nodes}
    record("gpu", "host.trace_idle_us", gap, "us", where, command=COMMAND, spread=[min(gaps), max(gaps)], runs=whole,
           folder=out)
    record("gpu", "host.syncs_per_step", len(copies) / (whole + 1), "", where, command=COMMAND, folder=out)
    del engine


def covered(spans: Sequence[tuple[float, float, str]], begin: float) -> float:
    """Microseconds after `begin` in which at least one of the spans, sorted, runs."""
    running, reach = 0.0, begin
    for start_, end, _ in spans:
        running += max(end - max(start_, reach), 0.0)
        reach = max(reach, end)
    return running


def graph_memory(out: Path) -> None:
    """Bytes of all graphs by the driver's count, and of the static inputs and logits that they share: ours, the largest
    V alone, and every graph with a pool and static tensors of its own. Each in a fresh process, in which every pass has
    run once before: modules and workspaces are none of the graphs' doing."""
    totals: dict[str, dict[str, float]] = {}
    for name in ("bucketed", "single", "unshared"):
        done = subprocess.run(
            [sys.executable, "-m", "bench.decode", "--only", f"graphs:{name}"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"graphs:{name}: {done.stderr[-2000:]}")
        totals[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"graphs {name}: {totals[name]}", flush=True)
    ours = totals["bucketed"]
    where = MODEL | {"graphs": ours["graphs"]}
    record("gpu", "graphs.gb", ours["bytes"] / 1e9, "GB", where, command=COMMAND, folder=out)
    record("gpu", "graphs.capture_s", ours["seconds"], "s", where, command=COMMAND, folder=out)
    for what in ("bucketed", "unshared"):
        record("gpu", "graphs.ratio", totals[what]["bytes"] / totals["single"]["bytes"], "x",
               MODEL | {"over": "single", "what": what}, command=COMMAND, folder=out)


def one_graph_memory(model: LoadedModel, name: str) -> None:
    engine = build(model, 256, 64)
    runner = engine._core.runner
    assert isinstance(runner, DeviceRunner) and runner._graphs is not None
    keys = default_buckets(256, 64).keys
    wanted = [k for k in keys if name != "single" or k.nodes == NODES[-1]]
    runner._graphs.buckets.keys = tuple(wanted)
    capturer = runner._capturer
    begin = time.perf_counter()
    for key in keys:
        layout = runner._layout_of(key)
        runner._staging.begin(layout.frame)
        layout.clear()
        runner._staging.flush(layout.frame, 0, 0)
        with torch.cuda.stream(capturer._stream):
            runner._pass.forward(layout.inputs, logits_out=runner._logits[: key.rows])
        torch.cuda.synchronize()
    warm = time.perf_counter() - begin
    before, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
    static = runner._logits.nbytes + runner._staging.bytes
    if name == "unshared":
        kept = []
        for key in wanted:
            runner._capturer = Capturer(runner.device)
            kept.append((runner._capturer, runner._capture(key)))
        static = len(wanted) * runner._staging.bytes + sum(k.rows for k in wanted) * runner._logits[0].nbytes
    else:
        engine.capture_graphs()
    seconds = time.perf_counter() - begin
    used = before - torch.cuda.mem_get_info()[0] + static
    print(json.dumps({"graphs": len(wanted), "bytes": used, "static": static, "seconds": seconds, "warm": warm}))


def switches(out: Path, count: int = 10_000, compare_every: int = 20) -> None:
    """Random steps through all graphs of an engine of 256 samples and 64 nodes, each in another graph than the one
    before, while a budget for 32 of the 38 throws the least recently used out. Every step must draw valid tokens; every
    20th graph's logits must be those of an eager pass over the same inputs, bit for bit."""
    engine = build(random_model(SMALL, 4096), 256, 64)
    runner = engine._core.runner
    assert isinstance(runner, DeviceRunner) and runner._graphs is not None
    graphs = runner._graphs
    capture, sizes = graphs._capture, len(graphs.buckets.keys)

    def counted(key: GraphKey) -> Graph:
        """As a byte: by the driver's count the first one pays for the pool, and most of the others nothing."""
        graph = capture(key)
        graph.bytes = 1
        return graph

    graphs._capture, graphs.budget = counted, 32
    runner.kv.data.normal_()
    rng = random.Random(0)
    samples = [decoding_sample(i, rng, runner.page_size) for i in range(256)]
    begin, last, compared = time.perf_counter(), None, 0
    for step in range(count):
        key = rng.choice([k for k in graphs.buckets.keys if k is not last])
        chosen, rows = rng.sample(samples, key.batch), key.rows - rng.randrange(key.nodes)
        if graphs.buckets.choose(key.batch, rows) is not key:  # so much padding that another graph holds it
            rows = key.rows
        batch, trees = ragged_trees(chosen, rows, rng)
        flight = runner.launch(batch, trees, chosen)
        assert isinstance(flight, DeviceFlight) and flight.key == key, f"step {step}: not a flight of {key}"
        tokens = [emitted.tokens for emitted in flight.result().emitted]
        assert min(map(min, tokens)) >= 0, f"step {step}, {key}: no valid distribution"
        if step % compare_every == 0:
            by_graph = runner._logits[:rows].clone()
            with torch.inference_mode():
                runner._pass.forward(flight.layout.inputs, logits_out=runner._logits[: key.rows])
            assert torch.equal(by_graph, runner._logits[:rows]), f"step {step}, {key}: not the eager pass's logits"
            compared += 1
        last = key
    seconds, report = time.perf_counter() - begin, graphs.report()
    evicted = sum(b["evictions"] for b in report["buckets"].values())
    assert graphs.bytes <= graphs.budget and evicted > 0 and not report["refused"] and not report["eager_steps"]
    print(f"switches: {count} through {sizes} graphs in {seconds:.1f} s, {evicted} evictions, {compared} compared with "
          f"eager passes, {graphs.capture_seconds:.1f} s of captures", flush=True)
    where = {"geometry": "4 layers of 1024", "dtype": "bf16", "graphs": sizes, "kept": 32}
    record("gpu", "graphs.switches", count, "", where, command=COMMAND, folder=out)
    record("gpu", "graphs.switch_evictions", evicted, "", where, command=COMMAND, folder=out)
    record("gpu", "graphs.switch_compared", compared, "", where, command=COMMAND, folder=out)


def decoding_sample(index: int, rng: random.Random, page_size: int) -> Sample:
    """With KV of random length on pages of its own, as many as any tree of 64 nodes needs."""
    width = -(-(200 + 64) // page_size)
    params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=index)
    seq = DecodingSequence(index, "", params, [0], 1, 4096, key=index, sample=0, kv_len=rng.randint(1, 200))
    seq.pages = list(range(index * width, (index + 1) * width))
    seq.token_ids = [rng.randrange(SMALL.vocab_size) for _ in range(seq.kv_len + 1)]
    return Sample(Request(str(index), "", None, [0], 0, params), seq, CompletionOutput(0, "", [], []))


def ragged_trees(samples: Sequence[Sample], rows: int, rng: random.Random) -> tuple[Batch, list[DraftTree]]:
    """A tree for each, of random sizes up to 64 nodes that add up to `rows`."""
    sizes = [1] * len(samples)
    while (left := rows - sum(sizes)) > 0:
        i = rng.randrange(len(samples))
        sizes[i] += min(left, 64 - sizes[i], rng.randint(1, 2 * rows // len(samples)))
    trees = []
    for size in sizes:
        parents = (-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, size)))
        trees.append(DraftTree.trusted(tuple(rng.sample(range(SMALL.vocab_size), size)), parents))
    return Batch([Decode(s.seq, size) for s, size in zip(samples, sizes)], [], [], []), trees


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json (default: bench/results)")
    parser.add_argument("--only", default="plain,verify,profile,graphs")
    parser.add_argument("--batches", default="1,64,8,4,16,32")
    parser.add_argument("--cases", default="1x32,8x16,64x4,1x16,4x16")
    parser.add_argument("--profiles", default="5_1_6,5_8_32", help="of `drafter`: depth, top_k and nodes to verify")
    parser.add_argument("--drafter-batches", default="1,8,32")
    args = parser.parse_args(argv)
    parts, begin = args.only.split(","), time.perf_counter()
    if parts == ["switches"]:
        switches(args.out)
        return
    model = qwen_7b()
    if parts[0].startswith("graphs:"):
        one_graph_memory(model, parts[0].removeprefix("graphs:"))
        return
    torch.cuda.synchronize()
    print(f"weights {model.model.weights.bytes / 1e9:.2f} GB after {time.perf_counter() - begin:.1f} s", flush=True)
    cases = [(int(batch), int(nodes)) for batch, nodes in (case.split("x") for case in args.cases.split(","))]
    base: dict[int, float] = {}
    if "plain" in parts:
        base = plain(model, list(map(int, args.batches.split(","))), args.out)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "verify" in parts:
        verify(model, cases, base, args.out)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "drafter" in parts:
        from bench.decode_drafter import drafter, profiles

        shapes, sizes = profiles(args.profiles), list(map(int, args.drafter_batches.split(",")))
        drafter(model, shapes, sizes, args.out, traced="drafter_trace" in parts)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "profile" in parts:
        for batch, nodes in ((1, 1), (64, 1), (1, 32), (8, 16), (64, 4)):
            busy(model, batch, nodes, args.out)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "switches" in parts:
        switches(args.out)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "graphs" in parts:
        graph_memory(args.out)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
