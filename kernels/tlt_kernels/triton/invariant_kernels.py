"""Triton kernels of batch-invariant attention: a row's bits depend on its own q, keys and values, in path order, alone.

Knows addresses and strides, no checks. A row at absolute position t sees t + 1 keys, its *path*: the committed keys,
then its ancestors and itself. The path is cut at positions that depend on t alone:

    border = 64 * floor((t - 128) / 64), 0 for t < 128
    prefix   keys before the border, in splits of 512, each split an online softmax over blocks of BLOCK_N
    recent   the other 1 to 192 keys, one more such split, its keys gathered in path order
    result   splits of the prefix folded in order from nothing, then the recent keys

A tree has at most 128 nodes, so a tree node is never a prefix key, and a row's prefix keys are those of its whole tile
of rows: they are read once for all of it. Recent keys are gathered for each row, so that a key stands in the same
place of the same product whether it is a tree slot, a chunk's row or a committed key. What a row must not see is kept
from it by a select, not by a factor of 0. Tiles have one height whatever the step holds (M of prefix rows, 16 of
recent rows), so every step runs the same instructions. Folds spell out their multiply-adds: the two kernels must round
alike. Recent keys one by one in fp32 would fix the order of sums too, but put up to 320 dependent steps into every
layer; 16-bit softmax weights are as exact here as in the other kernels.

Shape legend: R packed rows, T tiles, M rows of a tile, N keys of a block, D head dim, G query heads of a KV head.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

SPLIT = 512  # keys: at 32k one request gives 64 splits x 4 heads for 132 multiprocessors
RECENT = 192  # recent keys of a row at most


@triton.jit
def _border(t):
    return tl.where(t >= 128, (t - 128) // 64 * 64, 0)


@triton.jit
def _fold_split(top, total, acc, other_top, other_total, other_acc):
    """Running state and the next part in order; a part that saw nothing changes no bit."""
    new_top = tl.maximum(top, other_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - shift)
    weight = tl.exp2(other_top - shift)
    total = tl.fma(total, decay, other_total * weight)
    wide_decay = tl.broadcast_to(decay[:, None], acc.shape)
    acc = tl.fma(acc, wide_decay, other_acc * weight[:, None])
    return new_top, total, acc


@triton.jit
def _fold_block(top, total, acc, q, k, v, visible, scale_log2, PRECISION: tl.constexpr):
    """One block of keys; rows for which nothing is visible keep their state as it is."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    here = tl.max(scores, 1)
    new_top = tl.maximum(top, here)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    sees = here > float("-inf")
    new_total = tl.fma(total, decay, tl.sum(weights, 1))
    new_acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_top, tl.where(sees, new_total, total), tl.where(sees[:, None], new_acc, acc)


@triton.jit
def _load_keys(k_cache, v_cache, page, place, inside, column, inner, page_stride, slot_stride):
    at = (page.to(tl.int64) * page_stride + place * slot_stride)[:, None] + column[None, :]
    mask = inside[:, None] & inner[None, :]
    return tl.load(k_cache + at, mask=mask, other=0.0), tl.load(v_cache + at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "nodes_per_tile"])
