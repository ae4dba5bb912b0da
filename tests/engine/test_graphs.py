"""Sizes, choice, budget and eviction of graphs, with captures that are only played."""

from __future__ import annotations

import random

import pytest

from tlt_engine.graphs.buckets import MAX_ROWS, Buckets, GraphKey, default_buckets
from tlt_engine.graphs.cache import CaptureOutOfMemoryError, GraphCache
from tlt_engine.graphs.capture import DRIVER_MOST, graph_bytes


class Played:
    def __init__(self, key: GraphKey, size: int) -> None:
        self.key, self.bytes, self.released = key, size, False

    def replay(self) -> None: ...

    def release(self) -> None:
        assert not self.released
        self.released = True


class Device:
    """Captures graphs of `size(key)` bytes while `memory` lasts; a released graph gives its bytes back."""

    def __init__(self, size=lambda key: 10 * key.rows, memory: int = 10**9) -> None:
        self.size, self.memory = size, memory
        self.captured: list[GraphKey] = []
        self.graphs: list[Played] = []

    @property
    def live(self) -> list[Played]:
        return [g for g in self.graphs if not g.released]

    def capture(self, key: GraphKey) -> Played:
        if sum(g.bytes for g in self.live) + self.size(key) > self.memory:
            raise CaptureOutOfMemoryError(f"{key}")
        self.captured.append(key)
        self.graphs.append(Played(key, self.size(key)))
        return self.graphs[-1]


def cache(device: Device, buckets: Buckets, budget: int = 10**9) -> GraphCache:
    return GraphCache(buckets, device.capture, budget)


def test_default_sizes():
    keys = default_buckets(256, 16).keys
    assert {k.nodes for k in keys} == {1, 4, 8, 16} and max(k.batch for k in keys if k.nodes == 1) == 256
    assert all(k.rows <= MAX_ROWS for k in keys)
    assert [k.rows for k in keys] == sorted((k.rows for k in keys), reverse=True)  # largest first
    assert {k.nodes for k in default_buckets(8, 1).keys} == {1}
    assert {k.nodes for k in default_buckets(1, 33).keys} == {1, 4, 8, 16, 32, 64}
    assert {k.batch for k in default_buckets(5, 1).keys} == {1, 2, 4, 8}  # the first that holds 5
    assert {k.batch for k in default_buckets(1, 1).keys} == {1}


def test_a_small_models_plain_steps_have_graphs_for_more_samples() -> None:
    small, large = default_buckets(512, 16, 135_000_000).keys, default_buckets(512, 16, 7_600_000_000).keys
    assert set(small) - set(large) == {GraphKey(384, 1), GraphKey(512, 1)} and set(large) <= set(small)
    assert default_buckets(300, 1, 135_000_000).choose(300, 300) == GraphKey(384, 1)
    assert default_buckets(300, 1, 7_600_000_000).choose(300, 300) is None
    trees = default_buckets(512, 16, 135_000_000)
    assert trees.choose(16, 256) == GraphKey(16, 16) and trees.choose(20, 320) is None, "trees keep within MAX_ROWS"


def test_the_smallest_size_that_holds_the_step():
    buckets = default_buckets(256, 64)
    for batch in range(1, 300):
        for rows in {batch, batch + 3, 2 * batch, 16 * batch}:
            key = buckets.choose(batch, rows)
            fitting = [k for k in buckets.keys if k.batch >= batch and k.rows >= rows]
            assert key == min(fitting, key=lambda k: (k.rows, k.batch), default=None)
    assert buckets.choose(1, 16) == GraphKey(1, 16) and buckets.choose(5, 9) == GraphKey(16, 1)
    assert buckets.choose(9, 9) == GraphKey(16, 1) and buckets.choose(300, 300) is None


