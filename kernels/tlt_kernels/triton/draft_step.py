"""From a draft's candidates to the inputs of the verification, around tlt_kernels.cuda.tree_from_candidates: `keep`
before it, `pack` behind it. Knows addresses, no checks.

Shape legend: B requests of a bucket, C candidates of each, R rows of the verification.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.launch import dependent

MAX_TREE = 128


@triton.jit(do_not_specialize=["verify"])
def keep_kernel(
    scores, live, cand_indptr, budgets, expected, verify, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (B,)."""
    b = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    score = tl.load(scores + b * C + at, mask=at < C, other=-float("inf"))
    tl.store(budgets + b, tl.minimum(tl.sum((score > -float("inf")).to(tl.int32), 0), verify))
    present = tl.load(live)
    if b == 0:
        tl.store(cand_indptr, 0)
    tl.store(cand_indptr + b + 1, tl.minimum(b + 1, present) * C)

    # The least of the verify - 1 best drafts, its bits from the highest down, as integers that order as the scores.
    bits = score.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    order = tl.where((at > 0) & (at < C), order, -1)
    wanted = tl.minimum(verify - 1, C - 1)
    least = wanted.to(tl.int64) * 0
    for i in range(32):
        tried = least | (least * 0 + 1 << (31 - i))
        enough = tl.sum((order >= tried).to(tl.int32), 0) >= wanted
        least = tl.where(enough, tried, least)
    chance = tl.exp(score)
    above = order > least
    ties = wanted - tl.sum(above.to(tl.int32), 0)
    tie = tl.max(tl.where(order == least, chance, 0.0), 0)
    tl.store(expected + b, tl.sum(tl.where(above, chance, 0.0), 0) + ties.to(tl.float32) * tie)


@triton.jit
def pack_kernel(
    node_indptr, depths, prefix_lens, page_table, keys, samples, segments, temperature, positions, draws, slots,
    row_keys, row_samples, row_segments, row_temperature, deepest, sizes, batch, rows, pages, page, pad_slot,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (B + 1,): the rows of a request; the last one's are those behind all trees."""
    b = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.load(node_indptr + b)
    tl.store(sizes + b, begin)
    if b < batch:
        r = tl.arange(0, BLOCK)
        row = begin + r
        inside = row < tl.load(node_indptr + b + 1)
        depth = tl.load(depths + row, mask=inside, other=0)
        prefix = tl.load(prefix_lens + b)
        position = (prefix + depth).to(tl.int64)
        slot = prefix + r
        known = inside & (slot // page < pages)
        its_page = tl.load(page_table + b.to(tl.int64) * pages + slot // page, mask=known, other=0).to(tl.int64)
        tl.store(positions + row, position, mask=inside)
        tl.store(draws + row, position + 1, mask=inside)
        tl.store(slots + row, tl.where(known, its_page * page + slot % page, pad_slot), mask=inside)
        tl.store(row_keys + row, tl.load(keys + b), mask=inside)
        tl.store(row_samples + row, tl.load(samples + b), mask=inside)
        tl.store(row_segments + row, tl.load(segments + b), mask=inside)
        tl.store(row_temperature + row, tl.load(temperature + b), mask=inside)
        tl.store(deepest + b, tl.max(tl.where(inside, depth, 0), 0))
    else:
        behind = begin + tl.arange(0, BLOCK_R)
        empty = behind < rows
        zero = behind.to(tl.int64) * 0
        tl.store(positions + behind, zero, mask=empty)
        tl.store(draws + behind, zero + 1, mask=empty)
        tl.store(slots + behind, zero + pad_slot, mask=empty)
        tl.store(row_keys + behind, tl.load(keys + b - 1), mask=empty)  # nobody walks over these rows
        tl.store(row_samples + behind, tl.load(samples + b - 1), mask=empty)
        tl.store(row_segments + behind, tl.load(segments + b - 1), mask=empty)
        tl.store(row_temperature + behind, tl.load(temperature + b - 1), mask=empty)


def keep(
    scores: Tensor, live: Tensor, cand_indptr: Tensor, budgets: Tensor, expected: Tensor, *, candidates: int,
    verify: int,
) -> None:
    """scores fp32 [B * C], -inf for dead candidates. live int32 [1]: requests that are not padding. Writes cand_indptr
    int32 [B + 1]; budgets int32 [B]: nodes to keep, root included; expected fp32 [B]: the sum of the drafts' chances.
    """
    batch, block = len(budgets), triton.next_power_of_2(candidates)
    keep_kernel[(batch,)](
        scores, live, cand_indptr, budgets, expected, verify, C=candidates, BLOCK=block,
        num_warps=max(1, min(8, block // 256)), **dependent(scores.device),
    )


@dataclass(frozen=True)
class Packed:
    """Inputs of a verification and of its draw: positions, draws, slots, keys, samples, segments int64 [R], temperature
    fp32 [R]; of its trees deepest int32 [B] and node_indptr once more, int32 [B + 1]."""

    positions: Tensor
    draws: Tensor
    slots: Tensor
    keys: Tensor
    samples: Tensor
    segments: Tensor
    temperature: Tensor
    deepest: Tensor
    indptr: Tensor


def pack(
    node_indptr: Tensor, depths: Tensor, prefix_lens: Tensor, page_table: Tensor,
    noise: tuple[Tensor, Tensor, Tensor, Tensor], out: Packed, *, page: int, pad_slot: int,
) -> None:
    """As tlt_kernels.cuda.step_inputs, and the noise of each row's request: keys, samples, segments int64 and
    temperature fp32 [B]. Trees have at most 128 nodes."""
    batch, rows = len(prefix_lens), len(out.positions)
    pack_kernel[(batch + 1,)](
        node_indptr, depths, prefix_lens, page_table, *noise, out.positions, out.draws, out.slots, out.keys,
        out.samples, out.segments, out.temperature, out.deepest, out.indptr, batch, rows, page_table.shape[1], page,
        pad_slot, BLOCK=MAX_TREE, BLOCK_R=triton.next_power_of_2(rows), num_warps=4, **dependent(depths.device),
    )
