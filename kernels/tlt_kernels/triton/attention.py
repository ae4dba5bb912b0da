"""Tree attention on the GPU: plan a step once, then run it for every layer.

    attention = TreeAttention(geometry, max_rows=128, max_batch=8, device="cuda")
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    for layer in range(layers):
        attention.run(step, q, k_cache, v_cache, scale=scale, out=out)

Both calls launch kernels and nothing else: no synchronization, no allocation when `out` is given, and grids that
depend on shapes alone (R, B), so a captured graph replays with other lengths, trees and pages. Checks shapes of the
geometry only; `tlt_kernels.attention.tree_attention` is the checked public op. Knows neither models nor requests.
Two sets of kernels share the schedule: Triton's, for every geometry and for prefill, and those of
csrc/cuda/attention.cuh, for trees of 16-bit heads of 128 over pages of a multiple of 16 keys.
Shape legend: R packed rows, B requests, T tiles, W work items (see `attention_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
from torch import Tensor

from tlt_kernels.backend import current_stream, extension
from tlt_kernels.triton.attention_kernels import RECORD, attend_kernel, merge_kernel, schedule_kernel

LOG2_E = math.log2(math.e)
INTERPRETED = 4  # multiprocessors to split for where there is no GPU: enough for the merge to have work
MAX_GROUP = 128  # rows of the largest tile: query heads of one KV head
MAX_TREE = 128  # nodes a request may have: steps of more rows a request on average are prefill
CUDA_DTYPES = {torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/sample.h, Dtype


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

    @property
    def has_cuda(self) -> bool:
        """Is this a geometry of csrc/cuda/attention.cuh, and is that built?"""
        fits = self.head_dim == 128 and self.dtype in CUDA_DTYPES and self.page % 16 == 0 and self.window == 0
        return fits and bool(extension().with_cuda)


@dataclass(frozen=True)
class Tiling:
    """Sizes of the kernels for one tile height. block_n keys a block; programs per multiprocessor that the schedule
    splits the work for; an item holds at least min_blocks blocks, below which merging costs more than it spreads.
    stages: 3 hold one block of K and V in flight, 5 two, 7 three, since page ids must arrive a stage before the keys.
    kernels: "cuda" (csrc/cuda/attention.cuh) and "hopper" (csrc/cuda/hopper) count blocks of 16 keys here and fix
    warps by the tile. "cuda" has 3, 4 or 6 stages, "hopper" 6 and one program a multiprocessor or 3 and two (64 rows
    only), and `cluster` (1 to 8) items that merge in shared memory.
    """

    block_n: int
    warps: int
    stages: int
    programs: int
    min_blocks: int
    kernels: Literal["triton", "cuda", "hopper"] = "triton"
    cluster: int = 1


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


def cuda_tiling(block_m: int) -> Tiling:
    """Found as `default_tiling`: one block of threads for each multiprocessor, so that all items end together."""
    if block_m == 16:
        return Tiling(block_n=16, warps=4, stages=4, programs=1, min_blocks=8, kernels="cuda")
    return Tiling(block_n=16, warps=4 if block_m == 32 else 8, stages=3, programs=1, min_blocks=8, kernels="cuda")


def hopper_tiling(cluster: int, programs: int = 1) -> Tiling:
    return Tiling(
        block_n=16, warps=9, stages=6 // programs, programs=programs, min_blocks=8, kernels="hopper", cluster=cluster
    )


CLUSTERS = range(1, 9)  # sizes that every Hopper GPU runs


def best_cluster(slots: Sequence[int], tiles: int) -> int:
    """The cluster for so many tiles of about equal length, where clusters of CLUSTERS[i] run slots[i] items at once.

    From a sweep on an H200 (28/4 heads, 67 and 270 MB of keys): a tile that stands in one cluster saves a tenth, each
    cluster more costs 0.5 %, and a third more multiprocessors bring 5 to 9 %, as three quarters nearly saturate memory.
    """

    def worth(cluster: int, slots_of: int) -> float:
        if slots_of < tiles:
            return 0.0
        splits = slots_of // tiles
        teams = max((t * splits + splits - 1) // cluster - t * splits // cluster + 1 for t in range(tiles))
        return (tiles * splits / slots[0]) ** 0.25 * (0.9 if teams > 1 else 1.0) - 0.005 * teams

    return max(zip(CLUSTERS, slots, strict=True), key=lambda pair: worth(*pair))[0]


@cache
def clusters_at_once(device: torch.device, block_m: int, stages: int, cluster: int) -> int:
    """How many clusters of the Hopper kernel the device holds: a part of 8 blocks needs 8 free multiprocessors of one
    of its groups, of which some are left over."""
    with torch.cuda.device(device):
        return int(extension().cuda_attention_clusters(block_m, stages, cluster))


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


def check_tensors(geometry: Geometry, rows: int, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuses tensors of a layer that the plan was not made for."""
    shape = (rows, geometry.heads, geometry.head_dim)
    cache_shape = (k_cache.shape[0], geometry.page, geometry.kv_heads, geometry.head_dim)
    if tuple(q.shape) != shape or tuple(k_cache.shape) != cache_shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"q, k_cache, v_cache: expected {list(shape)} and twice {list(cache_shape)} of equal strides, got "
            f"{list(q.shape)}, {list(k_cache.shape)} {k_cache.stride()}, {list(v_cache.shape)} {v_cache.stride()};"
            " the plan was made for another geometry or step"
        )


