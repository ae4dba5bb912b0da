"""Gumbel noise with an identity: a pure function of (key, position, sample, segment, token id). Holds no state.

Knows neither logits nor requests. The identity is that of docs/seeds.md; words are Philox4x32-10 (csrc/philox.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, current_stream, extension, threads
from tlt_kernels.checks import check, check_range
from tlt_kernels.params import NoiseIds
from tlt_kernels.reference import noise as reference

MAX_VOCAB = 2**26  # four ids a counter, 24 bits of the counter word for id // 4
WORD = 2**32 - 1


def check_ids(ids: NoiseIds, rows: int | None = None) -> int:
    """Number of rows. Values are checked on the CPU only: on CUDA that would wait for the device."""
    check("ids.keys", ids.keys, torch.int64, {"R": rows})
    for name in ("positions", "samples", "segments"):
        tensor = check(f"ids.{name}", getattr(ids, name), torch.int64, {"R": len(ids.keys)}, ids.keys.device)
        if tensor.device.type == "cpu":
            check_range(f"ids.{name}", tensor, 0, WORD)
    return len(ids.keys)


def check_purpose(purpose: int) -> int:
    if not 0 <= purpose <= 255:
        raise ValueError(f"purpose: expected an int in [0, 255], got {purpose!r}; 0 is the target's own noise")
    return purpose


def check_vocab(vocab: int) -> int:
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"vocab: expected an int in [1, {MAX_VOCAB}], got {vocab!r}; pass the width of the logits")
    return vocab


def addresses(ids: NoiseIds) -> tuple[int, int, int, int]:
    return ids.keys.data_ptr(), ids.positions.data_ptr(), ids.samples.data_ptr(), ids.segments.data_ptr()


def gumbel_noise(ids: NoiseIds, vocab: int, *, purpose: int = 0, backend: BackendName | None = None) -> Tensor:
    """Standard Gumbel noise g fp32 [R, vocab] of every token id, in [-2.82, 22.9].

    purpose: 0 is the noise that the target draws with; other values (up to 255) are independent streams.
    Raises ValueError for wrong shapes, dtypes or ranges, RuntimeError when the GPU cannot be used.
    """
    rows, vocab, purpose = check_ids(ids), check_vocab(vocab), check_purpose(purpose)
    picked = choose("gumbel_noise", backend, ids.keys.device, cuda=("cuda", "reference"))
    if picked == "reference":
        return reference.gumbel_noise(ids, vocab, purpose=purpose)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=ids.keys.device)
    if picked == "cuda":
        stream = current_stream(ids.keys.device)
        extension().cuda_gumbel_noise(*addresses(ids), rows, vocab, purpose, out.data_ptr(), stream=stream)
    else:
        extension().gumbel_noise(*addresses(ids), rows, vocab, purpose, threads(), out.data_ptr())
    return out


def gumbel_noise_at(
    ids: NoiseIds, token_ids: Tensor, *, purpose: int = 0, backend: BackendName | None = None
) -> Tensor:
    """The noise fp32 [R] of token_ids int64 [R], one id a row: gumbel_noise(...)[r, token_ids[r]]."""
    rows, purpose = check_ids(ids), check_purpose(purpose)
    check("token_ids", token_ids, torch.int64, {"R": rows}, ids.keys.device)
    picked = choose("gumbel_noise_at", backend, ids.keys.device)
    if picked == "reference":
        return reference.gumbel_noise_at(ids, token_ids, purpose=purpose)
    check_range("token_ids", token_ids, 0, MAX_VOCAB - 1)
    out = torch.empty(rows, dtype=torch.float32)
    extension().gumbel_noise_at(*addresses(ids), token_ids.data_ptr(), rows, purpose, out.data_ptr())
    return out