def test_graphs_are_captured_once_and_replayed():
    device = Device()
    graphs = cache(device, default_buckets(8, 1))
    for batch in (3, 4, 3, 1, 4):
        key = graphs.choose(batch, batch)
        assert key is not None and graphs.get(key, batch) is not None
    assert device.captured == [GraphKey(4, 1), GraphKey(1, 1)]
    report = graphs.report()
    assert report["buckets"]["4x1"] == {
        "bytes": 40, "captures": 1, "hits": 4, "evictions": 0, "padding_waste": pytest.approx(2 / 16)
    }
    assert graphs.choose(9, 9) is None and graphs.report()["eager_steps"] == {"larger than every graph": 1}
    assert graphs.get(GraphKey(2, 1), 2, capture=False) is None and len(device.captured) == 2


def test_eviction_under_a_budget_against_a_model():
    """Random switches: the kept ones are always the most recently used that fit."""
    rng = random.Random(0)
    buckets = default_buckets(64, 16)
    device = Device()
    graphs = cache(device, buckets, budget=4000)
    recent: list[GraphKey] = []
    for _ in range(2000):
        key = rng.choice(buckets.keys)
        assert graphs.get(key, key.rows) is not None
        recent = [key, *(k for k in recent if k != key)]
        while sum(10 * k.rows for k in recent) > 4000:
            recent.pop()
        assert {g.key for g in device.live} == set(recent)
        assert graphs.bytes == sum(10 * k.rows for k in recent) <= 4000
    evictions = sum(b["evictions"] for b in graphs.report()["buckets"].values())
    assert evictions == len(device.graphs) - len(device.live) > 100


def test_sabotage_a_cache_that_forgets_use_is_seen():
    class Fifo(GraphCache):
        def get(self, key, rows, *, capture=True):
            graph = self._kept.get(key)
            return graph if graph is not None else super().get(key, rows, capture=capture)

    device = Device()
    graphs = Fifo(default_buckets(4, 1), device.capture, 50)
    for batch in (1, 4, 1, 2):  # 1 was used after 4, so 4 must go
        graphs.get(GraphKey(batch, 1), batch)
    assert {g.key.batch for g in device.live} != {1, 2}


def test_out_of_memory_is_told_once_and_tried_again_after_a_release(caplog):
    device = Device(memory=45)
    graphs = cache(device, default_buckets(8, 1))
    assert graphs.get(GraphKey(4, 1), 4) is not None
    for _ in range(3):
        assert graphs.get(GraphKey(8, 1), 8) is None and graphs.get(GraphKey(2, 1), 2) is None
    assert len(caplog.records) == 1 and "8x1" in caplog.text and "graph_bytes" in caplog.text
    assert graphs.choose(8, 8) is None and graphs.get(GraphKey(4, 1), 4) is not None
    graphs.release()
    assert not device.live and graphs.get(GraphKey(2, 1), 2) is not None


def test_a_graph_larger_than_the_budget_is_refused(caplog):
    device = Device()
    graphs = cache(device, default_buckets(8, 1), budget=50)
    assert graphs.get(GraphKey(8, 1), 8) is None and not device.live
    assert graphs.get(GraphKey(4, 1), 4) is not None and graphs.report()["refused"] == ["8x1"]


def test_capture_up_front_goes_largest_first_and_stops_at_the_budget():
    device = Device()
    buckets = default_buckets(8, 4)
    graphs = cache(device, buckets)
    graphs.capture_all()
    assert device.captured == list(buckets.keys)
    device = Device()
    graphs = cache(device, buckets, budget=500)
    graphs.capture_all()
    assert [g.key for g in device.live] == list(buckets.keys[:2]) and graphs.bytes == 480
    assert len(device.captured) == 3 and graphs.report()["refused"] == []


@pytest.mark.parametrize("driver, pool, expected", [
    (6 << 20, 2 << 20, 6 << 20),  # alone on the GPU: the driver's count
    (40 << 30, 2 << 20, (2 << 20) + DRIVER_MOST),  # a neighbour took 40 GB meanwhile
    (-(40 << 30), 2 << 20, 2 << 20),  # it gave them back
    (-1, 0, 0),
])
def test_a_graph_does_not_pay_for_its_neighbours(driver: int, pool: int, expected: int) -> None:
    assert graph_bytes(driver, pool) == expected
