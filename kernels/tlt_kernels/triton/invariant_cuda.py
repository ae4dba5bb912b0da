"""Batch-invariant attention in CUDA (csrc/cuda/invariant_attention.cuh): its plan, its workspace, its launches.

As `invariant.InvariantAttention`, which cuts a row's path at the same places (the border, splits of 512) and serves
every geometry; inside a split the two add up in different orders, so that one engine takes one of them for all its
passes. Graph-safe: launches alone, of sizes that depend on shapes. Knows neither models nor requests.
Shape legend: R packed rows, B requests, M rows of a tile, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlt_kernels.backend import current_stream, extension
from tlt_kernels.triton.attention import CUDA_DTYPES, LOG2_E, Geometry, check_tensors

SPLIT, RECENT, RECORD = 512, 192, 8  # csrc/cuda/invariant.h: keys, keys, words
HEAD_DIMS = (64, 128)
MAX_GROUP = 64  # rows of the largest tile
CHUNK_ROWS = 128  # rows of a tile of a chunk: eight warps of 16
PART_BYTES = 128 << 20  # of parts; a step that would need more folds a tile's splits in one program


def serves(geometry: Geometry) -> bool:
    """Are the CUDA kernels made for this geometry, and built?"""
    page = geometry.page
    fits = geometry.head_dim in HEAD_DIMS and geometry.dtype in CUDA_DTYPES and geometry.group <= MAX_GROUP
    return fits and page >= 16 and page & (page - 1) == 0 and bool(extension().with_cuda)


def tile_rows(geometry: Geometry, rows: int, batch: int) -> int:
    """M of a step: what holds an average request's rows times the group's heads. Any gives the same bits."""
    need = max(-(-rows // max(batch, 1)), 1) * geometry.group
    return 16 if need <= 16 else 32 if need <= 32 else 64


@dataclass(frozen=True)
class CudaInvariantStep:
    """A planned step: its tensors, kept alive, and what every layer hands to the kernels."""

    tensors: tuple[Tensor, ...]
    addresses: list[int]
    sizes: list[int]
    rows: int
    block_m: int


class CudaInvariantAttention:
    """Preallocated workspace for steps of at most max_rows rows, max_batch requests and max_keys keys a request."""

    def __init__(
        self, geometry: Geometry, *, max_rows: int, max_batch: int, max_keys: int, device: torch.device | str,
        part_bytes: int = PART_BYTES,
    ) -> None:
        if not serves(geometry):
            raise ValueError(
                f"geometry: expected bf16 or fp16 heads of {HEAD_DIMS}, up to {MAX_GROUP} query heads a KV head and "
                f"pages of a power of two >= 16, in a build with CUDA, got {geometry}; use InvariantAttention"
            )
        self.geometry, self.max_rows, self.max_batch = geometry, max_rows, max_batch
        self.device = torch.device(device)
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        step = min(64, CHUNK_ROWS // geometry.group)
        self.chunk_nodes = 1 << (step.bit_length() - 1)
        heights = [m for m in (16, 32, 64) if m >= geometry.group]
        least = max(m * (max_rows // (m // geometry.group) + max_batch) for m in heights)  # a part for each tile
        row_bytes = geometry.kv_heads * geometry.head_dim * 4
        wanted = min(least * max(1, -(-max_keys // SPLIT)), part_bytes // row_bytes)
        self._part_rows = max(least, wanted)
        ints, floats = partial(self._empty, torch.int32), partial(self._empty, torch.float32)
        self._header = ints(4)
        self._items = ints(self._part_rows // heights[0] + max_rows, RECORD)
        self._chunks = ints(max_rows // self.chunk_nodes + 2 * max_batch + 1, RECORD)
        self._rows = ints(max_rows, 4)
        self._recent = ints(max_rows, RECENT)
        self._parts = floats(self._part_rows * geometry.kv_heads * geometry.head_dim)
        self._stats = floats(self._part_rows * geometry.kv_heads * 2)
        self._recent_parts = floats(max_rows, geometry.heads, geometry.head_dim)
        self._recent_stats = floats(max_rows, geometry.heads, 2)
        self._plan = [t.data_ptr() for t in (self._header, self._items, self._chunks, self._rows, self._recent)]

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        buffers = (
            self._header, self._items, self._chunks, self._rows, self._recent, self._parts, self._stats,
            self._recent_parts, self._recent_stats,
        )
        return sum(buffer.nbytes for buffer in buffers)

    def plan(
        self, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor, ancestors: Tensor, causal: Tensor,
        positions: Tensor, *, chunks: bool = True,
    ) -> CudaInvariantStep:
        """Schedule one step on the device: arguments as `tree_attention`'s. chunks: False says that no request is a
        chunk of many rows, which spares each layer a launch; if it is untrue the bits are the same, and slower."""
        rows, batch = len(positions), len(prefix_lens)
        if rows > self.max_rows or batch > self.max_batch:
            raise ValueError(
                f"rows, batch: expected at most {self.max_rows} and {self.max_batch}, got {rows} and {batch}; make "
                "the plan object for the largest step"
            )
        geometry = self.geometry
        block_m = tile_rows(geometry, rows, batch)
        per_processor = 1 if block_m == 64 else 2
        sizes = [
            page_table.stride(0), rows, batch, geometry.page, geometry.group, geometry.window,
            block_m // geometry.group, self.chunk_nodes if chunks else 0, self._part_rows // block_m,
            per_processor * self.multiprocessors, self.multiprocessors,
        ]
        tensors = (page_table, prefix_lens, node_indptr, ancestors, causal, positions)
        step = CudaInvariantStep(tensors, [t.data_ptr() for t in tensors], sizes, rows, block_m)
        if rows > 0 and batch > 0:
            extension().cuda_invariant_plan(
                step.addresses, step.sizes, self._plan, stream=current_stream(self.device)
            )
        return step

    def run(
        self, step: CudaInvariantStep, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float,
        out: Tensor | None = None, early: bool = False,
    ) -> Tensor:
        """[R, Hq, D] of one layer, as `TreeAttention.run`. The caches must be dense from page to page."""
        geometry = self.geometry
        check_tensors(geometry, step.rows, q, k_cache, v_cache)
        page_stride, slot_stride, head_stride = k_cache.stride()[:3]
        dense = page_stride == geometry.page * slot_stride and slot_stride % 8 == head_stride % 8 == 0
        if not dense or k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16 or q.stride(0) % 2 or q.data_ptr() % 4:
            raise ValueError(
                f"k_cache, v_cache, q: expected dense pages, keys at 16-byte borders and q's rows at 4-byte borders, "
                f"got strides {k_cache.stride()} and {q.stride()}; use InvariantAttention"
            )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.rows == 0:
            return out
        tensors = (
            q, k_cache, v_cache, out, self._parts, self._stats, self._recent_parts, self._recent_stats,
        )
        sizes = [
            q.stride(0), slot_stride, head_stride, geometry.kv_heads, geometry.head_dim, step.block_m, int(early),
        ]
        extension().cuda_invariant_attention(
            step.addresses, step.sizes, self._plan, [t.data_ptr() for t in tensors], sizes, scale * LOG2_E,
            CUDA_DTYPES[geometry.dtype], stream=current_stream(self.device),
        )
        return out
