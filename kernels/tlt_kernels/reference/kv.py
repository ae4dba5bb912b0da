"""Writes to the paged KV cache, as their definitions read. Knows neither speed nor argument checks.

Shape legend: R packed rows, B requests, L layers, P pages, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.params import Walk


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    page = k_cache.shape[1]
    k_cache[slots // page, slots % page] = k
    v_cache[slots // page, slots % page] = v


def commit_kv(kv: Tensor, page_table: Tensor, prefix_lens: Tensor, walk: Walk) -> None:
    page = kv.shape[3]
    for b, prefix in enumerate(prefix_lens.tolist()):
        path = walk.paths[b, : int(walk.accept_lens[b])].long()
        source, target = prefix + path, prefix + torch.arange(len(path), device=path.device)
        # The whole path is read before anything is written: slot prefix + d may itself be a source of the path.
        moved = kv[:, :, page_table[b, source // page].long(), source % page]
        kv[:, :, page_table[b, target // page].long(), target % page] = moved


def copy_pages(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        kv[:, :, target] = kv[:, :, source]
