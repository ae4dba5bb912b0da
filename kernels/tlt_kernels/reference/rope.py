"""Rotation of queries and keys and the write to the cache, as their definitions read. Knows neither speed nor checks.

Shape legend: R packed rows, Hq / Hkv query and key-value heads, D head dimension, T positions of the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.reference.kv import write_kv
from tlt_kernels.reference.norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, D]; cos, sin [R, rotary] of x's dtype, sin signed. Both products and their sum are rounded."""
    dim = cos.shape[-1]
    part = x[..., :dim]
    rotated = part * cos[:, None] + part.roll(dim // 2, -1) * sin[:, None]
    return torch.cat((rotated, x[..., dim:]), -1)


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, None)[0], rms_norm(k, k_norm, eps, None)[0]
    c, s = cos[positions].to(qkv.dtype), sin[positions].to(qkv.dtype)
    write_kv(rotate(k, c, s), v, k_cache, v_cache, slots)
    return rotate(q, c, s)
