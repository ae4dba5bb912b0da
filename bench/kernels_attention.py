"""Tree attention on one GPU: a sweep of tilings, then bandwidth by context and rows.

    PYTHONPATH=.:kernels python3 -m bench.kernels_attention --out DIR [--sweep cuda|triton]

Times are CUDA-graph replays over several disjoint sets of pages, together far beyond L2, so every key comes from
memory; medians over replays, divided by the calls in a graph. GB/s count K and V of all visible keys once, against
the read bandwidth measured on an H200 (4.13 TB/s). Writes DIR/gpu.json (records as
bench.results writes them) and DIR/attention_sweep.json. Correctness is tests/gpu/test_attention.py's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tlt_kernels.triton import attention as host
from tlt_kernels.triton.attention import (
    CLUSTERS,
    Geometry,
    Tiling,
    TreeAttention,
    default_tiling,
    hopper_tiling,
    tile_rows,
)
from tlt_kernels.triton.invariant import InvariantAttention

from bench import gpu_timing
from bench.results import record

READ_TBS = 4.13
COLD_BYTES = 400 << 20  # L2 holds 60 MB
COMMAND = "python -m bench.kernels_attention"
RUNS = 15  # replays
PEER = Geometry(28, 4, 128, 16, torch.bfloat16)


@dataclass(frozen=True)
class Load:
    """B requests of equal context, `nodes` rows each: a chain, which costs what any tree costs."""

    batch: int
    nodes: int
    context: int
    geometry: Geometry = PEER
    causal: bool = False

    @property
    def kv_bytes(self) -> int:
        g = self.geometry
        keys = min(self.context, g.window or self.context) + self.nodes
        return 2 * self.batch * keys * g.kv_heads * g.head_dim * g.dtype.itemsize

    @property
    def block_m(self) -> int:
        return tile_rows(self.geometry, self.batch * self.nodes, self.batch)


@dataclass(frozen=True)
class Timing(gpu_timing.Timing):
    def share(self, load: Load) -> float:
        return load.kv_bytes / self.us / 1e6 / READ_TBS


class Inputs:
    """Random inputs of a load over scattered pages; page tables of disjoint sets in one cache."""

    def __init__(self, load: Load) -> None:
        g = load.geometry
        rows = load.batch * load.nodes
        pages = -(-(load.context + load.nodes) // g.page)
        self.sets = max(2, min(64, -(-COLD_BYTES // load.kv_bytes)))
        total = self.sets * load.batch * pages
        order = torch.randperm(total, device="cuda").int()
        self.tables = order.view(self.sets, load.batch, pages)
        cache = torch.empty(2, total, g.page, g.kv_heads, g.head_dim, dtype=g.dtype, device="cuda").normal_()
        self.k_cache, self.v_cache = cache[0], cache[1]
        self.q = torch.randn(rows, g.heads, g.head_dim, dtype=g.dtype, device="cuda")
        self.out = torch.empty_like(self.q)
        chain = [[(1 << min(i + 1, 63)) - 1, 0] for i in range(load.nodes)]
        self.step = {
            "prefix_lens": torch.full((load.batch,), load.context, dtype=torch.int32, device="cuda"),
            "node_indptr": (torch.arange(load.batch + 1, device="cuda") * load.nodes).int(),
            "ancestors": torch.tensor(chain, device="cuda").repeat(load.batch, 1),
            "causal": torch.full((load.batch,), load.causal, dtype=torch.uint8, device="cuda"),
            "positions": (load.context + torch.arange(load.nodes, device="cuda")).repeat(load.batch),
        }


def time_graph(calls: Sequence[Callable[[], object]]) -> Timing:
    return Timing(**vars(gpu_timing.time_graph(calls, RUNS)))


def attention_of(load: Load, tiling: Tiling | None) -> TreeAttention:
    return TreeAttention(
        load.geometry, max_rows=load.batch * load.nodes, max_batch=load.batch, device="cuda", tiling=tiling
    )


def time_load(load: Load, inputs: Inputs, tiling: Tiling | None = None, early: bool = False,
              invariant: bool = False) -> Timing:
    attention: Any = attention_of(load, tiling)
    extra: dict[str, Any] = {"early": early}
    if invariant:
        attention, extra = InvariantAttention(
            load.geometry, max_rows=load.batch * load.nodes, max_batch=load.batch, max_keys=load.context + load.nodes,
            device="cuda",
        ), {}
    step = attention.plan(inputs.tables[0], **inputs.step)
    steps = [replace(step, page_table=table) for table in inputs.tables]
    steps = steps * max(1, -(-8 // len(steps)))

    def call(one: Any) -> Callable[[], object]:
        return lambda: attention.run(
            one, inputs.q, inputs.k_cache, inputs.v_cache, scale=load.geometry.head_dim**-0.5, out=inputs.out, **extra
        )

    return time_graph([call(one) for one in steps])


def time_plan(load: Load, inputs: Inputs) -> Timing:
    attention = attention_of(load, None)
    return time_graph([lambda: attention.plan(inputs.tables[0], **inputs.step)] * 20)


def time_after_small_kernel(load: Load, inputs: Inputs, early: bool) -> float:
    """What one call adds to a chain of small dependent kernels (as a step's are), microseconds."""
    attention = attention_of(load, None)
    step = attention.plan(inputs.tables[0], **inputs.step)
    steps = [replace(step, page_table=table) for table in inputs.tables]
    steps = steps * max(1, -(-8 // len(steps)))

    def small() -> None:
        inputs.q.mul_(1.0)

    def call(one: host.Step) -> Callable[[], object]:
        def both() -> None:
            small()
            attention.run(
                one, inputs.q, inputs.k_cache, inputs.v_cache, scale=0.1, out=inputs.out, early=early
            )

        return both

    return time_graph([call(one) for one in steps]).us - time_graph([small] * 64).us


# The sweep: per tile height, loads whose rows fill it, and candidates.

SWEEP_NODES = {16: 1, 32: 4, 64: 9, 128: 16}


def sweep_loads(block_m: int) -> dict[str, Load]:
    nodes = SWEEP_NODES[block_m]
    return {
        "4x2k": Load(4, nodes, 2048),
        "8x4k": Load(8, nodes, 4096),
        "1x32k": Load(1, nodes, 32768),
        "2x16k": Load(2, nodes, 16384),
        "8x16k": Load(8, nodes, 16384),
    }


def candidates(block_m: int, cuda: bool) -> list[Tiling]:
    if cuda:
        return [hopper_tiling(cluster) for cluster in CLUSTERS] + [hopper_tiling(1, programs=2)] * (block_m == 16)
    programs = (1, 2) if block_m == 128 else (1, 2, 3) if block_m == 64 else (2, 3, 4)
    warps = {16: (2, 4), 32: (4,), 64: (4, 8), 128: (4, 8)}[block_m]
    kernels = [
        (block_n, w, stages)
        for block_n, w, stages in product((32, 64, 128), warps, (3, 5, 7))
        if block_n * stages <= (640 if block_m < 64 else 448) and (block_m < 128 or block_n <= 16 * w)
    ]
    least = 256  # keys: about where writing and merging a tall tile's part costs what reading its keys does
    return [
        Tiling(n, w, s, p, min_blocks=max(1, (least if block_m >= 64 else 128) // n))
        for (n, w, s), p in product(kernels, programs)
    ]


def warm(job: tuple[Load, Tiling | None]) -> str:
    """Compile a tiling's kernels into Triton's cache on disk (in a worker); the error's text if it fails."""
    load, tiling = job
    try:
        small = replace(load, context=256, batch=2)
        inputs = Inputs(small)
        attention = attention_of(small, tiling)
        step = attention.plan(inputs.tables[0], **inputs.step)
        attention.run(step, inputs.q, inputs.k_cache, inputs.v_cache, scale=0.1, out=inputs.out)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def compile_all(jobs: list[tuple[Load, Tiling | None]], seconds: float) -> dict[tuple[Load, Tiling | None], str]:
    """{job: error text} of the jobs that cannot run; the others are compiled afterwards."""
    import multiprocessing

    failed: dict[tuple[Load, Tiling | None], str] = {}
    deadline = time.monotonic() + seconds
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {job: pool.submit(warm, job) for job in jobs}
        for job, future in futures.items():
            try:
                error = future.result(timeout=max(1.0, deadline - time.monotonic()))
            except Exception as problem:
                error = f"{type(problem).__name__} {problem}"
            if error:
                failed[job] = error
        pool.shutdown(wait=False, cancel_futures=True)
    return failed


def sweep(deadline: float, cuda: bool) -> tuple[dict[int, Tiling], list[dict[str, Any]]]:
    """Best tiling by tile height (least geometric mean of time over the loads), and every measurement."""
    jobs: dict[tuple[int, int, int, int], tuple[Load, Tiling | None]] = {}
    heights = [m for m in SWEEP_NODES if not (cuda and m == 32)]  # the CUDA kernels' least height on Hopper is 64
    for block_m in heights:
        for t in candidates(block_m, cuda):
            jobs.setdefault((block_m, t.block_n, t.warps, t.stages), (sweep_loads(block_m)["4x2k"], t))
    began = time.monotonic()
    failed = {} if cuda else compile_all(list(jobs.values()), 75)
    bad = {key: failed[job] for key, job in jobs.items() if job in failed}
    print(f"compiled {len(jobs) - len(bad)} of {len(jobs)} kernels in {time.monotonic() - began:.0f} s")
    for key, error in list(bad.items())[:8]:
        print("  cannot run", key, error[:110])
    best: dict[int, Tiling] = {}
    rows: list[dict[str, Any]] = []
    for i, block_m in enumerate(heights):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(heights) - i)
        usable = [
            t for t in candidates(block_m, cuda) if (block_m, t.block_n, t.warps, t.stages) not in bad
        ]
        shown = sweep_height(block_m, usable, until, rows)
        if shown:
            best[block_m] = shown[0]
    return best, rows


def sweep_height(block_m: int, usable: list[Tiling], until: float, rows: list[dict[str, Any]]) -> list[Tiling]:
    times: dict[Tiling, dict[str, Timing]] = {t: {} for t in usable}
    early: dict[Tiling, dict[str, float]] = {t: {} for t in usable}
    loads = sweep_loads(block_m)
    for j, (name, load) in enumerate(loads.items()):
        inputs = Inputs(load)
        share = time.monotonic() + (until - time.monotonic()) / (len(loads) - j)
        for tiling in usable:
            if time.monotonic() > share:
                break
            try:
                times[tiling][name] = time_load(load, inputs, tiling)
                early[tiling][name] = time_load(load, inputs, tiling, early=True).us
            except Exception as error:
                print(f"  M={block_m} {name} {tiling}: {str(error)[:120]}")
                continue
            found = {"us": times[tiling][name].us, "early_us": early[tiling][name]}
            rows.append({"block_m": block_m, "load": name, **found, **asdict(tiling)})
        del inputs
        torch.cuda.empty_cache()
    complete = [t for t in usable if len(early[t]) == len(loads)]
    ranked = sorted(complete, key=lambda t: statistics.geometric_mean(x.us for x in times[t].values()))
    print(f"M={block_m} V={SWEEP_NODES[block_m]}: {len(complete)} of {len(usable)} tilings; us, early (share)")
    for rank, t in enumerate(ranked[:9]):
        cells = "  ".join(
            f"{name} {x.us:.1f} {early[t][name]:.1f} ({x.share(loads[name]):.2f})" for name, x in times[t].items()
        )
        sizes = f"N{t.block_n} w{t.warps} s{t.stages} p{t.programs} min{t.min_blocks} c{t.cluster}"
        print(f"  #{rank + 1:<3} {t.kernels} {sizes}: {cells}")
    return ranked


# The record: what the README and the bounds are about.


def bandwidth(best: dict[int, Tiling], out: Path, deadline: float) -> None:
    contexts = {4096: 8, 16384: 2, 32768: 1, 131072: 1}
    nodes = (1, 2, 4, 9, 16, 18, 32)
    print("share of 4.13 TB/s, 28/4 heads of 128, bf16 (us; early):  " + "  ".join(f"V={v}" for v in nodes))
    for context, batch in contexts.items():
        cells = []
        plain_us = 0.0
        for v in nodes:
            if time.monotonic() > deadline:
                print("  out of time")
                return
            load = Load(batch, v, context)
            inputs = Inputs(load)
            timing = time_load(load, inputs, best.get(load.block_m))
            early = time_load(load, inputs, best.get(load.block_m), early=True)
            plain_us = plain_us or timing.us
            cells.append(f"{timing.share(load):.2f} ({timing.us:.1f}; {early.us:.1f})")
            params = {"context": context, "V": v, "G": 7, "batch": batch}
            save(out, "attention.bandwidth_share", timing.share(load), "", params, timing)
            save(out, "attention.bandwidth_share", early.share(load), "", params | {"early": True}, early)
            if context == 32768 and v == 16:
                ratio = timing.us / plain_us
                print(f"  V=16 over V=1 at 32k: {ratio:.3f}")
                save(out, "attention.tree_ratio", ratio, "x", {"context": context, "V": 16, "G": 7}, timing)
            if v in (1, 16):
                after = [time_after_small_kernel(load, inputs, early) for early in (False, True)]
                print(f"  {batch}x{context} V={v} behind a small kernel: +{after[0]:.1f} us, early +{after[1]:.1f}")
        print(f"  {batch}x{context}: " + "  ".join(cells))


def invariant_price(out: Path, deadline: float) -> None:
    """The batch-invariant kernels beside the default ones."""
    shapes = [(1, 512, 1), (1, 4096, 1), (64, 512, 1), (64, 1024, 1)]
    shapes += [(8, 4096, 1), (8, 4096, 16), (1, 32768, 1), (1, 32768, 16)]
    loads = {f"{b}x{c} V={v}": Load(b, v, c) for b, c, v in shapes}
    loads["prefill 1x4096 at 0"] = Load(1, 4096, 0, causal=True)
    for name, load in loads.items():
        if time.monotonic() > deadline:
            print("  out of time")
            return
        inputs = Inputs(load)
        default, fixed = time_load(load, inputs), time_load(load, inputs, invariant=True)
        print(f"  invariant {name}: {fixed.us:.1f} us, default {default.us:.1f}")
        params = {"context": load.context, "V": load.nodes, "batch": load.batch}
        save(out, "attention.invariant_us", fixed.us, "us", params, fixed)


def against_flashinfer(out: Path, deadline: float) -> None:
    """FlashInfer over the same pages, timed the same way: its paged prefill with the tree as a custom mask, its decode
    on tensor cores at V=1 (groups of 7 heads have no other). Planned once per set of pages, not timed, as ours."""
    try:
        from bench.flashinfer_attention import Rival
    except ImportError as error:
        print(f"  FlashInfer is not installed ({error}): no comparison")
        return
    contexts = {512: 8, 2048: 4, 4096: 8, 16384: 2, 32768: 1, 131072: 1}
    for context, batch in contexts.items():
        cells = []
        for v in (1, 4, 9, 16):
            if time.monotonic() > deadline:
                print("  out of time")
                return
            load = Load(batch, v, context)
            inputs = Inputs(load)
            ours = time_load(load, inputs, early=False)
            wanted = inputs.out.clone()
            theirs = time_graph(Rival(load, inputs).calls())
            apart = float((inputs.out - wanted).abs().max())
            if not apart < 2e-2:
                raise ValueError(f"expected the same result of both at {load}, got a difference of {apart}")
            cells.append(f"V={v} {theirs.us / ours.us:.2f} ({theirs.us:.1f}; {ours.us:.1f})")
            params = {"context": context, "V": v, "batch": batch}
            save(out, "attention.vs_flashinfer", theirs.us / ours.us, "x", params, ours)
        print(f"  FlashInfer over ours (us) {batch}x{context}: " + "  ".join(cells))


def save(out: Path, metric: str, value: float, unit: str, params: dict[str, Any], timing: Timing) -> None:
    spread = None
    if unit == "us":
        spread = [timing.low, timing.high]
    record("gpu", metric, value, unit, params, command=COMMAND, spread=spread, runs=RUNS, folder=out)


def peers(best: dict[int, Tiling], out: Path) -> None:
    load = Load(4, 16, 2048)
    inputs = Inputs(load)
    tiling = best.get(load.block_m)
    timing = time_load(load, inputs, tiling)
    save(out, "attention.us", timing.us, "us", {"input": "peers"}, timing)
    early = time_load(load, inputs, tiling, early=True)
    plan = time_plan(load, inputs)
    print(
        f"peers input (FlashInfer 74 us): {timing.us:.2f} us [{timing.low:.2f}, {timing.high:.2f}], early "
        f"{early.us:.2f}; plan, once a step: {plan.us:.2f} us"
    )


def others(deadline: float) -> None:
    """Other geometries with their default tilings, the price of bandwidth where a tile is padded, and prefill."""
    bf16 = torch.bfloat16
    loads = {
        "32/8 of 128, 8x4k V=16": Load(8, 16, 4096, Geometry(32, 8, 128, 16, bf16)),
        "page 64, 1x32k V=16": Load(1, 16, 32768, Geometry(28, 4, 128, 64, bf16)),
        "9/3 of 64, 8x16k V=8": Load(8, 8, 16384, Geometry(9, 3, 64, 16, bf16)),
        "32/8 of 80, 8x4k V=8": Load(8, 8, 4096, Geometry(32, 8, 80, 16, bf16)),
        "16/4 of 256, 8x4k V=8": Load(8, 8, 4096, Geometry(16, 4, 256, 16, bf16)),
        "28/4 of 128 fp32, 8x4k V=1": Load(8, 1, 4096, Geometry(28, 4, 128, 16, torch.float32)),
        "window 4096, 8x16k V=1": Load(8, 1, 16384, Geometry(28, 4, 128, 16, bf16, 4096)),
        "64 requests x1k V=1": Load(64, 1, 1024),
        "256 requests x2k V=1": Load(256, 1, 2048),
        "1x1k V=1": Load(1, 1, 1024),
        "prefill 1x4096 at 0": Load(1, 4096, 0, causal=True),
        "prefill 1x2048 at 8k": Load(1, 2048, 8192, causal=True),
    }
    failed = compile_all([(replace(load, nodes=min(load.nodes, 64)), None) for load in loads.values()], 25)
    for error in failed.values():
        print("  failed:", error[:150])
    for name, load in loads.items():
        if time.monotonic() > deadline:
            print("  out of time")
            return
        try:
            timing = time_load(load, Inputs(load))
        except Exception as error:
            print(f"  {name}: {type(error).__name__} {str(error)[:120]}")
            continue
        text = f"share {timing.share(load):.2f}"
        if load.causal:
            pairs = load.nodes * (load.context + (load.nodes + 1) / 2)
            flop = 4 * load.batch * pairs * load.geometry.heads * load.geometry.head_dim
            text = f"{flop / timing.us / 1e6:.0f} TFLOP/s"
        print(f"  {name}: {timing.us:.1f} us, {text}, M={load.block_m} {default_tiling(load.geometry, load.block_m)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--sweep", choices=["cuda", "triton", "none"], default="none", help="none: default tilings")
    parser.add_argument("--parts", default="peers,bandwidth,flashinfer,invariant,others", help="of the record, by name")
    parser.add_argument("--seconds", type=float, default=190.0, help="stop starting new measurements after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels_attention: expected a CUDA device, got none; run it on the GPU machine")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    best: dict[int, Tiling] = {}
    if args.sweep != "none":
        best, rows = sweep(began + args.seconds * 0.65, args.sweep == "cuda")
        (args.out / "attention_sweep.json").write_text(json.dumps(rows, indent=0))
    parts: dict[str, Callable[[], None]] = {
        "peers": lambda: peers(best, args.out),
        "bandwidth": lambda: bandwidth(best, args.out, began + args.seconds * 0.7),
        "flashinfer": lambda: against_flashinfer(args.out, began + args.seconds * 0.85),
        "invariant": lambda: invariant_price(args.out, began + args.seconds),
        "others": lambda: others(began + args.seconds),
    }
    for name in args.parts.split(","):
        try:
            parts[name]()
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {str(error)[:400]}")
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
