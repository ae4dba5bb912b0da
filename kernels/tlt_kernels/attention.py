"""Attention of a packed step over the paged KV cache.

Knows neither models nor requests: the same call serves prefill chunks, plain decoding and draft trees.
Shape legend: R packed rows, B requests, P pages, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check
from tlt_kernels.reference import attention as reference

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _check_cache(name: str, cache: Tensor, dtype: torch.dtype, like: Tensor) -> None:
    check(name, cache, dtype, {"P": None, "page": None, "Hkv": None, "D": None}, like.device, contiguous=False)
    if cache.shape != like.shape or cache.stride() != like.stride() or cache.stride(3) != 1:
        raise ValueError(
            f"{name}: expected shape {list(like.shape)} and strides {list(like.stride())} as k_cache, the last one 1, "
            f"got {list(cache.shape)} and {list(cache.stride())}; pass both as views of one kv tensor"
        )


def _check_rows(name: str, rows: Tensor, shape: dict[str, int | None]) -> None:
    """Rows may be a slice of a wider product (q of qkv), so only the inner dims must be dense."""
    check(name, rows, tuple(DTYPE_CODES), shape, contiguous=False)
    if rows.stride(2) != 1 or (rows.shape[1] > 1 and rows.stride(1) != rows.shape[2]):
        raise ValueError(
            f"{name}: expected dense heads and dims within a row, got strides {list(rows.stride())}; call .contiguous()"
        )


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, prefix_lens: Tensor, node_indptr: Tensor,
    ancestors: Tensor, causal: Tensor, positions: Tensor, *, scale: float, window: int = 0,
    out: Tensor | None = None, invariant: bool = False, backend: BackendName | None = None,
) -> Tensor:
    """[R, Hq, D] in q's dtype; sums in fp32.

    q [R, Hq, D], fp32, bf16 or fp16, dense within a row. k_cache, v_cache [P, page, Hkv, D] of q's dtype, Hkv a
    divisor of Hq; any strides but in D. The step's own K and V must already lie in their slots (write_kv).
    page_table int32 [B, pages], prefix_lens int32 [B], node_indptr int32 [B + 1], ancestors int64 [R, 2],
    causal uint8 [B], positions int64 [R]: as tlt_engine.types.StepInputs.

    Row i of a request sees the keys 0 .. prefix_len - 1 and, of its own request's rows, itself and its ancestors
    (all earlier rows where causal). window > 0 hides keys at positions <= its own - window; a prefix key's position
    is its index, a node's is positions[row] (its depth counts, not its index in the tree).
    scale: factor of the scores, usually D ** -0.5. out: written and returned when given, contiguous as q.

    invariant: take kernels whose output depends, bit for bit, only on a row's own q and on the keys and values that it
    sees, in order: not on the batch, the threads, the chunking, nor on whether a key is a committed one or a tree
    node. "cpp" always does, "triton" has its own kernels for it, "reference" refuses.
    Raises ValueError for wrong shapes, types, page ids or more than 128 nodes in a tree.
    """
    _check_rows("q", q, {"R": None, "Hq": None, "D": None})
    rows, heads, dim = q.shape
    _check_cache("k_cache", k_cache, q.dtype, k_cache)
    _check_cache("v_cache", v_cache, q.dtype, k_cache)
    if k_cache.shape[3] != dim or heads % k_cache.shape[2]:
        raise ValueError(
            f"k_cache: expected [P, page, Hkv, D={dim}] with Hkv a divisor of Hq={heads}, got {list(k_cache.shape)}; "
            "q and the cache come from different models"
        )
    batch = len(prefix_lens)
    check("page_table", page_table, torch.int32, {"B": batch, "pages": None}, q.device)
    check("prefix_lens", prefix_lens, torch.int32, {"B": batch}, q.device)
    check("node_indptr", node_indptr, torch.int32, {"B + 1": batch + 1}, q.device)
    check("ancestors", ancestors, torch.int64, {"R": rows, "words": 2}, q.device)
    check("causal", causal, torch.uint8, {"B": batch}, q.device)
    check("positions", positions, torch.int64, {"R": rows}, q.device)
    if not math.isfinite(scale) or window < 0:
        raise ValueError(
            f"scale, window: expected a finite scale and window >= 0, got {scale} and {window}; 0 means no window"
        )
    if out is not None:
        check("out", out, q.dtype, {"R": rows, "Hq": heads, "D": dim}, q.device)
    picked = choose("tree_attention", backend, q.device, cuda=("triton", "reference"))
    if invariant and picked == "reference":
        raise ValueError(
            "tree_attention: invariant: expected a backend whose bits are fixed ('cpp', 'triton'), got 'reference'; "
            "pass one of these"
        )
    if picked == "reference":
        result = reference.tree_attention(
            q, k_cache, v_cache, page_table, prefix_lens, node_indptr, ancestors, causal, positions, scale=scale,
            window=window,
        )
        return result if out is None else out.copy_(result)
    if picked == "triton":
        from tlt_kernels.triton import attention  # Triton is an optional extra
        from tlt_kernels.triton import invariant as fixed

        run = fixed.invariant_attention if invariant else attention.tree_attention
        return run(
            q, k_cache, v_cache, page_table, prefix_lens, node_indptr, ancestors, causal, positions, scale=scale,
            window=window, out=out,
        )
    out = torch.empty(rows, heads, dim, dtype=q.dtype) if out is None else out
    extension().tree_attention(
        DTYPE_CODES[q.dtype], q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape[:3],
        *k_cache.stride()[:3], page_table.data_ptr(), page_table.shape[1], prefix_lens.data_ptr(),
        node_indptr.data_ptr(), ancestors.data_ptr(), causal.data_ptr(), positions.data_ptr(), batch, rows, heads, dim,
        scale, window, threads(), out.data_ptr(),
    )
    return out
