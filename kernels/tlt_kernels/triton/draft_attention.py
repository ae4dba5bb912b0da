"""Attention of a learned drafter's newest rows over its own keys: the committed entries in the window, and the nodes
of the tree so far. Knows addresses, no checks; `tree_attention` over the same keys is the specification.

One launch, where that takes three and a row for each earlier node: a lane's slots are a circle, so key p of a request,
entry or node, lies in slot lane * C + (p - origin) % C, and no table or schedule is needed. Split-KV: the last of the
programs of a tile merges their parts.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.attention_kernels import fold
from tlt_kernels.triton.draft_rows import Places
from tlt_kernels.triton.launch import dependent

LOG2_E = math.log2(math.e)
MAX_SPLITS = 16
PROCESSORS = 132  # to split for: an H200's. Others only split otherwise


@triton.jit(do_not_specialize=["nodes", "n_nodes", "depth"])
def attend_drafts_kernel(
    q, k_cache, v_cache, last, committed, lane, origin, bits, depths, out, parts, stats, arrivals, scale_log2, window,
    slots_each, nobody, slot_stride, head_stride, nodes, n_nodes, depth, M: tl.constexpr, TREE: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * TILES * SPLITS, Hkv). nodes: of the tree, those of this level included; n_nodes: N. Not TREE: the rows
    are `last`, the last entries of the requests."""
    minus = -float("inf")
    team = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    head = tl.program_id(1)
    b = (team // TILES).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    node = (team % TILES) * (BLOCK_M // GROUP) + m // GROUP
    live = (m // GROUP < BLOCK_M // GROUP) & (node < M)
    node = tl.where(live, node, 0)
    here = live[:, None] & (d < D)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = b * M + node
    from_row = row
    if not TREE:
        from_row = tl.load(last + b) + node.to(tl.int64)
    column = head * GROUP + m % GROUP
    q_tile = tl.load(q + (from_row * (HEADS * GROUP) + column)[:, None] * D + d[None, :], mask=here, other=0.0)
    low = m.to(tl.int64) * 0
    high = low
    if TREE:
        word = bits + (b * n_nodes + nodes - M + node) * 2
        low, high = tl.load(word), tl.load(word + 1)

    stop = tl.load(committed + b)
    seat = tl.load(lane + b)
    start = tl.load(origin + b).to(tl.int32)
    first = tl.minimum(tl.maximum(start, stop + depth - window), stop)
    keys = tl.where(seat < nobody, stop - first + nodes, 0)
    blocks = (keys + BLOCK_N - 1) // BLOCK_N
    each = (blocks + SPLITS - 1) // SPLITS
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], minus, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in tl.range(split * each, tl.minimum(split * each + each, blocks), num_stages=3):
        key = i * BLOCK_N + n
        inside = key < keys
        p = first + key
        at = (seat * slots_each + (p - start) % slots_each) * slot_stride + head * head_stride
        at = at[:, None] + d[None, :]
        used = inside[:, None] & (d < D)[None, :]
        k = tl.load(k_cache + at, mask=used, other=0.0)
        v = tl.load(v_cache + at, mask=used, other=0.0)
        visible = (inside & (p < stop))[None, :] & live[:, None]
        if TREE:
            in_tree = inside & (p >= stop)
            i_node = tl.where(in_tree, p - stop, 0)
            near = in_tree & (depth - tl.load(depths + i_node) < window)
            words = tl.where((i_node < 64)[None, :], low[:, None], high[:, None])
            bit = (words >> (i_node & 63).to(tl.int64)[None, :]) & 1
            visible |= near[None, :] & (bit != 0) & live[:, None]
        acc, top, total = fold(acc, top, total, q_tile, k, v, visible, scale_log2, True, PRECISION)

    done = here
    if SPLITS > 1:
        block = ((team * HEADS + head) * SPLITS + split).to(tl.int64)
        spot = m[:, None] * BLOCK_D + d[None, :]
        tl.store(parts + block * (BLOCK_M * BLOCK_D) + spot, acc)
        tl.store(stats + block * (2 * BLOCK_M) + m, top)
        tl.store(stats + block * (2 * BLOCK_M) + BLOCK_M + m, total)
        tl.debug_barrier()  # all of a program's stores come before its arrival
        arrived = tl.atomic_add(arrivals + team * HEADS + head, 1)
        ends = arrived == SPLITS - 1
        done = here & ends
        if ends:
            tl.store(arrivals + team * HEADS + head, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            top = tl.full([BLOCK_M], minus, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for s in range(SPLITS):
                other = ((team * HEADS + head) * SPLITS + s).to(tl.int64)
                its_top = tl.load(stats + other * (2 * BLOCK_M) + m, cache_modifier=".cg")
                its_total = tl.load(stats + other * (2 * BLOCK_M) + BLOCK_M + m, cache_modifier=".cg")
                part = tl.load(parts + other * (BLOCK_M * BLOCK_D) + spot, cache_modifier=".cg")
                new_top = tl.maximum(top, its_top)
                shift = tl.where(new_top == minus, 0.0, new_top)
                acc = acc * tl.exp2(top - shift)[:, None] + part * tl.exp2(its_top - shift)[:, None]
                total = total * tl.exp2(top - shift) + its_total * tl.exp2(its_top - shift)
                top = new_top
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # padding sees nothing
    out_at = out + (row * (HEADS * GROUP) + column)[:, None] * D + d[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=done)


def tile_rows(nodes: int, group: int, dtype: torch.dtype) -> int:
    """Rows of a tile: fp32 operands live in registers, and 32 rows fit."""
    largest = 32 if dtype == torch.float32 else 64
    return max(16, triton.next_power_of_2(group), min(triton.next_power_of_2(nodes * group), largest))


def teams(nodes: int, group: int, dtype: torch.dtype) -> int:
    """Tiles of a request and KV head."""
    return triton.cdiv(nodes, tile_rows(nodes, group, dtype) // group)


def attend_drafts(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, committed: Tensor, lane: Tensor, origin: Tensor, arrivals: Tensor,
    places: Places, *, scale: float, window: int, last: Tensor | None = None, bits: Tensor | None = None,
    depths: Tensor | None = None, nodes: int = 0, depth: int = 0,
) -> Tensor:
    """[B * M, Hq, D], contiguous. q [R, Hq, D]; caches [P, page, Hkv, D], pages side by side; committed int32, lane and
    origin int64 [B]. arrivals int32, at least B * teams * Hkv zeros, left as they were. window > 0.

    last int64 [B]: M = 1, the rows of q that are the requests' last entries, which see entries alone. Otherwise q are
    the newest M nodes, at `depth`, of trees of `nodes` so far: bits int64 [>= B, N, 2] their ancestors, depths int32
    [N]."""
    batch, (rows, heads, dim) = len(committed), q.shape
    kv_heads, device = k_cache.shape[2], q.device
    each, group = (1 if last is not None else rows // batch), heads // kv_heads
    block_m, tiles, block_n = tile_rows(each, group, q.dtype), teams(each, group, q.dtype), 64
    if q.dtype == torch.float32 and dim > 64:
        block_n = 16
    blocks = triton.cdiv(min(places.window, window) + nodes, block_n)
    busy = batch * tiles * kv_heads
    splits = max(1, min(MAX_SPLITS, PROCESSORS // busy, triton.cdiv(blocks, 2)))
    block_d = max(16, triton.next_power_of_2(dim))
    out = torch.empty(batch * each, heads, dim, dtype=q.dtype, device=device)
    parts = torch.empty(busy * splits * block_m * block_d if splits > 1 else 1, device=device)
    stats = torch.empty(busy * splits * block_m * 2 if splits > 1 else 1, device=device)
    attend_drafts_kernel[(batch * tiles * splits, kv_heads)](
        q, k_cache, v_cache, committed if last is None else last, committed, lane, origin,
        lane if bits is None else bits, committed if depths is None else depths, out, parts, stats, arrivals,
        scale * LOG2_E, window, places.slots_each, places.nobody, *k_cache.stride()[1:3], nodes,
        0 if bits is None else bits.shape[1], depth, M=each, TREE=last is None, TILES=tiles, SPLITS=splits,
        GROUP=group, HEADS=kv_heads, D=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, **dependent(device),
    )
    return out
