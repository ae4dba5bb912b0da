"""The engine's lock: a waiter gets in when the holder lets go, however soon the holder comes back."""

from __future__ import annotations

import threading
import time

import pytest

from tlt_engine.engine.fair import FairLock


def test_a_waiter_is_next_however_soon_the_holder_comes_back():
    """An ordinary lock mostly goes to the one that has just released it: here the holder would be first."""
    lock = FairLock()
    for _ in range(50):
        order: list[str] = []

        def wait(order=order) -> None:
            with lock:
                order.append("waiter")

        waiter = threading.Thread(target=wait)
        with lock:
            waiter.start()
            while not lock._turnstile.locked():  # it stands in line
                time.sleep(0.0001)
        with lock:
            order.append("holder")
        waiter.join(10)
        assert order == ["waiter", "holder"]


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
