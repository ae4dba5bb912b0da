"""RMSNorm with the residual sum, one program a row. Knows addresses, no checks."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.launch import dependent


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, residual_out, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). The whole row is in registers, so the order of its sum does not depend on R."""
    column = tl.arange(0, BLOCK)
    inside = column < H
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * H + column
    h = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        h = (h.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(residual_out + at, h, mask=inside)
    wide = h.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(h.dtype)
    tl.store(out + at, (scale.to(tl.float32) * normed.to(tl.float32)).to(h.dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, residual_out: Tensor | None
) -> None:
    rows, features = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(features)
    rms_norm_kernel[(rows,)](
        x, weight, x if residual is None else residual, out, out if residual_out is None else residual_out, eps,
        H=features, BLOCK=block, ADD=residual is not None, num_warps=max(1, min(16, block // 512)),
        **dependent(x.device),
    )