def recent_slots_kernel(
    page_table, prefix_lens, ancestors, causal, positions, tiles, recent, table_stride, nodes_per_tile,
    PAGE: tl.constexpr, RECENT: tl.constexpr,
):
    """Grid (T * nodes per tile): recent int32 [R, RECENT] is filled with the flat slots (page * PAGE + place) of each
    row's recent keys in path order. Once a step, so that no layer looks through ancestor bits and pages again."""
    tile = tl.program_id(0) // nodes_per_tile
    local = tl.program_id(0) % nodes_per_tile
    if tl.load(tiles + tile * 8 + 4) == 0:
        return
    if local >= tl.load(tiles + tile * 8 + 1):
        return
    row = tl.load(tiles + tile * 8) + local
    b = tl.load(tiles + tile * 8 + 5)
    prefix = tl.load(prefix_lens + b)
    chunked = tl.load(causal + b) != 0
    t = tl.load(positions + row).to(tl.int32)
    border = _border(t)
    table = page_table + b.to(tl.int64) * table_stride
    target = recent + row.to(tl.int64) * RECENT

    committed = border + tl.arange(0, 256)  # and a chunk's own rows
    inside = (committed <= t) & ((committed < prefix) | chunked)
    page = tl.load(table + committed // PAGE, mask=inside, other=0)
    tl.store(target + committed - border, page * PAGE + committed % PAGE, mask=inside)

    node = tl.arange(0, 128)
    word = tl.load(ancestors + row * 2 + node // 64)
    on_path = ((word >> (node % 64).to(tl.int64)) & 1).to(tl.int32)
    key = prefix + tl.cumsum(on_path, 0) - 1  # of a path node, by its depth
    slot = prefix + node
    kept = (on_path != 0) & (key <= t) & (not chunked)
    page = tl.load(table + slot // PAGE, mask=kept, other=0)
    tl.store(target + key - border, page * PAGE + slot % PAGE, mask=kept)


# Strides of q and the cache are specialized: they are the same in every step of an engine, and without the knowledge
# that 16 divides them each load would be 2 bytes wide (a step of 64 requests: 157 us instead of what LOG.md says).
@triton.jit(do_not_specialize=["table_stride", "parts"])
def invariant_prefix_kernel(
    q, k_cache, v_cache, page_table, positions, tiles, part, stats, scale_log2, q_row, q_head, page_stride,
    slot_stride, head_stride, table_stride, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):
    """Grid (T, Y, Hkv): program y takes splits y, y + Y, ... of a tile. part fp32 [T, parts, Hkv, M, D] and stats
    [T, parts, Hkv, 2, M]: a split each, or, where parts is 1 (and Y with it), their fold."""
    tile = tl.program_id(0)
    head = tl.program_id(2)
    if tl.load(tiles + tile * 8 + 4) == 0:
        return
    b = tl.load(tiles + tile * 8 + 5)
    n_nodes = tl.load(tiles + tile * 8 + 1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    live = m // GROUP < n_nodes
    row = tl.load(tiles + tile * 8) + tl.where(live, m // GROUP, 0)
    t = tl.where(live, tl.load(positions + row).to(tl.int32), 0)
    border = _border(t)
    end = tl.max(border, 0)
    if end == 0:
        return
    q_at = q + row[:, None].to(tl.int64) * q_row + (head * GROUP + m % GROUP)[:, None] * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    table = page_table + b.to(tl.int64) * table_stride
    column = head * head_stride + d
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(live, t, 2147483647), 0) - WINDOW + 1, 0) // SPLIT

    run_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    run_total = tl.zeros([BLOCK_M], tl.float32)
    run_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(tl.program_id(1), (end + SPLIT - 1) // SPLIT, tl.num_programs(1)):
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        begin = split * SPLIT
        if split < first:
            begin = end
        for start in tl.range(begin, tl.minimum(end, split * SPLIT + SPLIT), BLOCK_N, num_stages=STAGES):
            key = start + n
            inside = key < end
            page = tl.load(table + key // PAGE, mask=inside, other=0)
            k, v = _load_keys(k_cache, v_cache, page, key % PAGE, inside, column, d < D, page_stride, slot_stride)
            visible = (key[None, :] < border[:, None])
            if WINDOW > 0:
                visible &= t[:, None] - key[None, :] < WINDOW
            top, total, acc = _fold_block(top, total, acc, q_tile, k, v, visible, scale_log2, PRECISION)
        if parts > 1:
            slot = (tile.to(tl.int64) * parts + split) * HEADS + head
            tl.store(part + (slot * BLOCK_M + m)[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
            tl.store(stats + slot * (2 * BLOCK_M) + m, top, mask=live)
            tl.store(stats + slot * (2 * BLOCK_M) + BLOCK_M + m, total, mask=live)
        else:
            run_top, run_total, run_acc = _fold_split(run_top, run_total, run_acc, top, total, acc)
    if parts == 1:
        slot = tile.to(tl.int64) * HEADS + head
        tl.store(part + (slot * BLOCK_M + m)[:, None] * D + d[None, :], run_acc, mask=live[:, None] & (d < D)[None, :])
        tl.store(stats + slot * (2 * BLOCK_M) + m, run_top, mask=live)
        tl.store(stats + slot * (2 * BLOCK_M) + BLOCK_M + m, run_total, mask=live)


@triton.jit(do_not_specialize=["parts", "nodes_per_tile"])
def invariant_recent_kernel(
    q, k_cache, v_cache, positions, tiles, recent, part, stats, out, scale_log2, q_row, q_head, page_stride,
    slot_stride, head_stride, parts, nodes_per_tile,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, RECENT: tl.constexpr, STAGES: tl.constexpr,
):
    """Grid (T * nodes per tile, Hkv): the query heads of one KV head at one row, to out [R, Hq, D]."""
    tile = tl.program_id(0) // nodes_per_tile
    local = tl.program_id(0) % nodes_per_tile
    head = tl.program_id(1)
    if tl.load(tiles + tile * 8 + 4) == 0:
        return
    if local >= tl.load(tiles + tile * 8 + 1):
        return
    row = tl.load(tiles + tile * 8) + local
    t = tl.load(positions + row).to(tl.int32)
    border = _border(t)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    mine = (g < GROUP)[:, None] & (d < D)[None, :]
    q_at = q + row.to(tl.int64) * q_row + (head * GROUP + g)[:, None] * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=mine, other=0.0)
    slots = recent + row.to(tl.int64) * RECENT
    column = head * head_stride + d

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(border, t + 1, BLOCK_N, num_stages=STAGES):
        key = start + n
        inside = key <= t
        slot = tl.load(slots + key - border, mask=inside, other=0)
        k, v = _load_keys(
            k_cache, v_cache, slot // PAGE, slot % PAGE, inside, column, d < D, page_stride, slot_stride
        )
        visible = inside
        if WINDOW > 0:
            visible = inside & (t - key < WINDOW)
        top, total, acc = _fold_block(top, total, acc, q_tile, k, v, visible[None, :], scale_log2, PRECISION)

    run_top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    run_total = tl.zeros([BLOCK_G], tl.float32)
    run_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    m = local * GROUP + g
    for split in range(0, tl.minimum((border + SPLIT - 1) // SPLIT, parts)):
        at = (tile.to(tl.int64) * parts + split) * HEADS + head
        tops = tl.load(stats + at * (2 * BLOCK_M) + m, mask=g < GROUP, other=float("-inf"))
        totals = tl.load(stats + at * (2 * BLOCK_M) + BLOCK_M + m, mask=g < GROUP, other=0.0)
        accs = tl.load(part + (at * BLOCK_M + m)[:, None] * D + d[None, :], mask=mine, other=0.0)
        run_top, run_total, run_acc = _fold_split(run_top, run_total, run_acc, tops, totals, accs)
    run_top, run_total, run_acc = _fold_split(run_top, run_total, run_acc, top, total, acc)
    done = run_acc / run_total[:, None]
    out_at = out + (row.to(tl.int64) * (HEADS * GROUP) + head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out_at, done.to(out.dtype.element_ty), mask=mine)
