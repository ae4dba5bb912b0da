"""Attention of causal chunks (prefill) through FlashInfer, an optional package: planned once a step for all layers.

    chunks = ChunkAttention(shape, windows=(0,), scale=128**-0.5, device="cuda")
    chunks.plan(prefix_lens, node_indptr, page_table)                     # host tensors, once a step
    for layer in range(layers):
        chunks.run(0, q, k_cache, v_cache, out=out)

FlashInfer picks its kernels by GPU (FlashAttention-3 on compute capability 9.x) and compiles them at first use, then
keeps them in its own cache on disk: half a minute, with nvcc and ninja. Knows neither models nor requests, and no
draft trees: those are `tlt_kernels.triton.attention`'s. Imports FlashInfer only when a ChunkAttention is made.
Shape legend: R packed rows, B requests, P pages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)  # flashinfer/utils.cuh, DISPATCH_HEAD_DIM; 512 compiles for its older kernels only
DTYPES = (torch.bfloat16, torch.float16)
INT_WORKSPACE = 8 << 20  # bytes, FlashInfer's own default: the schedule of a step
FLOAT_WORKSPACE = {"fa2": 128 << 20, "fa3": 1 << 10}  # bytes: parts of split keys. fa3 never splits and ignores it


@dataclass(frozen=True)
class ChunkShape:
    """What one plan serves: heads of queries and of keys, head dimension, keys a page, dtype of q and the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype

    @property
    def unsupported(self) -> str | None:
        """What FlashInfer lacks for this shape, in words; None if nothing."""
        if self.dtype not in DTYPES:
            return f"FlashInfer takes bfloat16 and float16, not {str(self.dtype).removeprefix('torch.')}"
        if self.head_dim not in HEAD_DIMS:
            return f"FlashInfer takes heads of {', '.join(map(str, HEAD_DIMS))}, not {self.head_dim}"
        return None


def installed() -> bool:
    """Is the package there? Does not import it: that takes a second."""
    return importlib.util.find_spec("flashinfer") is not None


class ChunkAttention:
    """Holds one FlashInfer plan for each window, and their workspaces. One stream; run a step before the next is
    planned. windows: as `tree_attention`'s, 0 = none. Making it compiles the kernels and plans a step of one row, so
    that what cannot run fails here. Raises ImportError without the package, ValueError for what it cannot do."""

    def __init__(
        self, shape: ChunkShape, *, windows: Iterable[int], scale: float, device: torch.device | str
    ) -> None:
        if (lack := shape.unsupported) is not None:
            raise ValueError(f"ChunkAttention: {lack}; use tlt_kernels.tree_attention")
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.shape, self.device = shape, torch.device(device)
        self._pinned = self.device.type == "cuda"
        kernels = "fa3" if self._pinned and torch.cuda.get_device_capability(self.device)[0] == 9 else "fa2"
        self._workspaces = [torch.empty(FLOAT_WORKSPACE[kernels], dtype=torch.uint8, device=self.device)]
        self._options = {
            "num_qo_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim_qk": shape.head_dim,
            "page_size": shape.page, "causal": True, "sm_scale": scale, "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        self._wrappers: dict[int, Any] = {}
        for window in sorted(set(windows)):
            self._workspaces.append(torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self.device))
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspaces[0], "NHD", backend=kernels)
            wrapper.reset_workspace_buffer(self._workspaces[0], self._workspaces[-1])
            self._wrappers[window] = wrapper
        self._copied: torch.cuda.Event | None = None
        one = torch.ones(1, dtype=torch.int32)
        self.plan(one * 0, torch.tensor([0, 1], dtype=torch.int32), (one * 0)[:, None])

    @property
    def workspace_bytes(self) -> int:
        """On the device."""
        return sum(workspace.numel() for workspace in self._workspaces)

    def plan(self, prefix_lens: Tensor, node_indptr: Tensor, page_table: Tensor) -> None:
        """Schedule a step's chunks: CPU tensors as `tree_attention` takes them, of requests that all are causal and
        have at least one row. node_indptr [B + 1] may start anywhere: q's first row is node_indptr[0]. The device is
        waited for only if it has not yet begun the step before."""
        page = self.shape.page
        rows = node_indptr.numpy() - node_indptr.numpy()[0]
        keys = prefix_lens.numpy() + np.diff(rows)
        pages = -(-keys // page)
        starts = np.concatenate([[0], np.cumsum(pages)])
        held = np.arange(page_table.shape[1]) < pages[:, None]
        arrays = (rows, starts, page_table.numpy()[held], keys - (pages - 1) * page)
        if self._copied is not None:  # FlashInfer writes the next schedule where the last one is copied from
            self._copied.synchronize()
        staged = [self._staged(array) for array in arrays]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(*staged, window_left=window - 1, **self._options)
        if self._pinned:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def _staged(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._pinned else tensor

    def run(self, window: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor) -> Tensor:
        """Writes out [R, Hq, D], the planned step's rows of one layer. q as out, dense within a row; k_cache, v_cache
        [P, page, Hkv, D] of equal strides. Launches one kernel."""
        self._wrappers[window].run(q, (k_cache, v_cache), out=out)
        return out
