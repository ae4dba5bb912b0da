"""Soft cross-entropy, its gradient and the rows' figures, one program a row. Knows addresses, no checks.

In torch a row of the vocabulary is read or written about 20 times in fp32 for one step of the loss; here the drafter's
logits are read twice (the second time from L2), the teacher's once, and the gradient is written over the drafter's.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _log_total(row, V, BLOCK: tl.constexpr):
    """(largest, sum of exp(x - largest), sum of x * exp(x - largest), first place of the largest) of V logits."""
    largest = -float("inf")
    total = 0.0
    moment = 0.0
    best = 0
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < V
        x = tl.load(row + column, mask=inside, other=-float("inf")).to(tl.float32)
        here = tl.max(x, 0)
        place = tl.min(tl.where(x == here, column, V), 0)
        best = tl.where(here > largest, place, best)
        above = tl.maximum(largest, here)
        share = tl.exp(x - above)
        shrink = tl.exp(largest - above)
        total = total * shrink + tl.sum(share, 0)
        moment = moment * shrink + tl.sum(tl.where(inside, x, 0.0) * share, 0)
        largest = above
    return largest, total, moment, best


@triton.jit
def row_stats_kernel(logits, norm, entropy, best, V, BLOCK: tl.constexpr):
    """Grid (R,)."""
    r = tl.program_id(0).to(tl.int64)
    largest, total, moment, place = _log_total(logits + r * V, V, BLOCK)
    log_total = largest + tl.log(total)
    tl.store(norm + r, log_total)
    tl.store(entropy + r, log_total - moment / total)
    tl.store(best + r, place)


@triton.jit
def soft_cross_entropy_kernel(
    q_logits, p_logits, p_norm, weight, cross_entropy, overlap, guess, V, BLOCK: tl.constexpr
):
    """Grid (R,)."""
    r = tl.program_id(0).to(tl.int64)
    q_row, p_row = q_logits + r * V, p_logits + r * V
    scale = tl.load(weight + r)
    crossed, shared, place = 0.0, 0.0, 0
    if scale != 0.0:
        largest, total, _, place = _log_total(q_row, V, BLOCK)
        log_total = largest + tl.log(total)
        norm = tl.load(p_norm + r)
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < V
            x = tl.load(q_row + column, mask=inside, other=0.0)
            log_q = x.to(tl.float32) - log_total
            q = tl.where(inside, tl.exp(log_q), 0.0)
            p = tl.exp(tl.load(p_row + column, mask=inside, other=-float("inf")).to(tl.float32) - norm)
            crossed -= tl.sum(p * log_q, 0)
            shared += tl.sum(tl.minimum(p, q), 0)
            tl.store(q_row + column, ((q - p) * scale).to(x.dtype), mask=inside)
    else:
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(q_row + column, tl.zeros([BLOCK], q_logits.dtype.element_ty), mask=column < V)
    tl.store(cross_entropy + r, crossed)
    tl.store(overlap + r, shared)
    tl.store(guess + r, place)


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    norm, entropy = (torch.empty(rows, device=logits.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        row_stats_kernel[(rows,)](logits, norm, entropy, best, vocab, BLOCK=BLOCK, num_warps=8)
    return norm, entropy, best


def soft_cross_entropy(
    q_logits: Tensor, p_logits: Tensor, p_norm: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = q_logits.shape
    cross_entropy, overlap = (torch.empty(rows, device=q_logits.device) for _ in range(2))
    guess = torch.empty(rows, dtype=torch.int64, device=q_logits.device)
    if rows:
        soft_cross_entropy_kernel[(rows,)](
            q_logits, p_logits, p_norm, weight, cross_entropy, overlap, guess, vocab, BLOCK=BLOCK, num_warps=8
        )
    return cross_entropy, overlap, guess
