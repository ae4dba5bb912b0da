"""The product of rows and a weight whose every row has the same bits, however many rows there are. Knows addresses and
strides, no checks.

One tile shape and one order of k for all row counts, no split of K: simple, exact to fp32 for fp32 inputs, and not made
for speed. The CUDA backend serves half types."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_R, BLOCK_N, BLOCK_K = 16, 32, 64


@triton.jit
def linear_kernel(
    x, weight, bias, base, out, rows, x_stride, base_stride, OUTER, INNER, HAS_BIAS: tl.constexpr,
    HAS_BASE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Grid (blocks of R, blocks of N)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, used = (r < rows)[:, None], (n < OUTER)[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < INNER
        a = tl.load(x + r[:, None] * x_stride + k[None, :], mask=live & inside[None, :], other=0.0)
        b = tl.load(weight + n[None, :] * INNER + k[:, None], mask=used & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < OUTER, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if HAS_BASE:
        residual = tl.load(base + r[:, None] * base_stride + n[None, :], mask=live & used, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + r[:, None] * OUTER + n[None, :], y, mask=live & used)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, out: Tensor) -> None:
    rows, outer = out.shape
    if rows == 0:
        return
    linear_kernel[(triton.cdiv(rows, BLOCK_R), triton.cdiv(outer, BLOCK_N))](
        x, weight, x if bias is None else bias, x if base is None else base, out, rows, x.stride(0),
        0 if base is None else base.stride(0), outer, x.shape[1], HAS_BIAS=bias is not None, HAS_BASE=base is not None,
        BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )
