"""Giving device memory back between rollout phases, and taking it again.

Knows tensors and their storages, neither requests nor graphs. A storage is emptied in place and later allocated anew:
every view of it (fused weights, Hugging Face names, layers of the KV) stays what it is, but addresses move. So whoever
holds raw addresses (a captured CUDA graph) must let go first; graphs are captured again at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK = 1 << 28  # bytes: torch rounds each pinned block up to a power of two, which would double some weights' copies
ALIGNED = 512  # bytes, of each tensor in the host's copy


class Storages:
    """The distinct storages behind some tensors. `offload` empties them, `restore` brings them back. Either does all of
    its work or, if it raises (no memory), none."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}
        self._bytes = {key: t.untyped_storage().nbytes() for key, t in self._held.items()}
        self._chunks: list[Tensor] | None = None  # the host's copy: storages one behind the other

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    @torch.no_grad()
    def offload(self, *, keep: bool) -> None:
        """keep: a copy in host memory (pinned on CUDA) is what `restore` brings back; else the values are gone."""
        if keep:
            self._chunks = list(self._host_chunks())
            for t, place in zip(self._held.values(), self._places()):
                for part, chunk in _pieces(_flat(t), self._chunks, place):
                    chunk.copy_(part, non_blocking=True)
        self._empty()

    def forget(self) -> None:
        """The values that `offload` kept are gone."""
        self._chunks = None

    @torch.no_grad()
    def restore(self) -> None:
        """Values as before with keep=True, else zeros."""
        try:
            for (key, t), place in zip(self._held.items(), self._places()):
                self._allocate(key)  # while the copies before it are under way
                if self._chunks is None:
                    _flat(t).zero_()
                else:
                    for part, chunk in _pieces(_flat(t), self._chunks, place):
                        part.copy_(chunk, non_blocking=True)
        except BaseException:
            self._empty()  # a part of it would only be in the way of whoever has the memory now
            raise
        self._wait()
        self._chunks = None

    def _places(self) -> Iterator[int]:
        """Where each storage begins in the host's copy."""
        place = 0
        for size in self._bytes.values():
            yield place
            place += -(-size // ALIGNED) * ALIGNED

    def _host_chunks(self) -> Iterator[Tensor]:
        total = sum(-(-size // ALIGNED) * ALIGNED for size in self._bytes.values())
        pinned = any(t.is_cuda for t in self._held.values())
        for start in range(0, total, CHUNK):
            yield _host_memory(min(CHUNK, total - start), pinned)

    def _allocate(self, key: int) -> None:
        self._held[key].untyped_storage().resize_(self._bytes[key])

    def _empty(self) -> None:
        self._wait()  # copies, and passes launched ahead on any stream, still use the memory
        for t in self._held.values():
            t.untyped_storage().resize_(0)

    def _wait(self) -> None:
        for device in {t.device for t in self._held.values() if t.is_cuda}:
            torch.cuda.synchronize(device)


def _flat(tensor: Tensor) -> Tensor:
    """All bytes of its storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _pieces(flat: Tensor, chunks: list[Tensor], place: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a storage with their places in the chunks, the first at `place`."""
    start = 0
    while start < len(flat):
        chunk, at = divmod(place + start, CHUNK)
        count = min(len(flat) - start, CHUNK - at)
        yield flat[start : start + count], chunks[chunk][at : at + count]
        start += count


def _host_memory(size: int, pinned: bool) -> Tensor:
    """Pinned blocks stay with torch when they are given up: only the first sleep of a process waits for the driver."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
