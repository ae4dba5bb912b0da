"""The engine's lock: a waiter gets in when the holder lets go, however soon the holder comes back."""

from __future__ import annotations

import threading
import time

import pytest

from tlt_engine.engine.fair import FairLock


def turns_while_another_waits(lock) -> int:
    """A thread holds the lock a millisecond at a time and takes it again at once; another one asks for it in the middle
    of a turn. How many more turns begin until that one is in: the most of 20 tries."""
    worst = 0
    for _ in range(20):
        asked, got, held = threading.Event(), threading.Event(), threading.Event()
        late: list[int] = []
        holder = threading.Thread(target=_hold, args=(lock, held, asked, got, late))
        holder.start()
        held.wait(10)
        asked.set()
        with lock:
            got.set()
        holder.join(10)
        worst = max(worst, len(late))
    return worst


def _hold(lock, held, asked, got, late) -> None:
    while not got.is_set() and len(late) < 500:
        with lock:
            if asked.is_set() and not got.is_set():
                late.append(1)
            held.set()
            time.sleep(0.001)


def test_a_waiter_is_next():
    assert turns_while_another_waits(FairLock()) <= 2  # it may not have reached the turnstile when a turn begins


def test_sabotage_an_ordinary_lock_keeps_it_waiting():
    assert turns_while_another_waits(threading.RLock()) > 2


def test_it_is_reentrant_and_a_condition_can_wait_on_it():
    lock = FairLock()
    condition = threading.Condition(lock)
    reached: list[str] = []

    def waiter():
        with lock, lock:
            reached.append("waits")
            condition.wait(10)
            reached.append("woken")

    thread = threading.Thread(target=waiter)
    thread.start()
    while not reached:
        time.sleep(0.001)
    with lock:
        condition.notify_all()
        assert reached == ["waits"], "it comes back only when the lock is free"
    thread.join(10)
    assert reached == ["waits", "woken"]
    with pytest.raises(RuntimeError):
        lock.release()
