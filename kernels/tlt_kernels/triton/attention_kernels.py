"""Triton kernels of tree attention: schedule a step, attend one work item, merge the parts of split tiles.

Know addresses and strides, no tensors' meaning beyond this file, no checks. Shape legend: R packed rows, B requests,
T tiles, W work items, M rows of a tile, N keys of a block, D head dim. A *tile* is a run of nodes of one request times
the query heads of one KV head, packed into M rows so that each key is read once for all of them; an *item* is a tile
and a run of key blocks. Scores are kept in base 2: exp2 is one instruction, and `scale` absorbs log2(e).

Split-KV with a log-sum-exp merge is FlashDecoding's (Dao et al. 2023); packing the group's heads into rows and
scheduling from lengths ahead of the layers is FlashInfer's (arXiv 2501.01005).
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments are what Triton makes of them, pointers or scalars; only tl.constexpr may be annotated.
from __future__ import annotations

import triton
import triton.language as tl

RECORD = 8  # int32 words of an item or a tile: one 32-byte sector; kernels write it as 8


@triton.jit(do_not_specialize=["batch", "slots", "max_items", "max_tiles", "nodes_per_tile"])
def schedule_kernel(
    prefix_lens, node_indptr, causal, items, tiles, batch, slots, max_items, max_tiles, nodes_per_tile,
    BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, BATCH: tl.constexpr,
):
    """Program b writes the records of request b: items [W, 8] (request, first node, first block, end block, splits,
    the request's first row, its nodes * 2 + chunked, its committed keys) and tiles [T, 8] (first row, nodes, first
    item, item stride, splits, request, first node). The last one clears the unused tails. The upper half of an item's
    word of splits holds its own place among them.

    Every program finds the same chunk: the least number of blocks an item may hold such that all items together fit
    the slots. That is a bisection over registers, ~2 us once a step, where a host plan would need the lengths there.
    """
    b = tl.program_id(0)
    lane = tl.arange(0, BATCH)
    here = lane < batch
    begin = tl.load(node_indptr + lane, mask=here, other=0)
    nodes = tl.load(node_indptr + lane + 1, mask=here, other=0) - begin
    prefix = tl.load(prefix_lens + lane, mask=here, other=0)
    per_request = (nodes + nodes_per_tile - 1) // nodes_per_tile
    first = lane * 0
    if WINDOW > 0:
        first = tl.maximum(prefix - WINDOW + 1, 0) // BLOCK_N
    blocks = tl.where(nodes > 0, (prefix + nodes + BLOCK_N - 1) // BLOCK_N - first, 0)

    target = tl.maximum(slots, tl.sum(per_request, 0))
    low = tl.maximum((tl.sum(per_request * blocks, 0) + slots - 1) // slots, MIN_BLOCKS)
    high = tl.maximum(tl.max(blocks, 0), low)
    for _ in range(14):  # 2**14 blocks of 16 keys: 262144 keys
        middle = (low + high) // 2
        fits = tl.sum(per_request * ((blocks + middle - 1) // middle), 0) <= target
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    splits_of = (blocks + high - 1) // high

    mine = lane == b
    first_item = tl.sum(tl.where(lane < b, per_request * splits_of, 0), 0)
    first_tile = tl.sum(tl.where(lane < b, per_request, 0), 0)
    n_tiles = tl.sum(tl.where(mine, per_request, 0), 0)
    splits = tl.sum(tl.where(mine, splits_of, 0), 0)
    n_nodes = tl.sum(tl.where(mine, nodes, 0), 0)
    keys = tl.sum(tl.where(mine, prefix, 0), 0)
    row = tl.sum(tl.where(mine, begin, 0), 0)
    chunked = tl.load(causal + b) != 0

    step = tl.arange(0, 128)
    for start in range(0, n_tiles * splits, 128):
        i = start + step
        tile = i % n_tiles  # tiles of one request side by side: the second read of a block hits L2
        split = i // n_tiles
        node = tile * nodes_per_tile
        low_key = keys + tl.where(chunked, node, 0) - WINDOW + 1
        end_key = keys + tl.where(chunked, tl.minimum(node + nodes_per_tile, n_nodes), n_nodes)
        first_block = i * 0
        if WINDOW > 0:
            first_block = tl.maximum(low_key, 0) // BLOCK_N
        n_blocks = (end_key + BLOCK_N - 1) // BLOCK_N - first_block
        record = items + (first_item + i) * 8
        ok = (i < n_tiles * splits) & (first_item + i < max_items)
        tl.store(record, b + i * 0, mask=ok)
        tl.store(record + 1, node, mask=ok)
        tl.store(record + 2, first_block + n_blocks * split // splits, mask=ok)
        tl.store(record + 3, first_block + n_blocks * (split + 1) // splits, mask=ok)
        tl.store(record + 4, splits + split * 65536, mask=ok)
        tl.store(record + 5, row + i * 0, mask=ok)
        tl.store(record + 6, n_nodes * 2 + tl.where(chunked, 1, 0) + i * 0, mask=ok)
        tl.store(record + 7, keys + i * 0, mask=ok)
    for start in range(0, n_tiles, 128):
        i = start + step
        record = tiles + (first_tile + i) * 8
        ok = (i < n_tiles) & (first_tile + i < max_tiles)
        node = i * nodes_per_tile
        tl.store(record, row + node, mask=ok)
        tl.store(record + 1, tl.minimum(n_nodes - node, nodes_per_tile), mask=ok)
        tl.store(record + 2, first_item + i, mask=ok)
        tl.store(record + 3, n_tiles + i * 0, mask=ok)
        tl.store(record + 4, splits + i * 0, mask=ok)
        tl.store(record + 5, b + i * 0, mask=ok)
        tl.store(record + 6, node, mask=ok)

    if b == batch - 1:
        for start in range(first_item + n_tiles * splits, max_items, 128):
            i = start + step
            tl.store(items + i * 8 + 4, i * 0, mask=i < max_items)
        for start in range(first_tile + n_tiles, max_tiles, 128):
            i = start + step
            tl.store(tiles + i * 8 + 4, i * 0, mask=i < max_tiles)


@triton.jit
def fold(acc, top, total, q, k, v, visible, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One block of the online softmax: acc fp32 [M, D], top and total fp32 [M], visible bool [M, N]."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if MASKED:  # a row may have seen no key yet: -inf - -inf would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=["table_stride", "group", "nodes_per_tile"])
def attend_kernel(
    q, k_cache, v_cache, page_table, prefix_lens, node_indptr, ancestors, causal, positions, items, out, part, stats,
    scale_log2, q_row, q_head, page_stride, slot_stride, head_stride, table_stride, group, nodes_per_tile,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):
    """Grid (W, Hkv). An unsplit tile's rows go to out [R, Hq, D]; others to part fp32 [W, Hkv, M, D] (not normalized)
    and stats fp32 [W, Hkv, 2, M] (running maximum and sum), for `merge_kernel`."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.load(items + item * 8 + 4) & 65535
    if splits == 0:
        return
    b = tl.load(items + item * 8)
    first_node = tl.load(items + item * 8 + 1)
    block = tl.load(items + item * 8 + 2)
    end_block = tl.load(items + item * 8 + 3)
    first_row = tl.load(node_indptr + b)
    n_nodes = tl.load(node_indptr + b + 1) - first_row
    prefix = tl.load(prefix_lens + b)
    chunked = tl.load(causal + b) != 0

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    local = m // group
    node = first_node + local
    live = (local < nodes_per_tile) & (node < n_nodes)
    row = first_row + tl.where(live, node, first_node)
    q_column = head * group + m % group
    q_at = q + row[:, None].to(tl.int64) * q_row + q_column[:, None] * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    table = page_table + b.to(tl.int64) * table_stride
    column = head * head_stride + d

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    limit = prefix + n_nodes
    open_block = block  # blocks below this one hold only committed keys that every row sees
    if WINDOW == 0:
        open_block = tl.maximum(tl.minimum(end_block, prefix // BLOCK_N), block)
    for i in tl.range(block, open_block, num_stages=STAGES):
        key = i * BLOCK_N + n
        page = tl.load(table + key // PAGE)
        at = (page.to(tl.int64) * page_stride + (key % PAGE) * slot_stride)[:, None] + column[None, :]
        if D == BLOCK_D:
            k = tl.load(k_cache + at)
            v = tl.load(v_cache + at)
        else:
            k = tl.load(k_cache + at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_cache + at, mask=(d < D)[None, :], other=0.0)
        acc, top, total = fold(acc, top, total, q_tile, k, v, True, scale_log2, False, PRECISION)

    low_word = tl.load(ancestors + row * 2)
    high_word = tl.load(ancestors + row * 2 + 1)
    last_seen = tl.where(chunked, prefix + node, prefix - 1)  # keys up to here are visible without a bit
    position = tl.load(positions + row)
    for i in tl.range(open_block, end_block, num_stages=STAGES):
        key = i * BLOCK_N + n
        inside = key < limit
        page = tl.load(table + key // PAGE, mask=inside, other=0)
        at = (page.to(tl.int64) * page_stride + (key % PAGE) * slot_stride)[:, None] + column[None, :]
        k = tl.load(k_cache + at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_cache + at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        bit = tl.maximum(key - prefix, 0)
        word = tl.where((bit < 64)[None, :], low_word[:, None], high_word[:, None])
        ancestor = ((word >> (bit & 63).to(tl.int64)[None, :]) & 1) != 0
        in_tree = ((key >= prefix) & inside)[None, :] & ancestor & (bit < 128)[None, :]
        visible = (key[None, :] <= last_seen[:, None]) | (in_tree & (not chunked))
        if WINDOW > 0:
            in_step = (key >= prefix) & inside
            key_position = tl.load(positions + first_row + tl.where(in_step, bit, 0), mask=in_step, other=0)
            key_position = tl.where(in_step, key_position, key.to(tl.int64))
            visible &= position[:, None] - key_position[None, :] < WINDOW
        acc, top, total = fold(acc, top, total, q_tile, k, v, visible, scale_log2, True, PRECISION)

    if splits == 1:
        done = acc / total[:, None]
        out_at = out + (row[:, None].to(tl.int64) * (HEADS * group) + q_column[:, None]) * D + d[None, :]
        tl.store(out_at, done.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    else:
        slot = item.to(tl.int64) * HEADS + head
        part_at = part + (slot * BLOCK_M + m)[:, None] * D + d[None, :]
        tl.store(part_at, acc, mask=live[:, None] & (d < D)[None, :])
        tl.store(stats + slot * (2 * BLOCK_M) + m, top, mask=live)
        tl.store(stats + slot * (2 * BLOCK_M) + BLOCK_M + m, total, mask=live)


@triton.jit(do_not_specialize=["group", "nodes_per_tile"])
def merge_kernel(
    tiles, part, stats, out, group, nodes_per_tile,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """Grid (T * nodes per tile, Hq): one row of one head, its parts taken BLOCK_S at a time in split order."""
    tile = tl.program_id(0) // nodes_per_tile
    local = tl.program_id(0) % nodes_per_tile
    splits = tl.load(tiles + tile * 8 + 4)
    if splits <= 1:
        return
    if local >= tl.load(tiles + tile * 8 + 1):
        return
    row = tl.load(tiles + tile * 8) + local
    first_item = tl.load(tiles + tile * 8 + 2)
    stride = tl.load(tiles + tile * 8 + 3)
    head = tl.program_id(1) // group
    m = local * group + tl.program_id(1) % group

    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        here = start + s < splits
        slot = (first_item + (start + s) * stride).to(tl.int64) * HEADS + head
        tops = tl.load(stats + slot * (2 * BLOCK_M) + m, mask=here, other=float("-inf"))
        totals = tl.load(stats + slot * (2 * BLOCK_M) + BLOCK_M + m, mask=here, other=0.0)
        at = part + (slot * BLOCK_M + m)[:, None] * D + d[None, :]
        parts = tl.load(at, mask=here[:, None] & (d < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        weight = tl.exp2(tops - shift)
        total = total * decay + tl.sum(weight * totals, 0)
        acc = acc * decay + tl.sum(weight[:, None] * parts, 0)
        top = new_top
    done = acc / total
    out_at = out + (row.to(tl.int64) * (HEADS * group) + tl.program_id(1)) * D + d
    tl.store(out_at, done.to(out.dtype.element_ty), mask=d < D)
