"""Inputs of the element-wise ops and the distances that their backends may have from the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# One rounding of the dtype (unit roundoff) may fall the other way after sums, roots or exponentials that differ in
# fp32's last bits; the product after it can then be one step off, relative to its size.
STEP = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def within_a_step(got: Tensor, wanted: Tensor) -> bool:
    """Every element within a step of its dtype, and in half types all but 2 % (of few elements, all but one) the same
    bits."""
    step = STEP[wanted.dtype]
    close = bool(((got.double() - wanted.double()).abs() <= step * wanted.double().abs() + step * 1e-3).all())
    differ = int((got != wanted).sum())
    return close and (wanted.dtype == torch.float32 or differ <= max(1, 0.02 * wanted.numel()))


@dataclass(frozen=True)
class RopeCase:
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    kv: Tensor  # [2, P, page, Hkv, D]
    q_norm: Tensor | None
    k_norm: Tensor | None

    def args(self) -> tuple[Tensor, ...]:
        return self.qkv, self.cos, self.sin, self.positions, self.slots, self.kv[0], self.kv[1]

    def fresh(self) -> RopeCase:
        return replace(self, kv=self.kv.clone())


def rope_case(
    rows: int, heads: int, kv_heads: int, dim: int, rotary: int, page: int = 16, *, norm: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> RopeCase:
    g = torch.Generator().manual_seed(seed + rows * 7 + dim)
    length = 500
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    pages = rows // page + 3
    slots = torch.randperm(pages * page, generator=g)[:rows]

    def half(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    scales = [1 + 0.1 * half(dim) if norm else None for _ in range(2)]
    return RopeCase(
        half(rows, (heads + 2 * kv_heads) * dim), cos.to(device), sin.to(device),
        torch.randint(0, length, (rows,), generator=g).to(device), slots.to(device),
        half(2, pages, page, kv_heads, dim), scales[0], scales[1],
    )
