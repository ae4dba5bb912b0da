"""Giving device memory back between rollout phases, and taking it again.

Knows tensors and their storages, neither requests nor graphs. A storage is emptied in place and later allocated anew:
every view of it (fused weights, Hugging Face names, layers of the KV) stays what it is, but addresses move. So whoever
holds raw addresses (a captured CUDA graph) must let go first; graphs are captured again at first use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Storages:
    """The distinct storages behind some tensors. `offload` empties them, `restore` brings them back. Either does all of
    its work or, if it raises (no memory), none."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}
        self._bytes = {key: t.untyped_storage().nbytes() for key, t in self._held.items()}
        self._copies: dict[int, Tensor] | None = None

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    @torch.no_grad()
    def offload(self, *, keep: bool) -> None:
        """keep: a copy in host memory (pinned on CUDA) is what `restore` brings back; else the values are gone."""
        if keep:
            self._copies = {key: _host_copy(_flat(t)) for key, t in self._held.items()}
        self._empty()

    def forget(self) -> None:
        """The values that `offload` kept are gone."""
        self._copies = None

    @torch.no_grad()
    def restore(self) -> None:
        """Values as before with keep=True, else zeros."""
        try:
            for key, t in self._held.items():
                self._allocate(key)
                if self._copies is None:
                    _flat(t).zero_()
                else:
                    _flat(t).copy_(self._copies[key], non_blocking=True)
        except BaseException:
            self._empty()  # a part of it would only be in the way of whoever has the memory now
            raise
        self._wait()
        self._copies = None

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


def _host_copy(flat: Tensor) -> Tensor:
    copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
    return copy.copy_(flat, non_blocking=True)
