"""Captures CUDA graphs into one memory pool on one stream. Knows callables, not passes.

Graphs of one pool share memory, so they must be replayed one after another on one stream, and what a graph leaves
behind must be read before the next replay. An engine has a pool of its own: two engines never share one.

What a graph costs is what the driver has less after its capture, within what this process can have taken: a trainer
or another engine on the same GPU allocates meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from tlt_engine.graphs.cache import CaptureOutOfMemoryError

# At most this of the driver's own for a graph, beside the pool: 5 MB with it is the mean of 7B's 38 graphs on an H200.
DRIVER_MOST = 32 << 20


def graph_bytes(driver: int, pool: int) -> int:
    """Bytes of a new graph. driver: how much less is free on the GPU than before, whoever took it (negative: somebody
    gave some back); pool: how much more torch reserved in this process."""
    return min(max(driver, pool, 0), max(pool, 0) + DRIVER_MOST)


class CapturedGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, bytes: int, on_release: Callable[[], None]) -> None:
        self._graph, self.bytes, self._on_release = graph, bytes, on_release

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()
        self._on_release()


class Capturer:
    """device: a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._live = 0

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        """Run once for real, so that kernels are compiled and workspaces exist, capture, and replay once, so that the
        driver's own memory is counted too: `run` must be harmless to repeat. Waits for the device.

        Raises CaptureOutOfMemoryError; the pool and earlier graphs stay usable.
        """
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                run()
                self._stream.synchronize()
                before = self._taken()
                self._record(graph, run)
                graph.replay()
                self._stream.synchronize()
        except torch.OutOfMemoryError as error:
            graph.reset()
            raise CaptureOutOfMemoryError(str(error).split(".")[0]) from error
        self._live += 1
        driver, pool = (now - then for now, then in zip(self._taken(), before))
        return CapturedGraph(graph, graph_bytes(driver, pool), self._released)

    def _taken(self) -> tuple[int, int]:
        """Bytes in use on the GPU by the driver's count, and bytes torch has reserved in this process."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free, torch.cuda.memory_reserved(self.device)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the stream must leave capture mode; what went wrong is already known
                graph.capture_end()
            raise
        graph.capture_end()

    def _released(self) -> None:
        self._live -= 1
        if not self._live:  # torch frees a pool with its last graph; its handle cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
