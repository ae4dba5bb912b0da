"""Attention of the unrolled drafter over packed rows. Knows neither weights nor losses.

Shape legend: R packed rows, Hq / Hkv query and key-value heads, G = Hq / Hkv, D head dimension, S unroll step, N
blocks of Q rows, K keys of a block's band.

Row r at step S is the chain of S drafts behind entry r: it stands at position r + S of its sequence and sees what
serving would see there, the committed entries (step 0) up to r that lie within the window, and its own chain's entries
of steps 1 .. S. That is EAGLE-3's training-time test (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 128  # rows that share a band of keys; the band is BLOCK + window wide


def unroll_attention(
    q: Tensor, committed: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], starts: Tensor, *,
    window: int, scale: float,
) -> Tensor:
    """[R, Hq, D]. q [R, Hq, D] of step len(own), rotated. committed: k and v [R, Hkv, D] of step 0; own: those of steps
    1 .. len(own). starts int64 [R]: first row of each row's sequence. window: entries that one sees, by position; a
    window no shorter than the longest sequence hides nothing.

    Scores are made again in the backward pass: at 4096 rows, 32 heads and a window of 512 a step's take 0.3 GB."""
    flat = [t for pair in (committed, *own[-window:]) for t in pair]
    return checkpoint(
        _attention, q, starts, len(own), window, scale, *flat, use_reentrant=False, preserve_rng_state=False
    )


def _attention(q: Tensor, starts: Tensor, step: int, window: int, scale: float, *flat: Tensor) -> Tensor:
    rows, heads, dim = q.shape
    own = len(flat) // 2 - 1
    kv_heads = flat[0].shape[1]
    size = min(BLOCK, rows)
    reach = min(window, rows) - 1  # rows before its own that a row may see
    blocks = -(-rows // size)
    tail = blocks * size - rows

    def band(x: Tensor) -> Tensor:  # [R, Hkv, D] -> [N, Hkv, D, K]
        return F.pad(x, (0, 0, 0, 0, reach, tail)).unfold(0, size + reach, size)

    grouped = F.pad(q, (0, 0, 0, 0, 0, tail)).view(blocks, size, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nqhgd,nhdk->nhgqk", grouped, band(flat[0]))
    hidden = ~visible(starts, size, reach, tail, step, window)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if own:
        keys = F.pad(torch.stack(flat[2::2], 2), (0, 0, 0, 0, 0, 0, 0, tail)).view(blocks, size, kv_heads, own, dim)
        scores = torch.cat((scores, torch.einsum("nqhgd,nqhsd->nhgqs", grouped, keys)), -1)
    weights = (scores.float() * scale).softmax(-1).to(q.dtype)
    out = torch.einsum("nhgqk,nhdk->nqhgd", weights[..., : size + reach], band(flat[1]))
    if own:
        values = F.pad(torch.stack(flat[3::2], 2), (0, 0, 0, 0, 0, 0, 0, tail)).view(blocks, size, kv_heads, own, dim)
        out = out + torch.einsum("nhgqs,nqhsd->nqhgd", weights[..., size + reach :], values)
    return out.reshape(-1, heads, dim)[:rows]


def visible(starts: Tensor, size: int, reach: int, tail: int, step: int, window: int) -> Tensor:
    """bool [N, Q, K]: may a row at `step` see the committed entry in that place of its block's band? Rows of the tail
    see themselves, so that no softmax is empty."""
    rows = torch.arange(len(starts) + tail, device=starts.device).view(-1, size, 1)
    blocks = torch.arange(len(rows), device=starts.device).view(-1, 1, 1)
    keys = blocks * size - reach + torch.arange(size + reach, device=starts.device)
    first = torch.cat((starts, rows.view(-1)[len(starts) :])).view(-1, size, 1)
    return (keys >= first) & (keys <= rows) & (keys > rows + step - window)