class TreeAttention:
    """Preallocated workspace for steps of at most max_rows rows and max_batch requests.

    The schedule of the last `plan` call and the parts of the last `run` lie in it: use one stream, run a step before
    the next is planned. Graphs of other sizes may share it, since each replays its own plan first.
    tiling: in place of the defaults. multiprocessors: how many to split the work for; default the device's.
    cuda: may the CUDA kernels run? None: where they exist (`Geometry.has_cuda`). They need scale > 0.
    """

    def __init__(
        self, geometry: Geometry, *, max_rows: int, max_batch: int, device: torch.device | str,
        tiling: Tiling | None = None, multiprocessors: int | None = None, cuda: bool | None = None,
    ) -> None:
        self.geometry = geometry
        self.max_rows = max_rows
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.tiling = tiling
        self.cuda = self.device.type == "cuda" and geometry.has_cuda if cuda is None else cuda
        self.hopper = (
            self.cuda and bool(extension().with_hopper) and torch.cuda.get_device_capability(self.device) == (9, 0)
        )
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.multiprocessors = multiprocessors
        self._chosen: dict[tuple[int, int], Tiling] = {}
        items = tiles = parts = stats = arrivals = 0
        block_m = tile_rows(geometry, 1, 1)
        largest = max(tile_rows(geometry, max_rows, 1), block_m, 64 if self.hopper else 16)
        while block_m <= largest:
            for one in self._tilings(block_m):
                slots, max_tiles, max_items = self._sizes(max_rows, max_batch, block_m, one)
                items, tiles = max(items, max_items), max(tiles, max_tiles)
                parts = max(parts, slots * geometry.kv_heads * block_m * geometry.head_dim)
                stats = max(stats, slots * geometry.kv_heads * block_m * 2)
                if one.kernels == "hopper":
                    arrivals = max(arrivals, slots * geometry.kv_heads * block_m)
            block_m *= 2
        self._items = torch.empty(items, RECORD, dtype=torch.int32, device=self.device)
        self._tiles = torch.empty(tiles, RECORD, dtype=torch.int32, device=self.device)
        self._parts = torch.empty(parts, dtype=torch.float32, device=self.device)
        self._stats = torch.empty(stats, dtype=torch.float32, device=self.device)
        self._arrivals = torch.zeros(arrivals, dtype=torch.int32, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        buffers = (self._items, self._tiles, self._parts, self._stats, self._arrivals)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _tilings(self, block_m: int) -> list[Tiling]:
        """Every tiling that a step of tiles of this height may get."""
        found = [default_tiling(self.geometry, block_m)]
        if self.tiling is not None:
            heights = (64, 128)[: 3 - self.tiling.programs]
            found = [self.tiling] if self.tiling.kernels != "hopper" or block_m in heights else []
        elif self.hopper and block_m >= 64:
            found += [hopper_tiling(cluster) for cluster in CLUSTERS] + [hopper_tiling(1, 2)] * (block_m == 64)
        elif self.cuda and not self.hopper:
            found.append(cuda_tiling(block_m))
        return found

    def _tiling(self, rows: int, batch: int) -> tuple[int, Tiling]:
        """M and the sizes for a step of this shape."""
        block_m = tile_rows(self.geometry, rows, batch)
        if self.tiling is not None:
            return max(block_m, 64) if self.tiling.kernels == "hopper" else block_m, self.tiling
        if not self.cuda or rows > MAX_TREE * batch:
            return block_m, default_tiling(self.geometry, block_m)
        if not self.hopper:
            return block_m, cuda_tiling(block_m)
        block_m = max(block_m, 64)
        tiles_of_each = math.ceil(rows / max(batch, 1) / (block_m // self.geometry.group))
        return block_m, self._hopper_tiling(block_m, max(1, batch * tiles_of_each))

    def _hopper_tiling(self, block_m: int, tiles: int) -> Tiling:
        """For so many tiles of about equal length: keep memory busy, and each tile's items in few clusters."""
        if (block_m, tiles) not in self._chosen:
            self._chosen[block_m, tiles] = self._choose(block_m, tiles)
        return self._chosen[block_m, tiles]

    def _choose(self, block_m: int, tiles: int) -> Tiling:
        if block_m == 64 and 2 * tiles > self._slots(block_m, hopper_tiling(1)):
            return hopper_tiling(1, programs=2)  # half the slots are there for the splits of the longest requests
        return hopper_tiling(best_cluster([self._slots(block_m, hopper_tiling(c)) for c in CLUSTERS], tiles))

    def _slots(self, block_m: int, tiling: Tiling) -> int:
        """Items of a KV head that run at once; 0 where no cluster of each head fits."""
        blocks = self.multiprocessors * tiling.programs
        if tiling.kernels == "hopper":
            clusters = clusters_at_once(self.device, block_m, tiling.stages, tiling.cluster)
            clusters = min(clusters * tiling.programs * tiling.stages // 6, blocks // tiling.cluster)
            at_once = clusters // self.geometry.kv_heads * tiling.cluster
            return max(at_once, int(tiling.cluster == 1))
        return max(1, blocks // self.geometry.kv_heads)

    def _sizes(self, rows: int, batch: int, block_m: int, tiling: Tiling) -> tuple[int, int, int]:
        """Slots for split items, and upper bounds of tiles and items for any division of `rows` among requests."""
        slots = self._slots(block_m, tiling)
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
        block_m, tiling = self._tiling(rows, batch)
        slots, max_tiles, max_items = self._sizes(rows, batch, block_m, tiling)
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
        self, step: Step, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, out: Tensor | None = None,
        early: bool = False,
    ) -> Tensor:
        """[R, Hq, D] of one layer, contiguous. q [R, Hq, D] dense within a row; caches [P, page, Hkv, D] of equal
        strides. Rows beyond node_indptr[B] are not written.

        early: the kernel launched just before this one on the stream may still run when the first keys are read: the
        caller says that it writes neither a committed key, nor the schedule, nor the page table, and that it started
        after those were complete (true of the kernel that writes the step's own keys). The CUDA kernels then begin
        to read while it ends; Triton's ignore it."""
        geometry = self.geometry
        check_tensors(geometry, step.rows, q, k_cache, v_cache)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.rows == 0:
            return out
        tiling = step.tiling
        if tiling.kernels != "triton":
            self._run_cuda(step, q, k_cache, v_cache, scale, out, early)
            return out
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

    def _run_cuda(
        self, step: Step, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, early: bool
    ) -> None:
        geometry = self.geometry
        strides = k_cache.stride()[:3]
        aligned = not any(stride % 8 for stride in strides) and k_cache.data_ptr() % 16 == v_cache.data_ptr() % 16 == 0
        aligned = aligned and (geometry.kv_heads == 1 or strides[2] == geometry.head_dim or not self.hopper)
        if not aligned or q.stride(0) % 2 or q.data_ptr() % 4 or scale <= 0:
            raise ValueError(
                f"k_cache, v_cache, q, scale: expected rows at 16-byte borders (on Hopper a key's heads side by side), "
                f"q's at 4-byte borders and scale > 0, got strides {k_cache.stride()}, {q.stride()} and scale {scale}; "
                "make TreeAttention with cuda=False"
            )
        tensors = (
            q, k_cache, v_cache, step.page_table, step.ancestors, self._items, self._tiles, out, self._parts,
            self._stats, self._arrivals,
        )
        sizes = (
            q.stride(0), *strides, step.page_table.stride(0), geometry.page, geometry.group, geometry.kv_heads,
            step.nodes_per_tile, step.max_items, step.max_tiles, step.block_m, step.tiling.stages, int(early),
            int(step.tiling.kernels == "hopper"), k_cache.shape[0], step.tiling.cluster,
        )
        extension().cuda_tree_attention(
            [tensor.data_ptr() for tensor in tensors], sizes, scale * LOG2_E, CUDA_DTYPES[geometry.dtype],
            stream=current_stream(self.device),
        )


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor,
    ancestors: Tensor, causal: Tensor, positions: Tensor, *, scale: float, window: int = 0, out: Tensor | None = None,
    cuda: bool | None = None,
) -> Tensor:
    """One layer without a kept plan: the "triton" backend of `tlt_kernels.attention.tree_attention`, which checks.
    cuda: as TreeAttention's; by default never for scale <= 0."""
    _, page, kv_heads, head_dim = k_cache.shape
    attention = TreeAttention(
        Geometry(q.shape[1], kv_heads, head_dim, page, q.dtype, window), max_rows=q.shape[0],
        max_batch=len(prefix_lens), device=q.device, multiprocessors=None if q.is_cuda else INTERPRETED,
        cuda=False if scale <= 0 else cuda,
    )
    step = attention.plan(page_table, prefix_lens, node_indptr, ancestors, causal, positions)
    return attention.run(step, q, k_cache, v_cache, scale=scale, out=out)
