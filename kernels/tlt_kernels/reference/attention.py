"""Attention of packed rows over a paged KV cache, as the definition reads: gather, mask, softmax. Slow on purpose.

Knows neither speed nor argument checks. Shape legend: R packed rows, B requests, P pages, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(ancestors: Tensor, causal: bool) -> Tensor:
    """bool [n, n]: may row i of one request see its node j? ancestors int64 [n, 2]."""
    n = len(ancestors)
    if causal:
        return torch.ones(n, n, dtype=torch.bool, device=ancestors.device).tril()
    nodes = torch.arange(n, device=ancestors.device)
    return (ancestors[:, nodes // 64] >> (nodes % 64)) & 1 == 1


def gather_keys(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """The first `count` logical slots of a request, fp32 [count, Hkv, D]."""
    page = cache.shape[1]
    slots = torch.arange(count, device=cache.device)
    return cache[pages[slots // page].long(), slots % page].float()


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor,
    ancestors: Tensor, causal: Tensor, positions: Tensor, *, scale: float, window: int = 0,
) -> Tensor:
    group = q.shape[1] // k_cache.shape[2]
    out = torch.empty_like(q)
    bounds = node_indptr.tolist()
    for b, prefix in enumerate(prefix_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        n = bounds[b + 1] - bounds[b]
        if n == 0:
            continue
        keys = gather_keys(k_cache, page_table[b], prefix + n).repeat_interleave(group, dim=1)
        values = gather_keys(v_cache, page_table[b], prefix + n).repeat_interleave(group, dim=1)
        mask = visible(ancestors[rows], bool(causal[b]))
        mask = torch.cat([mask.new_ones(n, prefix), mask], 1)
        if window > 0:
            key_positions = torch.cat([torch.arange(prefix, device=q.device), positions[rows]])
            mask &= key_positions[None, :] > positions[rows, None] - window
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
