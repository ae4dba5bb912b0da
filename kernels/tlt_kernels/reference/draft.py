"""A drafter's proposals in torch: the specification. The draft's logits are laid out over the target's ids, where
masks, bias, penalties, filters and noise are the sampler's own.

Shape legend: R rows, C columns of the draft logits, V target ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt_kernels.params import GREEDY_BELOW, DraftTop, RowParams
from tlt_kernels.reference.sampling import NEG_INF, process_logits


def spread(logits_RC: Tensor, targets_C: Tensor, target_vocab: int) -> Tensor:
    """fp32 [R, V]: the draft's logits at their target ids, -inf elsewhere."""
    out = torch.full((len(logits_RC), target_vocab), NEG_INF, device=logits_RC.device)
    out[:, targets_C] = logits_RC.float()
    return out


def noisy_top_k(
    logits_RC: Tensor, noise_RV: Tensor | None, params: RowParams, k: int, targets_C: Tensor, target_vocab: int,
    vocab_limit: int,
) -> DraftTop:
    """As tlt_kernels.noisy_top_k, with the noise given; None = not looked at."""
    z_RV = process_logits(spread(logits_RC, targets_C, target_vocab), params, vocab_limit=vocab_limit)
    z_RV = torch.where(z_RV.isnan(), NEG_INF, z_RV)  # rows with NaN or +inf have nothing to offer
    g_RV = torch.zeros_like(z_RV) if noise_RV is None else noise_RV.clone()
    g_RV[params.temperature < GREEDY_BELOW] = 0.0
    ranked = torch.where(z_RV == NEG_INF, NEG_INF, z_RV + g_RV).sort(dim=1, descending=True, stable=True).indices
    best_RK = torch.nn.functional.pad(ranked[:, :k], (0, max(0, k - target_vocab)))
    there = (z_RV.gather(1, best_RK) > NEG_INF) & (torch.arange(k, device=z_RV.device) < target_vocab)
    logprobs = torch.log_softmax(z_RV.double(), 1).gather(1, best_RK).float().masked_fill(~there, -math.inf)
    column_V = torch.zeros(target_vocab, dtype=torch.int64, device=z_RV.device)
    column_V[targets_C] = torch.arange(len(targets_C), device=z_RV.device)
    return DraftTop(
        tokens=torch.where(there, best_RK, -1),
        draft_ids=torch.where(there, column_V[best_RK], -1),
        scores=torch.where(there, logprobs + g_RV.gather(1, best_RK), -math.inf),
        logprobs=logprobs,
    )
