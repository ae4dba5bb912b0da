"""Host arrays that reach the device in one asynchronous copy a step, and results that come back in one.

Knows sizes and dtypes, not what the arrays mean. Offsets depend on the order of the calls alone, so equal steps get
equal device addresses, which a captured graph relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from tlt_kernels.cuda import copy_block, copy_bytes
from torch import Tensor

ALIGN = 16
MAX_FRAMES = 512  # remembered sizes of results: views only, a few KB each
WIDE = 128 << 10  # bytes of a table of which only the part in use is copied: 3 us at 45 GB/s, what another call costs
NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype(np.int64), torch.int32: np.dtype(np.int32), torch.uint8: np.dtype(np.uint8),
    torch.float32: np.dtype(np.float32),
}
Sections = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def section_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGN) * ALIGN


def sections_bytes(sections: Sections) -> int:
    return sum(section_bytes(*section) for section in sections.values())


def device_view(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def host_view(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    return buffer.numpy()[start : start + prod(shape) * dtype.itemsize].view(NUMPY[dtype]).reshape(shape)


class Frame:
    """Named sections of a staging buffer from its start on: `host` to fill, `device` to read. end: bytes in use.
    table: the last section's name; wide: it is a table so large that `flush` copies its part in use alone."""

    def __init__(self, host: Tensor, device: Tensor, sections: Sections) -> None:
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        self.offsets: dict[str, int] = {}
        self.addresses: dict[str, int] = {}  # of the host arrays; asking numpy each time takes 1 us
        self.end = 0
        for name, (shape, dtype) in sections.items():
            self.host[name] = host_view(host, self.end, shape, dtype)
            self.device[name] = device_view(device, self.end, shape, dtype)
            self.offsets[name] = self.end
            self.addresses[name] = host.data_ptr() + self.end
            self.end += section_bytes(shape, dtype)
        self.table = next(reversed(self.host))
        self.wide = self.host[self.table].ndim == 2 and self.host[self.table].nbytes > WIDE


class Staging:
    """size: bytes of the buffers, which never move. What does not fit behind a frame goes by copies of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._host, self._device = pinned(size), torch.zeros(size, dtype=torch.uint8, device=device)
        self.stream: torch.cuda.Stream | None = None  # torch's current one; to look it up takes the event 5 us a step
        self._copied = torch.cuda.Event()
        self._used = 0
        self._kept: list[Tensor] = []  # host tensors whose copies may still run

    @property
    def bytes(self) -> int:
        return len(self._device)

    def frame(self, sections: Sections) -> Frame:
        """Views only: nothing is in use before `begin`."""
        return Frame(self._host, self._device, sections)

    def begin(self, frame: Frame) -> None:
        """Before the frame's host arrays are written: waits for the copy of the step before, which is long done."""
        self.wait()
        self.open(frame)

    def open(self, frame: Frame) -> None:
        """As begin, when there has been a wait since the last copy."""
        self._kept.clear()
        self._used = frame.end

    def put(self, tensor: Tensor) -> Tensor:
        """A CPU tensor's copy on the device, there once `flush` has run."""
        shape, size = tuple(tensor.shape), section_bytes(tuple(tensor.shape), tensor.dtype)
        if self._used + size > len(self._host):
            self._kept.append(tensor.pin_memory())
            return self._kept[-1].to(self._device.device, non_blocking=True)
        host_view(self._host, self._used, shape, tensor.dtype)[...] = tensor.numpy()
        self._used += size
        return device_view(self._device, self._used - size, shape, tensor.dtype)

    def flush(self, frame: Frame, rows: int, columns: int) -> None:
        """Sends all that is in use. Of a wide frame's table only the first `rows` by `columns`; what lies outside them
        on the device is then anything."""
        if not frame.wide:
            self._copy(0, self._used)
            return
        self._copy(0, frame.offsets[frame.table])
        if self._used > frame.end:
            self._copy(frame.end, self._used)
        self.flush_block(frame, (0, rows), (0, columns))

    def flush_block(self, frame: Frame, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Sends rows [first, end) by columns [first, end) of the frame's table."""
        table = frame.host[frame.table]
        pitch, item = table.strides
        start = frame.offsets[frame.table] + rows[0] * pitch + columns[0] * item
        width, height = (columns[1] - columns[0]) * item, rows[1] - rows[0]
        copy_block(self._device, self._host, start, pitch, width, height, self._device.device)
        self._copied.record(self.stream)

    def wait(self) -> None:
        """Until the host arrays may be written again."""
        self._copied.synchronize()

    def _copy(self, start: int, end: int) -> None:
        copy_bytes(self._device, self._host, start, end, self._device.device)
        self._copied.record(self.stream)


class Upload:
    """Arrays that the host writes now and then, on the device at addresses that never move: `begin`, write
    frame.host, `send`."""

    def __init__(self, sections: Sections, device: torch.device) -> None:
        size = sections_bytes(sections)
        self._host, self._device = pinned(size), torch.zeros(size, dtype=torch.uint8, device=device)
        self.frame = Frame(self._host, self._device, sections)
        self._sent = torch.cuda.Event()

    @property
    def bytes(self) -> int:
        return len(self._device)

    def begin(self) -> None:
        """Waits for the copy before, which is long done."""
        self._sent.synchronize()

    def send(self) -> None:
        copy_bytes(self._device, self._host, 0, self.frame.end, self._device.device)
        self._sent.record()


class Results:
    """Device results of a step in one buffer, read back in one copy. Two host buffers: while one is read, the next
    step's copy fills the other. sections(*sizes): what a step of these sizes gives; largest: the sizes to allocate for.
    """

    def __init__(self, sections: Callable[..., Sections], largest: tuple[int, ...], device: torch.device) -> None:
        self._sections = sections
        size = sections_bytes(sections(*largest))
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = (pinned(size), pinned(size))
        self._frames: dict[tuple[int, tuple[int, ...]], Frame] = {}
        self._turn = 0

    @property
    def bytes(self) -> int:
        return len(self._device)

    def open(self, sizes: tuple[int, ...]) -> Frame:
        """Where the next step's results go. Its host arrays are valid until the call after the next one."""
        self._turn ^= 1
        key = (self._turn, sizes)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            frame = self._frames[key] = Frame(self._hosts[self._turn], self._device, self._sections(*sizes))
        return frame

    def view(self, sizes: tuple[int, ...]) -> dict[str, Tensor]:
        """Where they lie on the device for a step of these sizes."""
        return Frame(self._hosts[0], self._device, self._sections(*sizes)).device

    def fetch(self, frame: Frame) -> torch.cuda.Event:
        """Starts the copy; the frame's host arrays hold the results once the event has happened."""
        copy_bytes(self._hosts[self._turn], self._device, 0, frame.end, self._device.device)
        done = torch.cuda.Event()
        done.record()
        return done
