"""The stall watchdog: one report a stall, with state and stacks; silent otherwise; gone with its engine."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest

from tests.engine.engines import greedy, tiny_engine


class SlowDrafter:
    """Sleeps in one of its calls."""

    def __init__(self, at: int, seconds: float) -> None:
        self.calls, self.at, self.seconds = 0, at, seconds

    def propose(self, contexts):
        from tlt_engine import DraftTree

        self.calls += 1
        if self.calls == self.at:
            time.sleep(self.seconds)
        return [DraftTree.root(c.token_ids[-1]) for c in contexts]

    def observe(self, context, accepted): ...
    def finish(self, seq_id): ...
    def memory_bytes(self):
        return 0


def test_a_stall_is_reported_once_with_state_and_stacks(caplog):
    engine = tiny_engine(drafter=SlowDrafter(at=3, seconds=0.6), stall_seconds=0.2)
    with caplog.at_level(logging.ERROR, "tlt_engine"):
        engine.generate([[1, 2, 3]], greedy(8))
    reports = [r.getMessage() for r in caplog.records]
    assert len(reports) == 1
    assert "more than 0.2 s" in reports[0] and "pages free" in reports[0] and "running seq" in reports[0]
    assert "in propose" in reports[0], "the stack says where it hangs"


def test_quick_steps_say_nothing(caplog):
    engine = tiny_engine(stall_seconds=0.4)
    with caplog.at_level(logging.ERROR, "tlt_engine"):
        for _ in range(3):
            engine.generate([[1, 2, 3]], greedy(8))
            time.sleep(0.2)
    assert not caplog.records


def watchers() -> set[threading.Thread]:
    """Of other tests' engines, too, until these are collected."""
    return {t for t in threading.enumerate() if t.name == "tlt-engine-watchdog"}


def test_it_neither_keeps_an_engine_alive_nor_outlives_it():
    before = watchers()
    engine = tiny_engine(stall_seconds=1000.0)
    engine.generate([[1, 2, 3]], greedy(4))
    assert len(watchers() - before) == 1
    del engine
    gc.collect()
    deadline = time.monotonic() + 5  # not a quarter of 1000 s
    while watchers() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_can_be_turned_off():
    before = watchers()
    tiny_engine(stall_seconds=None).generate([[1, 2, 3]], greedy(4))
    assert not watchers() - before
    with pytest.raises(ValueError, match="stall_seconds"):
        tiny_engine(stall_seconds=0)
