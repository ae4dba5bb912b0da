"""How kernels are timed on a GPU. Knows no kernel.

Cold: a caller passes calls on input sets that together are far beyond L2, so that every byte comes from memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

REPLAYS = 15
READ_SETS, READ_BYTES = 4, 1 << 30


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, least and most over the replays."""

    us: float
    low: float
    high: float


def time_graph(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Timing:
    """One CUDA graph of all calls, by events around each replay; a graph should take 0.3 ms or more. Launch gaps
    between the calls are those of a graph. The first three replays are not counted."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for _ in range(3):
            graph.replay()
        for begin, end in pairs:
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 / len(calls) for begin, end in pairs)
    return Timing(statistics.median(times), times[0], times[-1])


def synchronized() -> float:
    """Seconds, once the GPU has finished: a timer for pytest-benchmark, host work included."""
    torch.cuda.synchronize()
    return time.perf_counter()


def read_bandwidth() -> tuple[float, float, float]:
    """TB/s of a sum over 4 GiB: median, least, most."""
    sets = [torch.randn(READ_BYTES // 4, device="cuda") for _ in range(READ_SETS)]
    timing = time_graph([partial(torch.sum, x) for x in sets])
    median, least, most = (READ_BYTES / us / 1e6 for us in (timing.us, timing.high, timing.low))
    return median, least, most
