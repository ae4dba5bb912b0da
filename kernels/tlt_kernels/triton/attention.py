"""Tree attention on the GPU: plan a step once, then run it for every layer.

    attention = TreeAttention(geometry, max_rows=128, max_batch=8, device="cuda")
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    for layer in range(layers):
        attention.run(step, q, k_cache, v_cache, scale=scale, out=out)

Both calls launch kernels and nothing else: no synchronization, no allocation when `out` is given, and grids that
depend on shapes alone (R, B), so a captured graph replays with other lengths, trees and pages. Checks shapes of the
geometry only; `tlt_kernels.attention.tree_attention` is the checked public op. Knows neither models nor requests.
Shape legend: R packed rows, B requests, T tiles, W work items (see `attention_kernels`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tlt_kernels.triton.attention_kernels import RECORD, attend_kernel, merge_kernel, schedule_kernel

LOG2_E = math.log2(math.e)
INTERPRETED = 4  # multiprocessors to split for where there is no GPU: enough for the merge to have work
MAX_GROUP = 128  # rows of the largest tile: query heads of one KV head


@dataclass(frozen=True)
class Geometry:
    """What one plan serves. window: 0 = none; layers of another window need another plan."""

    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype
    window: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads or self.group > MAX_GROUP:
            raise ValueError(
                f"heads, kv_heads: expected 1 to {MAX_GROUP} query heads to each KV head, got {self.heads} and "
                f"{self.kv_heads}; pass the model's own counts (per rank, if its heads are split)"
            )
        if self.head_dim > 256 or self.head_dim % 8:
            raise ValueError(
                f"head_dim: expected a multiple of 8 up to 256, got {self.head_dim}; use backend='reference'"
            )
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {self.dtype}; cast q and the cache")

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))


@dataclass(frozen=True)
class Tiling:
    """Sizes of the kernels for one tile height. block_n keys a block; programs per multiprocessor that the schedule
    splits the work for; an item holds at least min_blocks blocks, below which merging costs more than it spreads.
    stages: 3 hold one block of K and V in flight, 5 two, 7 three, since page ids must arrive a stage before the keys.
    """

    block_n: int
    warps: int
    stages: int
    programs: int
    min_blocks: int


def tile_rows(geometry: Geometry, rows: int, batch: int) -> int:
    """M: the power of two that holds an average request's rows times the group's heads, within what compiles well.

    A request with more rows takes several tiles, whose second read of a key comes from L2. fp32 has no tensor-core
    product of full precision, and its dot operands live in registers: 32 rows fit."""
    largest = 32 if geometry.dtype == torch.float32 else 128
    need = triton.next_power_of_2(math.ceil(rows / max(batch, 1)) * geometry.group)
    return max(16, triton.next_power_of_2(geometry.group), min(need, largest))


def default_tiling(geometry: Geometry, block_m: int) -> Tiling:
    """Found by bench/kernels_attention.py on an H200, fixed so that a step never tunes itself."""
    wide = geometry.block_d > 128
    if geometry.dtype == torch.float32:
        return Tiling(block_n=16 if geometry.block_d > 64 else 32, warps=8, stages=3, programs=2, min_blocks=2)
    block_n = 32 if wide else 64
    if block_m <= 32:
        return Tiling(block_n, warps=4, stages=5, programs=3 if block_m == 16 else 2, min_blocks=2)
    if block_m == 64:
        return Tiling(block_n, warps=4, stages=3, programs=2, min_blocks=4)
    return Tiling(block_n, warps=8, stages=3 if wide else 5, programs=1, min_blocks=4)


@dataclass(frozen=True)
class Step:
    """A planned step: its tensors (as `tree_attention` takes them), the schedule on the device, and static sizes."""

    page_table: Tensor
    prefix_lens: Tensor
    node_indptr: Tensor
    ancestors: Tensor
    causal: Tensor
    positions: Tensor
    rows: int
    block_m: int
    nodes_per_tile: int
    tiling: Tiling
    slots: int
    max_tiles: int
    max_items: int


class TreeAttention:
    """Preallocated workspace for steps of at most max_rows rows and max_batch requests.

    The schedule of the last `plan` call and the parts of the last `run` lie in it: use one stream, run a step before
    the next is planned. Graphs of other sizes may share it, since each replays its own plan first.
    tiling: in place of `default_tiling`. multiprocessors: how many to split the work for; default the device's.
    """

    def __init__(
        self, geometry: Geometry, *, max_rows: int, max_batch: int, device: torch.device | str,
        tiling: Tiling | None = None, multiprocessors: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.max_rows = max_rows
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.tiling = tiling
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.multiprocessors = multiprocessors
        items = tiles = parts = stats = 0
        largest = max(tile_rows(geometry, max_rows, 1), tile_rows(geometry, 1, 1))
        block_m = tile_rows(geometry, 1, 1)
        while block_m <= largest:
            slots, max_tiles, max_items = self._sizes(max_rows, max_batch, block_m)
            items, tiles = max(items, max_items), max(tiles, max_tiles)
            parts = max(parts, slots * geometry.kv_heads * block_m * geometry.head_dim)
            stats = max(stats, slots * geometry.kv_heads * block_m * 2)
            block_m *= 2
        self._items = torch.empty(items, RECORD, dtype=torch.int32, device=self.device)
        self._tiles = torch.empty(tiles, RECORD, dtype=torch.int32, device=self.device)
        self._parts = torch.empty(parts, dtype=torch.float32, device=self.device)
        self._stats = torch.empty(stats, dtype=torch.float32, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        buffers = (self._items, self._tiles, self._parts, self._stats)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _tiling(self, block_m: int) -> Tiling:
        return self.tiling or default_tiling(self.geometry, block_m)

    def _sizes(self, rows: int, batch: int, block_m: int) -> tuple[int, int, int]:
        """Slots for split items, and upper bounds of tiles and items for any division of `rows` among requests."""
        slots = max(1, self.multiprocessors * self._tiling(block_m).programs // self.geometry.kv_heads)
        max_tiles = min(rows // (block_m // self.geometry.group) + batch, rows)
        return slots, max_tiles, max(slots, max_tiles)

    def plan(
        self, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor, ancestors: Tensor, causal: Tensor,
        positions: Tensor,
    ) -> Step:
        """Schedule one step on the device: arguments as `tree_attention`'s, read again by each `run`."""
        rows, batch = len(positions), len(prefix_lens)
        if rows > self.max_rows or batch > self.max_batch:
            raise ValueError(
                f"rows, batch: expected at most {self.max_rows} and {self.max_batch}, got {rows} and {batch}; make "
                "the plan object for the largest step"
            )
        geometry = self.geometry
        block_m = tile_rows(geometry, rows, batch)
        tiling = self._tiling(block_m)
        slots, max_tiles, max_items = self._sizes(rows, batch, block_m)
        nodes_per_tile = block_m // geometry.group
        if batch > 0:
            schedule_kernel[(batch,)](
                prefix_lens, node_indptr, causal, self._items, self._tiles, batch, slots, max_items, max_tiles,
                nodes_per_tile, BLOCK_N=tiling.block_n, MIN_BLOCKS=tiling.min_blocks, WINDOW=geometry.window,
                BATCH=triton.next_power_of_2(batch), num_warps=1,
            )
        return Step(
            page_table, prefix_lens, node_indptr, ancestors, causal, positions, rows, block_m, nodes_per_tile, tiling,
            slots, max_tiles, max_items,
        )

    def run(
        self, step: Step, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """[R, Hq, D] of one layer, contiguous. q [R, Hq, D] dense within a row; caches [P, page, Hkv, D] of equal
        strides. Rows beyond node_indptr[B] are not written."""
        geometry = self.geometry
        shape = (step.rows, geometry.heads, geometry.head_dim)
        cache_shape = (k_cache.shape[0], geometry.page, geometry.kv_heads, geometry.head_dim)
        if tuple(q.shape) != shape or tuple(k_cache.shape) != cache_shape or k_cache.stride() != v_cache.stride():
            raise ValueError(
                f"q, k_cache, v_cache: expected {list(shape)} and twice {list(cache_shape)} of equal strides, got "
                f"{list(q.shape)}, {list(k_cache.shape)} {k_cache.stride()}, {list(v_cache.shape)} {v_cache.stride()};"
                " the plan was made for another geometry or step"
            )
        if out is None:
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        if step.rows == 0:
            return out
        tiling = step.tiling
        attend_kernel[(step.max_items, geometry.kv_heads)](
            q, k_cache, v_cache, step.page_table, step.prefix_lens, step.node_indptr, step.ancestors, step.causal,
            step.positions, self._items, out, self._parts, self._stats, scale * LOG2_E, q.stride(0), q.stride(1),
            *k_cache.stride()[:3], step.page_table.stride(0), geometry.group, step.nodes_per_tile,
            HEADS=geometry.kv_heads, D=geometry.head_dim, PAGE=geometry.page, WINDOW=geometry.window,
            PRECISION="ieee" if geometry.dtype == torch.float32 else "tf32", BLOCK_M=step.block_m,
            BLOCK_N=tiling.block_n, BLOCK_D=geometry.block_d, STAGES=tiling.stages, num_warps=tiling.warps,
        )
        merge_kernel[(step.max_tiles * step.nodes_per_tile, geometry.heads)](
            self._tiles, self._parts, self._stats, out, geometry.group, step.nodes_per_tile, HEADS=geometry.kv_heads,
            D=geometry.head_dim, BLOCK_M=step.block_m, BLOCK_D=geometry.block_d, BLOCK_S=16, num_warps=2,
        )
        return out


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor,
    ancestors: Tensor, causal: Tensor, positions: Tensor, *, scale: float, window: int = 0, out: Tensor | None = None,
) -> Tensor:
    """One layer without a kept plan: the "triton" backend of `tlt_kernels.attention.tree_attention`, which checks."""
    _, page, kv_heads, head_dim = k_cache.shape
    attention = TreeAttention(
        Geometry(q.shape[1], kv_heads, head_dim, page, q.dtype, window), max_rows=q.shape[0],
        max_batch=len(prefix_lens), device=q.device, multiprocessors=None if q.is_cuda else INTERPRETED,
    )
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    return attention.run(step, q, k_cache, v_cache, scale=scale, out=out)
