"""Rows, identities and parameters for the tests of noise and sampling."""

from __future__ import annotations

from dataclasses import fields

import torch
from tlt_kernels import NoiseIds, RowParams, SampleResult
from tlt_kernels.noise import addresses
from tlt_kernels.sampling import DTYPES
from torch import Tensor

from tlt_engine import _C


def make_ids(rows: int, seed: int = 0) -> NoiseIds:
    g = torch.Generator().manual_seed(seed)
    return NoiseIds(
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        *(torch.randint(0, 2**32, (rows,), generator=g) for _ in range(3)),
    )


def draw_ids(rows: int, *, key: int = 1, first: int = 0, sample: int = 0, segment: int = 0) -> NoiseIds:
    """One request's identities at positions first .. first + rows - 1."""
    ones = torch.ones(rows, dtype=torch.int64)
    return NoiseIds(key * ones, torch.arange(first, first + rows), sample * ones, segment * ones)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def bits(rows: list[list[int]], vocab: int) -> Tensor:
    """allowed_bits of lists of allowed ids."""
    out = torch.zeros(len(rows), -(-vocab // 32) * 32, dtype=torch.int64)
    for row, ids in zip(out, rows):
        row[ids] = 1
    words = (out.view(len(rows), -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def raw_sample(logits: Tensor, ids: NoiseIds, params: RowParams, *, skip: bool, threads: int = 1) -> SampleResult:
    """_C.sample with its two hidden knobs: skip=False takes every log, threads."""
    rows, vocab = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    tensors = {f.name: getattr(params, f.name) for f in fields(params)}
    live = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
    words = 0 if params.allowed_bits is None else params.allowed_bits.shape[1]
    _C.sample(
        logits.data_ptr(), DTYPES[logits.dtype], rows, vocab, vocab, *addresses(ids), live, words, 0, skip, threads,
        tokens.data_ptr(), logprobs.data_ptr(), 0,
    )
    return SampleResult(tokens, logprobs)
