"""A second process on the GPU: takes all memory that is free and gives it back, as a trainer beside a sleeping engine.

    with Neighbour() as other:
        other.used()            # bytes in use by everybody else, by the driver's count
        other.fill(1 << 30)     # all that is free but 1 GiB; returns how much that was
        other.release()

Speaks to the driver alone (cuda.h through ctypes), so that its own context is all it holds and it starts in no time.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from types import TracebackType


class Neighbour:
    """Of device 0."""

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen([sys.executable, "-m", "bench.neighbour"], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def used(self) -> int:
        """Its own context included."""
        return self._ask("used")

    def fill(self, spare: int) -> int:
        return self._ask(f"fill {spare}")

    def release(self) -> None:
        self._ask("release")

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"neighbour: expected an answer to {line!r}, but it has ended")
        return int(answer)


def _call(result: int, what: str) -> None:
    if result != 0:
        raise RuntimeError(f"{what}: the driver returned {result}")


def _serve() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, held = c_void_p(), c_int(), c_uint64()
    free, total = c_size_t(), c_size_t()
    _call(cuda.cuInit(0), "cuInit")
    _call(cuda.cuDeviceGet(byref(device), 0), "cuDeviceGet")
    _call(cuda.cuDevicePrimaryCtxRetain(byref(context), device), "cuDevicePrimaryCtxRetain")
    _call(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    for line in sys.stdin:
        what, *rest = line.split()
        _call(cuda.cuMemGetInfo_v2(byref(free), byref(total)), "cuMemGetInfo")
        answer = 0
        if what == "used":
            answer = total.value - free.value
        elif what == "fill":
            answer = free.value - int(rest[0])
            _call(cuda.cuMemAlloc_v2(byref(held), c_size_t(answer)), "cuMemAlloc")
        else:
            _call(cuda.cuMemFree_v2(held), "cuMemFree")
        print(answer, flush=True)


if __name__ == "__main__":
    _serve()
