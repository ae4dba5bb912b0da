"""Batch-invariant tree attention: the plan and the launches of `invariant_kernels`, used as `attention.TreeAttention`.

    attention = make_invariant(geometry, max_rows=128, max_batch=8, max_keys=32768, device="cuda")
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    attention.run(step, q, k_cache, v_cache, scale=scale, out=out)

A row's bits depend on its own path alone: not on the batch, on V, on chunks or prefix hits, nor on which of the two
ways of summing up (below) a step takes. Graph-safe as TreeAttention; one workspace for one stream. Knows neither
models nor requests. `invariant_cuda` has the same for the geometries that matter, faster and of other bits:
`make_invariant` takes it where it can. Shape legend: R packed rows, B requests, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from tlt_kernels.triton.attention import INTERPRETED, LOG2_E, Geometry, check_tensors
from tlt_kernels.triton.attention_kernels import RECORD, schedule_kernel
from tlt_kernels.triton.invariant_cuda import CudaInvariantAttention, serves
from tlt_kernels.triton.invariant_kernels import (
    RECENT,
    SPLIT,
    invariant_prefix_kernel,
    invariant_recent_kernel,
    recent_slots_kernel,
)

PART_BYTES = 128 << 20  # of parts; a step that would need more folds a tile's splits in one program
WAVES = 4  # programs of the prefix pass for each multiprocessor, at most


@dataclass(frozen=True)
class Sizes:
    """One set for a geometry, whatever the step: bits depend on it."""

    block_m: int
    prefix_n: int
    recent_n: int
    warps: int
    stages: int

    @staticmethod
    def of(geometry: Geometry) -> Sizes:
        group = triton.next_power_of_2(geometry.group)
        wide = geometry.block_d > 128
        if geometry.dtype == torch.float32:
            return Sizes(max(16, group), 16, 16, warps=8, stages=2)
        return Sizes(max(64, group), 32 if wide else 64, 32 if wide else 64, warps=8 if wide else 4, stages=3)


@dataclass(frozen=True)
class InvariantStep:
    """A planned step: its tensors and static sizes. parts: splits of a tile in the workspace, or 1: their fold."""

    page_table: Tensor
    prefix_lens: Tensor
    node_indptr: Tensor
    ancestors: Tensor
    causal: Tensor
    positions: Tensor
    rows: int
    max_tiles: int
    parts: int
    programs: int


class InvariantAttention:
    """Preallocated workspace for steps of at most max_rows rows, max_batch requests and max_keys keys a request."""

    def __init__(
        self, geometry: Geometry, *, max_rows: int, max_batch: int, max_keys: int, device: torch.device | str,
        part_bytes: int = PART_BYTES, multiprocessors: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.sizes = Sizes.of(geometry)
        self.max_rows = max_rows
        self.max_batch = max_batch
        self.device = torch.device(device)
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.multiprocessors = multiprocessors
        self.nodes_per_tile = self.sizes.block_m // geometry.group
        tiles = self._max_tiles(max_rows, max_batch)
        tile_floats = geometry.kv_heads * self.sizes.block_m * geometry.head_dim
        self._part_tiles = max(tiles, min(tiles * -(-max_keys // SPLIT), part_bytes // (4 * tile_floats)))
        stats_floats = geometry.kv_heads * self.sizes.block_m * 2
        self._tiles = torch.empty(max(tiles, 1), RECORD, dtype=torch.int32, device=self.device)
        self._recent = torch.empty(max_rows, RECENT, dtype=torch.int32, device=self.device)
        self._items = torch.empty(max(tiles, 1), RECORD, dtype=torch.int32, device=self.device)
        self._parts = torch.empty(self._part_tiles * tile_floats, dtype=torch.float32, device=self.device)
        self._stats = torch.empty(self._part_tiles * stats_floats, dtype=torch.float32, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        buffers = (self._tiles, self._items, self._recent, self._parts, self._stats)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _max_tiles(self, rows: int, batch: int) -> int:
        return min(rows // self.nodes_per_tile + batch, rows)

    def plan(
        self, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor, ancestors: Tensor, causal: Tensor,
        positions: Tensor, *, chunks: bool = True,
    ) -> InvariantStep:
        """Schedule one step on the device: arguments as `tree_attention`'s, read again by each `run`. chunks: as
        CudaInvariantAttention's, without effect here."""
        rows, batch = len(positions), len(prefix_lens)
        if rows > self.max_rows or batch > self.max_batch:
            raise ValueError(
                f"rows, batch: expected at most {self.max_rows} and {self.max_batch}, got {rows} and {batch}; make "
                "the plan object for the largest step"
            )
        max_tiles = self._max_tiles(rows, batch)
        splits = -(-page_table.shape[1] * self.geometry.page // SPLIT)
        parts = splits if max_tiles * splits <= self._part_tiles else 1
        spread = WAVES * self.multiprocessors // max(1, max_tiles * self.geometry.kv_heads)
        if batch > 0 and rows > 0:
            schedule_kernel[(batch,)](
                prefix_lens, node_indptr, causal, self._items, self._tiles, batch, 1, max_tiles, max_tiles,
                self.nodes_per_tile, BLOCK_N=64, MIN_BLOCKS=1, WINDOW=0, BATCH=triton.next_power_of_2(batch),
                num_warps=1,
            )
            recent_slots_kernel[(max_tiles * self.nodes_per_tile,)](
                page_table, prefix_lens, ancestors, causal, positions, self._tiles, self._recent, page_table.stride(0),
                self.nodes_per_tile, PAGE=self.geometry.page, RECENT=RECENT, num_warps=2,
            )
        return InvariantStep(
            page_table, prefix_lens, node_indptr, ancestors, causal, positions, rows, max_tiles, parts,
            programs=1 if parts == 1 else min(parts, max(1, spread)),
        )

    def run(
        self, step: InvariantStep, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float,
        out: Tensor | None = None, early: bool = False,
    ) -> Tensor:
        """[R, Hq, D] of one layer, as `TreeAttention.run`, which says what `early` is for; without effect here."""
        geometry, sizes = self.geometry, self.sizes
        check_tensors(geometry, step.rows, q, k_cache, v_cache)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.rows == 0:
            return out
        strides = (q.stride(0), q.stride(1), *k_cache.stride()[:3])
        fixed = {
            "GROUP": geometry.group, "HEADS": geometry.kv_heads, "D": geometry.head_dim, "PAGE": geometry.page,
            "WINDOW": geometry.window, "PRECISION": "ieee" if geometry.dtype == torch.float32 else "tf32",
            "BLOCK_M": sizes.block_m, "BLOCK_D": geometry.block_d, "SPLIT": SPLIT, "STAGES": sizes.stages,
        }
        invariant_prefix_kernel[(step.max_tiles, step.programs, geometry.kv_heads)](
            q, k_cache, v_cache, step.page_table, step.positions, self._tiles, self._parts, self._stats,
            scale * LOG2_E, *strides, step.page_table.stride(0), step.parts, BLOCK_N=sizes.prefix_n,
            num_warps=sizes.warps, **fixed,
        )
        invariant_recent_kernel[(step.max_tiles * self.nodes_per_tile, geometry.kv_heads)](
            q, k_cache, v_cache, step.positions, self._tiles, self._recent, self._parts, self._stats, out,
            scale * LOG2_E, *strides, step.parts, self.nodes_per_tile, BLOCK_N=sizes.recent_n, RECENT=RECENT,
            BLOCK_G=max(16, triton.next_power_of_2(geometry.group)), num_warps=4, **fixed,
        )
        return out


class AnyInvariant(Protocol):
    """Either class."""

    @property
    def workspace_bytes(self) -> int: ...

    def plan(
        self, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor, ancestors: Tensor, causal: Tensor,
        positions: Tensor, *, chunks: bool = True,
    ) -> Any: ...

    def run(
        self, step: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, out: Tensor | None = None,
        early: bool = False,
    ) -> Tensor: ...


def make_invariant(
    geometry: Geometry, *, max_rows: int, max_batch: int, max_keys: int, device: torch.device | str
) -> AnyInvariant:
    """The faster of the two for this geometry and device. Their bits differ: keep to one."""
    kind = CudaInvariantAttention if torch.device(device).type == "cuda" and serves(geometry) else InvariantAttention
    return kind(geometry, max_rows=max_rows, max_batch=max_batch, max_keys=max_keys, device=device)


def invariant_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor,
    ancestors: Tensor, causal: Tensor, positions: Tensor, *, scale: float, window: int = 0, out: Tensor | None = None,
) -> Tensor:
    """One layer without a kept plan: `tree_attention(..., invariant=True)` on the "triton" backend."""
    _, page, kv_heads, head_dim = k_cache.shape
    attention = InvariantAttention(
        Geometry(q.shape[1], kv_heads, head_dim, page, q.dtype, window), max_rows=q.shape[0],
        max_batch=len(prefix_lens), max_keys=page_table.shape[1] * page, device=q.device,
        multiprocessors=None if q.is_cuda else INTERPRETED,
    )
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    return attention.run(step, q, k_cache, v_cache, scale=scale, out=out)
