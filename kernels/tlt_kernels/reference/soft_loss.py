"""Soft cross-entropy and its gradient as their definitions read. Knows neither speed nor argument checks."""

from __future__ import annotations

import torch
from torch import Tensor


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V] -> logsumexp and entropy (nats) fp32 [R]; the best id int64 [R], the lowest of equal ones."""
    wide = logits.float()
    log_p = wide.log_softmax(-1)
    return wide.logsumexp(-1), -(log_p.exp() * log_p).sum(-1), wide.argmax(-1)


def soft_cross_entropy(
    q_logits: Tensor, p_logits: Tensor, p_norm: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """With p = exp(p_logits - p_norm) and q = softmax(q_logits), all [R, V]: cross-entropy -sum p log q and overlap
    sum min(p, q), fp32 [R], and q's best id int64 [R]. q_logits becomes weight * (q - p). Rows of weight 0 give 0."""
    log_q = q_logits.float().log_softmax(-1)
    p, q = (p_logits.float() - p_norm[:, None]).exp(), log_q.exp()
    live = (weight != 0).float()
    guess = q_logits.argmax(-1) * live.long()
    cross_entropy, overlap = -(p * log_q).sum(-1) * live, torch.minimum(p, q).sum(-1) * live
    q_logits.copy_((q - p) * weight[:, None])
    return cross_entropy, overlap, guess
