"""Says what an engine is doing when a step does not end: a hung collective, a drafter in a loop, a lost device.

Knows clocks and stacks, not requests: what to say of the engine's state is the engine's own function.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("tlt_engine")


class Watchdog:
    """seconds: a step that takes longer is reported once, with `describe()` and the stacks of all threads, at level
    ERROR; nothing is killed. describe: a bound method, held weakly; it is called from another thread while the step
    runs, so it must read only. The watching thread starts with the first step and ends with the engine."""

    def __init__(self, seconds: float, describe: Callable[[], str]) -> None:
        self.seconds = seconds
        self._describe = weakref.WeakMethod(describe)
        self._began: float | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        weakref.finalize(self, self._over.set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one step."""
        if self._thread is None or not self._thread.is_alive():  # none yet, or this process was forked off
            self._thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._over, self.seconds / 4), name="tlt-engine-watchdog",
                daemon=True,
            )
            self._thread.start()
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _stalled(self, reported: float | None) -> float | None:
        """When the step that has just been reported, or had been, began."""
        began = self._began
        if began is None or began == reported or time.monotonic() - began < self.seconds:
            return reported
        describe = self._describe()
        if describe is not None:
            logger.error(
                "a step has been running for more than %g s\n%s\n%s", self.seconds, _said(describe), _stacks()
            )
        return began


def _watch(dog: weakref.ref[Watchdog], over: threading.Event, interval: float) -> None:
    reported: float | None = None
    while not over.wait(interval):
        watched = dog()
        if watched is None:
            return
        reported = watched._stalled(reported)
        del watched


def _said(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as error:  # the engine is in the middle of a step: its state may not hold together
        return f"(its state could not be read: {error!r})"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
