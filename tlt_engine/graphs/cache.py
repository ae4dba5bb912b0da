"""Which graphs are kept: captured at first use or up front, the least recently used dropped beyond a byte budget.

Knows sizes and bytes; how a graph is captured is the caller's, so all of this runs without a GPU.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tlt_engine.graphs.buckets import Buckets, GraphKey

logger = logging.getLogger("tlt_engine")


class Graph(Protocol):
    """bytes: device memory that capturing it took, by the driver's count."""

    bytes: int

    def replay(self) -> None: ...

    def release(self) -> None: ...


class CaptureOutOfMemoryError(RuntimeError):
    """What a capture function raises when the device has no memory left for the graph."""


@dataclass
class BucketCounts:
    """captures, hits (replays), evictions; rows: of the steps it served, run_rows: with the padding."""

    captures: int = 0
    hits: int = 0
    evictions: int = 0
    rows: int = 0
    run_rows: int = 0
    bytes: int = 0


class GraphCache:
    """capture(key) returns a Graph, or raises CaptureOutOfMemoryError. budget: bytes of all kept graphs together."""

    def __init__(self, buckets: Buckets, capture: Callable[[GraphKey], Graph], budget: int) -> None:
        self.buckets, self.budget = buckets, budget
        self._capture = capture
        self._kept: OrderedDict[GraphKey, Graph] = OrderedDict()  # least recently used first
        self._refused: set[GraphKey] = set()  # out of memory, or larger than the budget alone
        self._counts: dict[GraphKey, BucketCounts] = {}
        self.eager_steps: dict[str, int] = {}
        self.capture_seconds = 0.0

    @property
    def bytes(self) -> int:
        return sum(graph.bytes for graph in self._kept.values())

    def count_eager(self, reason: str) -> None:
        self.eager_steps[reason] = self.eager_steps.get(reason, 0) + 1

    def choose(self, batch: int, rows: int) -> GraphKey | None:
        """The size to lay the step out for; None, counted, when it must run eagerly at its own size."""
        key = self.buckets.choose(batch, rows)
        if key is None:
            self.count_eager("larger than every graph")
        elif key in self._refused:
            self.count_eager("no memory for the graph")
            return None
        return key

    def get(self, key: GraphKey, rows: int, *, capture: bool = True) -> Graph | None:
        """The graph of `key` for a step of `rows` rows, captured if it is not there. None: there is no memory for it,
        now and until `release`; the step runs eagerly. capture=False: None, uncounted, if it is not there."""
        graph = self._kept.get(key)
        if graph is None and not capture:
            return None
        if graph is None:
            graph = self._add(key)
        if graph is None:
            self.count_eager("no memory for the graph")
            return None
        self._kept.move_to_end(key)
        counts = self._counts[key]
        counts.hits += 1
        counts.rows += rows
        counts.run_rows += key.rows
        return graph

    def prepare(self, key: GraphKey) -> None:
        """Captures it, if it is not there and there is memory."""
        if key not in self._kept:
            self._add(key)

    def capture_all(self, more: Sequence[GraphKey] = ()) -> None:
        """Every size, largest first, then `more`, up to the first that the budget has no room for: capturing on would
        throw out what has just been captured."""
        for key in (*self.buckets.keys, *more):
            if key not in self._kept and key not in self._refused and self._add(key, evict=False) is None:
                return

    def release(self) -> None:
        """Drop all graphs, and give refused sizes another try: memory may be free again."""
        for key in list(self._kept):
            self._kept.pop(key).release()
        self._refused.clear()

    def _add(self, key: GraphKey, *, evict: bool = True) -> Graph | None:
        if key in self._refused:
            return None
        start = time.perf_counter()
        try:
            graph = self._capture(key)
        except CaptureOutOfMemoryError as error:
            self._refuse(key, f"out of memory ({error})")
            return None
        finally:
            self.capture_seconds += time.perf_counter() - start
        if graph.bytes > self.budget:
            graph.release()
            self._refuse(key, f"{graph.bytes} bytes, more than graph_bytes = {self.budget} allows")
            return None
        if not evict and self.bytes + graph.bytes > self.budget:
            graph.release()
            return None
        counts = self._counts.setdefault(key, BucketCounts())
        counts.captures += 1
        counts.bytes = graph.bytes
        self._kept[key] = graph
        while self.bytes > self.budget:
            oldest, victim = self._kept.popitem(last=False)
            victim.release()
            self._counts[oldest].evictions += 1
        return graph

    def _refuse(self, key: GraphKey, why: str) -> None:
        if not self._refused:  # one warning, however many sizes follow
            logger.warning(
                "CUDA graph %s: %s; steps of this size, and of others that do not fit, run without a graph, only "
                "slower. Lower kv_cache_bytes or raise graph_bytes to have them.", key, why,
            )
        self._refused.add(key)

    def report(self) -> dict[str, Any]:
        """Per size: bytes, captures, hits, evictions, padding waste (share of the rows run); steps without a graph by
        reason; totals."""
        buckets = {
            str(key): {
                "bytes": c.bytes if key in self._kept else 0, "captures": c.captures, "hits": c.hits,
                "evictions": c.evictions, "padding_waste": 1 - c.rows / c.run_rows if c.run_rows else 0.0,
            }
            for key, c in sorted(self._counts.items(), key=lambda item: (item[0].nodes, item[0].batch))
        }
        return {
            "buckets": buckets, "bytes": self.bytes, "budget": self.budget, "graphs": len(self._kept),
            "capture_seconds": self.capture_seconds, "eager_steps": dict(self.eager_steps),
            "refused": sorted(map(str, self._refused)),
        }
