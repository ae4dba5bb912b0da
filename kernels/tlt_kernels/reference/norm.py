"""RMSNorm as its definition reads, rounded where transformers rounds. Knows neither speed nor argument checks."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight * (h / sqrt(mean(h ** 2) + eps)), and h = x + residual. x [..., H], weight [H]."""
    h = x if residual is None else x + residual
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(h.dtype), h
