"""Per-head norms, rotation and the write to the paged cache in one launch. Knows addresses and strides, no checks."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.launch import dependent


@triton.jit
def _normed(x, partner, scale, partner_scale, eps, D: tl.constexpr):
    """Both with the sum over x, of which partner is a permutation within the rotated part."""
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (scale.to(tl.float32) * (wide * inverse).to(x.dtype).to(tl.float32)).to(x.dtype)
    other = (partner_scale.to(tl.float32) * (partner.to(tl.float32) * inverse).to(x.dtype).to(tl.float32)).to(x.dtype)
    return normed, other


@triton.jit
def rope_write_kv_kernel(
    qkv, cos, sin, positions, slots, k_cache, v_cache, q_out, q_norm, k_norm, eps, page_stride, slot_stride,
    head_stride, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (R, Hq + 2 Hkv): one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    turns = d < ROTARY
    other = tl.where(turns, (d + ROTARY // 2) % ROTARY, d)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + (row * (HQ + 2 * HKV) + head) * D
    x = tl.load(at + d, mask=inside, other=0.0)
    if head < HQ + HKV:
        partner = tl.load(at + other, mask=inside, other=0.0)
        if NORM:
            if head < HQ:
                scales = q_norm
            else:
                scales = k_norm
            scale = tl.load(scales + d, mask=inside, other=0.0)
            x, partner = _normed(x, partner, scale, tl.load(scales + other, mask=inside, other=0.0), eps, D)
        angle = tl.load(positions + row) * ROTARY + d
        c = tl.load(cos + angle, mask=turns, other=1.0).to(x.dtype).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(x.dtype).to(tl.float32)
        direct = (x.to(tl.float32) * c).to(x.dtype).to(tl.float32)
        crossed = (partner.to(tl.float32) * s).to(x.dtype).to(tl.float32)
        x = tl.where(turns, (direct + crossed).to(x.dtype), x)
    if head < HQ:
        tl.store(q_out + (row * HQ + head) * D + d, x, mask=inside)
    else:
        slot = tl.load(slots + row)
        where = (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride
        if head < HQ + HKV:
            tl.store(k_cache + where + (head - HQ) * head_stride + d, x, mask=inside)
        else:
            tl.store(v_cache + where + (head - HQ - HKV) * head_stride + d, x, mask=inside)


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_out: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> None:
    rows, heads, dim = q_out.shape
    _, page, kv_heads, _ = k_cache.shape
    if rows == 0:
        return
    # enable_fp_fusion=False: a fused multiply-add of half types would skip the rounding of the first product.
    rope_write_kv_kernel[(rows, heads + 2 * kv_heads)](
        qkv, cos, sin, positions, slots, k_cache, v_cache, q_out, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, eps, *k_cache.stride()[:3], HQ=heads, HKV=kv_heads, D=dim,
        ROTARY=cos.shape[1], PAGE=page, BLOCK_D=max(16, triton.next_power_of_2(dim)), NORM=q_norm is not None,
        num_warps=1, enable_fp_fusion=False, **dependent(qkv.device),
    )
