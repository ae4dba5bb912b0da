"""A `flashinfer` for machines without a GPU: the one class that tlt_kernels.flashinfer_prefill uses, in plain torch, as
FlashInfer's documentation describes its arguments. Refuses what the real one refuses."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    plans = 0  # of all wrappers

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert kv_layout == "NHD" and backend in ("auto", "fa2", "fa3")
        self.planned: dict[str, Any] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert int_workspace_buffer.numel() == 8 << 20

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:
        assert causal and q_data_type == kv_data_type and q_data_type in (torch.float16, torch.bfloat16)
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert qo_indptr[0] == paged_kv_indptr[0] == 0 and paged_kv_indptr[-1] == len(paged_kv_indices)
        type(self).plans += 1
        self.planned = dict(locals())

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert self.planned is not None, "run before plan"
        p = self.planned
        assert q.shape == (p["qo_indptr"][-1], p["num_qo_heads"], p["head_dim_qk"]) and out.shape == q.shape
        rows, pages, last = p["qo_indptr"].tolist(), p["paged_kv_indptr"].tolist(), p["paged_kv_last_page_len"].tolist()
        for b in range(len(last)):
            ids = p["paged_kv_indices"][pages[b] : pages[b + 1]].long()
            keys = (len(ids) - 1) * p["page_size"] + last[b]
            assert 1 <= last[b] <= p["page_size"]
            k, v = (cache[ids].flatten(0, 1)[:keys].float() for cache in paged_kv_cache)
            group = p["num_qo_heads"] // p["num_kv_heads"]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            queries = q[rows[b] : rows[b + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", queries, k) * p["sm_scale"]
            at = torch.arange(keys - len(queries), keys)[:, None]  # bottom right: the last row sees all keys
            seen = torch.arange(keys) <= at
            if p["window_left"] >= 0:
                seen &= torch.arange(keys) >= at - p["window_left"]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[rows[b] : rows[b + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


def install(patch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` gives the fake, as long as `patch` lasts."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)  # find_spec asks for it
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer", module)


def remove(patch: pytest.MonkeyPatch) -> None:
    """As if FlashInfer were not installed."""
    patch.setitem(sys.modules, "flashinfer", None)
