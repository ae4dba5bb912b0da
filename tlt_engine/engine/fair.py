"""A reentrant lock that a thread cannot take twice in a row while another one waits. Knows nothing of engines.

threading.RLock lets the thread that released it take it again at once: a loop that holds it for each step would keep a
pause, an update or an abort of another thread waiting for as long as it runs.
"""

from __future__ import annotations

import threading
from typing import Any


class FairLock:
    """As threading.RLock, for `with` and threading.Condition. Whoever waits stands in a turnstile, which the holder
    must pass as well before it can take the lock again; so a waiter gets it when the present holder lets go."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock: Any = threading.RLock()

    def acquire(self) -> bool:
        if self._is_owned():
            return bool(self._lock.acquire())
        with self._turnstile:
            return bool(self._lock.acquire())

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    # ---- what Condition asks of a reentrant lock

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        with self._turnstile:
            self._lock._acquire_restore(state)
