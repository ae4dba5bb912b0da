"""Between the qkv product and attention: per-head norms, rotary positions, the write of K and V to the paged cache.

Knows neither models nor requests. Shape legend: R packed rows, Hq / Hkv query and key-value heads, D head dimension,
T positions of the tables, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check
from tlt_kernels.reference import rope as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_CPP_DIM = 1024  # a normed head lives on the C++ path's stack


def _check(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_out: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
) -> None:
    check("qkv", qkv, FLOATS, {"R": None, "(Hq + 2 Hkv) * D": None})
    rows, device = len(qkv), qkv.device
    check("k_cache", k_cache, qkv.dtype, {"P": None, "page": None, "Hkv": None, "D": None}, device, contiguous=False)
    check("v_cache", v_cache, qkv.dtype, k_cache.shape, device, contiguous=False)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(
            f"v_cache: expected the strides of k_cache, the last one 1, got {list(v_cache.stride())} and "
            f"{list(k_cache.stride())}; pass both as views of one kv tensor"
        )
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if heads < 1 or qkv.shape[1] % dim:
        raise ValueError(
            f"qkv: expected [R, (Hq + 2 Hkv) * D] with Hkv={kv_heads} and D={dim} of the cache, got "
            f"{list(qkv.shape)}; qkv and the cache come from different models"
        )
    check("cos", cos, FLOATS, {"T": None, "rotary": None}, device)
    check("sin", sin, cos.dtype, {"T": cos.shape[0], "rotary": cos.shape[1]}, device)
    if not 0 < cos.shape[1] <= dim or cos.shape[1] % 2:
        raise ValueError(f"cos: expected an even number of columns in (0, {dim}], got {cos.shape[1]}; see rope_tables")
    check("positions", positions, torch.int64, {"R": rows}, device)
    check("slots", slots, torch.int64, {"R": rows}, device)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm, k_norm: expected both or neither, got one; a model norms queries and keys alike")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check(name, norm, qkv.dtype, {"D": dim}, device)
    if q_out is not None:
        check("q_out", q_out, qkv.dtype, {"R": rows, "Hq": heads, "D": dim}, device)


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_out: Tensor | None = None, *, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
    backend: BackendName | None = None, checked: bool = True,
) -> Tensor:
    """Rotated queries [R, Hq, D]; k_cache and v_cache at slots[i] become row i's rotated key and its value.

    qkv [R, (Hq + 2 Hkv) * D]: heads of q, k, v side by side, bias included; fp32, bf16 or fp16, contiguous. cos, sin
    [T, rotary], fp32 as rope_tables makes them (sin signed: x * cos + roll(x, rotary / 2) * sin); cast to qkv's dtype
    before use, as transformers casts them. Dimensions from `rotary` on pass through. positions int64 [R], each < T.
    slots int64 [R] = page * page_size + offset, all different. k_cache, v_cache [P, page, Hkv, D] of qkv's dtype, equal
    strides, dense in D. q_norm, k_norm [D]: RMSNorm of each head before the rotation, with `eps` (Qwen3).
    q_out [R, Hq, D]: written and returned when given.

    Each product and sum of the rotation is rounded to the dtype: in bf16 and fp16 without norms, all backends agree bit
    for bit. Values of positions and slots are the caller's to keep right. Raises ValueError for wrong shapes and types,
    unless `checked` is False.
    """
    if checked:
        _check(qkv, cos, sin, positions, slots, k_cache, v_cache, q_out, q_norm, k_norm)
    plain = qkv.dtype == cos.dtype == torch.float32 and k_cache[0].is_contiguous() and k_cache.shape[3] <= MAX_CPP_DIM
    cpu: tuple[BackendName, ...] = ("cpp", "reference") if plain else ("reference",)
    picked = choose("rope_write_kv", backend, qkv.device, cpu=cpu, cuda=("triton", "reference"))
    if picked == "reference":
        q = reference.rope_write_kv(qkv, cos, sin, positions, slots, k_cache, v_cache, q_norm, k_norm, eps)
        return q if q_out is None else q_out.copy_(q)
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if q_out is None:
        q_out = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    if picked == "cpp":
        length, rotary = cos.shape
        bad = extension().rope_write_kv(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(), eps,
            len(qkv), heads, kv_heads, dim, rotary, length, k_cache.shape[0] * k_cache.shape[1], q_out.data_ptr(),
            k_cache.data_ptr(), v_cache.data_ptr(), threads(),
        )
        if bad >= 0:
            raise ValueError(
                f"positions, slots: expected row {bad} in [0, {length}) and the cache's "
                f"{k_cache.shape[0] * k_cache.shape[1]} slots, got {int(positions[bad])} and {int(slots[bad])}; "
                "nothing was written"
            )
        return q_out
    from tlt_kernels.triton import rope as triton_backend  # Triton is an optional extra

    triton_backend.rope_write_kv(qkv, cos, sin, positions, slots, k_cache, v_cache, q_out, q_norm, k_norm, eps)
    return q_out
