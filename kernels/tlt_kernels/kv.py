"""Writes to the paged KV cache: a step's rows, the compaction of accepted paths, page copies. All in place.

Knows neither allocation nor reference counts: slots and pages are numbers that the caller owns.
Shape legend: R packed rows, B requests, L layers, P pages, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels import cuda
from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check, check_range
from tlt_kernels.params import Walk
from tlt_kernels.reference import kv as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check_dense(name: str, tensor: Tensor, first: int) -> None:
    """Dims from `first` on must be row-major without gaps: they are copied as one run of bytes."""
    run = 1
    for dim in range(tensor.dim() - 1, first - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != run:
            raise ValueError(
                f"{name}: expected dims {first}.. to be dense, got strides {list(tensor.stride())}; pass a view of kv"
            )
        run *= tensor.shape[dim]


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, backend: BackendName | None = None
) -> None:
    """k_cache, v_cache [P, page, Hkv, D] at slot slots[i] (page * page_size + offset, int64 [R]) become k[i], v[i].

    k, v [R, Hkv, D] of the cache's dtype, dense within a row. Slots must differ from each other.
    Raises ValueError for wrong shapes, types or slots outside the cache.
    """
    check("k_cache", k_cache, FLOATS, {"P": None, "page": None, "Hkv": None, "D": None}, contiguous=False)
    check("v_cache", v_cache, k_cache.dtype, k_cache.shape, k_cache.device, contiguous=False)
    pages, page, heads, dim = k_cache.shape
    for name, rows in (("k", k), ("v", v)):
        check(name, rows, k_cache.dtype, {"R": len(slots), "Hkv": heads, "D": dim}, k_cache.device, contiguous=False)
        _check_dense(name, rows, 1)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_dense(name, cache, 2)
    check("slots", slots, torch.int64, {"R": len(k)}, k_cache.device)
    if choose("write_kv", backend, k_cache.device) == "reference":
        reference.write_kv(k, v, k_cache, v_cache, slots)
        return
    size = k_cache.element_size()
    for rows, cache in ((k, k_cache), (v, v_cache)):
        extension().write_rows(
            rows.data_ptr(), rows.stride(0) * size, cache.data_ptr(), cache.stride(0) * size, cache.stride(1) * size,
            pages, page, heads * dim * size, slots.data_ptr(), len(slots),
        )


def _check_kv(kv: Tensor) -> None:
    shape = {"L": None, "kv": 2, "P": None, "page": None, "Hkv": None, "D": None}
    check("kv", kv, FLOATS, shape)


def commit_kv(
    kv: Tensor, page_table: Tensor, prefix_lens: Tensor, walk: Walk, *, backend: BackendName | None = None
) -> None:
    """Moves K and V of each accepted path, in all layers, to where plain decoding would have put them: from logical
    slot prefix + paths[b, d] to prefix + d, for d < accept_lens[b]. kv [L, 2, P, page, Hkv, D], page_table int32
    [B, pages], prefix_lens int32 [B], walk as verify_tree gives it: paths rise, so paths[d] >= d.

    Raises ValueError for wrong shapes and types, paths that do not rise, or slots outside the page table.
    """
    _check_kv(kv)
    batch = len(prefix_lens)
    check("page_table", page_table, torch.int32, {"B": batch, "pages": None}, kv.device)
    check("prefix_lens", prefix_lens, torch.int32, {"B": batch}, kv.device)
    check("walk.accept_lens", walk.accept_lens, torch.int32, {"B": batch}, kv.device)
    check("walk.paths", walk.paths, torch.int32, {"B": batch, "D": None}, kv.device)
    picked = choose("commit_kv", backend, kv.device, cuda=("cuda", "reference"))
    if picked != "cpp":
        (cuda if picked == "cuda" else reference).commit_kv(kv, page_table, prefix_lens, walk)
        return
    layers, _, pages, page, heads, dim = kv.shape
    extension().commit_kv(
        kv.data_ptr(), layers * 2, pages, page, heads * dim * kv.element_size(), page_table.data_ptr(),
        page_table.shape[1], prefix_lens.data_ptr(), walk.accept_lens.data_ptr(), walk.paths.data_ptr(),
        walk.paths.shape[1], batch, threads(),
    )


def copy_pages(kv: Tensor, src: Tensor, dst: Tensor, *, backend: BackendName | None = None) -> None:
    """Page dst[i] of every layer becomes a copy of page src[i], in order i = 0, 1, ... src, dst int64 [N].

    Raises ValueError for wrong shapes and types or pages outside the cache.
    """
    _check_kv(kv)
    check("src", src, torch.int64, {"N": None}, kv.device)
    check("dst", dst, torch.int64, {"N": len(src)}, kv.device)
    layers, _, pages, page, heads, dim = kv.shape
    if kv.device.type == "cpu":
        check_range("src", src, 0, pages - 1)
        check_range("dst", dst, 0, pages - 1)
    picked = choose("copy_pages", backend, kv.device, cuda=("cuda", "reference"))
    if picked != "cpp":
        (cuda if picked == "cuda" else reference).copy_pages(kv, src, dst)
        return
    extension().copy_pages(
        kv.data_ptr(), layers * 2, pages, page * heads * dim * kv.element_size(), src.data_ptr(), dst.data_ptr(),
        len(src),
    )
