"""silu(gate) * up. Knows addresses, no checks."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.launch import dependent

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (R, blocks of a row)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gate = tl.load(gate_up + row * (2 * COLUMNS) + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * COLUMNS) + COLUMNS + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * COLUMNS + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    rows, features = out.shape
    if rows == 0:
        return
    silu_mul_kernel[(rows, triton.cdiv(features, BLOCK))](
        gate_up, out, COLUMNS=features, BLOCK=BLOCK, num_warps=4, **dependent(out.device)
    )
