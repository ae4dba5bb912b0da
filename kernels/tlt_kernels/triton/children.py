"""The children of a draft level: their estimated chances, and which of them are expanded next. Knows addresses, no
checks, no drafter: what it computes is tlt_engine.speculation.candidates', and replaces its forty launches a level.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.params import GREEDY_BELOW, DraftTop
from tlt_kernels.triton.launch import dependent


@triton.jit
def children_kernel(
    tokens, logprobs, scores, above, parents, limits, stops, temperature, sharpness, roots, out_tokens, out_parents,
    out_scores, next_tokens, next_up, next_index, next_above, least, unseen, greedy_below, M: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, STOPS: tl.constexpr, C: tl.constexpr, FIRST: tl.constexpr, DEPTH: tl.constexpr,
    BLIND: tl.constexpr, MB: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (B,): a request's M expanded nodes and their K children each, in one warp."""
    minus = -float("inf")
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, MB)[:, None]
    k = tl.arange(0, KB)[None, :]
    inside = (m < M) & (k < K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = (b * M + m) * K + k
    token = tl.load(tokens + at, mask=inside, other=-1)
    chance = tl.load(logprobs + at, mask=inside, other=minus)
    if not BLIND:
        score = tl.load(scores + at, mask=inside, other=minus)
        sharp = tl.load(sharpness + b)
        unseen = tl.where(tl.load(temperature + b) < greedy_below, 0.0, unseen)
        seen = tl.sum(tl.exp(chance), axis=1)[:, None]
        rest = tl.log(tl.maximum(1.0 - seen, 1e-9)) + unseen
        rest = tl.minimum(rest, tl.max(tl.where(k == K - 1, score, minus), axis=1)[:, None]) * sharp
        score = score * sharp
        top = tl.maximum(tl.max(score, axis=1)[:, None], rest)
        mass = tl.sum(tl.exp(score - top), axis=1)[:, None] + tl.exp(rest - top)
        chance = score - top - tl.log(mass)
    value = tl.load(above + b * M + m, mask=m < M, other=minus) + chance
    dead = (token < 0) | (value < least) | (value != value) | (tl.load(limits + b) < DEPTH)
    value = tl.where(dead, minus, value)

    place = b * C + FIRST + m * K + k
    parent = tl.load(parents + b * M + m, mask=m < M, other=0).to(tl.int32)
    tl.store(out_tokens + place, token, mask=inside)
    tl.store(out_parents + place, parent + tl.zeros([MB, KB], tl.int32), mask=inside)
    tl.store(out_scores + place, value, mask=inside)
    if DEPTH == 1:
        tl.store(out_tokens + b * C, tl.load(roots + b))
        tl.store(out_parents + b * C, -1)
        tl.store(out_scores + b * C, 0.0)

    for s in tl.static_range(STOPS):
        value = tl.where(token == tl.load(stops + b * STOPS + s), minus, value)
    order = m * K + k
    open_ = inside
    for w in tl.static_range(W):
        best = tl.max(tl.max(tl.where(open_, value, minus), axis=1), axis=0)
        wins = open_ & (value == best)
        winner = tl.min(tl.min(tl.where(wins, order, MB * K + KB), axis=1), axis=0)
        picked = inside & (order == winner)
        chosen = tl.sum(tl.sum(tl.where(picked, token, 0), axis=1), axis=0)
        tl.store(next_tokens + b * W + w, tl.maximum(chosen, 0))
        tl.store(next_up + b * W + w, (winner // K).to(tl.int64))
        tl.store(next_index + b * W + w, (FIRST + winner).to(tl.int64))
        tl.store(next_above + b * W + w, best)
        open_ = open_ & (order != winner)


def rank_children(
    top: DraftTop, above: Tensor, parents: Tensor, limits: Tensor, stops: Tensor, temperature: Tensor,
    sharpness: Tensor | None, roots: Tensor, out: tuple[Tensor, Tensor, Tensor], *, depth: int, first: int,
    candidates: int, width: int, least: float, unseen: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """top [B * M, K] of nodes [B, M] with scores `above` and candidate indices `parents` int64; limits int64 [B]; stops
    int64 [B, S]; temperature, sharpness fp32 [B] (None: ranked by q alone); roots int64 [B]. out: tokens int64, parents
    int32, scores fp32, [B * candidates] at least: places first .. first + M * K of each request are written, and at
    depth 1 place 0. width: W, at most M * K. All contiguous.

    The nodes to expand next, best first, all [B, W]: which of the M nodes is the parent, int64; candidate indices,
    int64; tokens, int64, 0 where there is none; scores, fp32, -inf where there is none."""
    batch, nodes = above.shape
    k, device = top.tokens.shape[1], above.device
    up, indices, tokens = (torch.empty(batch, width, dtype=torch.int64, device=device) for _ in range(3))
    scores = torch.empty(batch, width, device=device)
    children_kernel[(batch,)](
        top.tokens, top.logprobs, top.scores, above, parents, limits, stops, temperature,
        temperature if sharpness is None else sharpness, roots, *out, tokens, up, indices,
        scores, least, unseen, GREEDY_BELOW, M=nodes, K=k, W=width, STOPS=stops.shape[1], C=candidates,
        FIRST=first, DEPTH=depth, BLIND=sharpness is None, MB=triton.next_power_of_2(nodes),
        KB=triton.next_power_of_2(k), num_warps=1, **dependent(device),
    )
    return up, indices, tokens, scores
