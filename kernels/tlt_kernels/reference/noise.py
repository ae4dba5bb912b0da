"""The noise in torch, the specification: Philox4x32-10 in int64 arithmetic and the Gumbel form of a word.

Knows no vocabulary filters and no requests. Any device; slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.params import NoiseIds

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2**32, without leaving int64: b is split into 16-bit halves."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & MASK


def philox4x32_10(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (int64 tensors) of four 32-bit counter words and a 64-bit key (int64 bit pattern). Shapes
    broadcast. Salmon et al., SC 2011; checked against Random123's known answers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, (key >> 32) & MASK
    for _ in range(10):
        hi0, lo0 = _mulhilo(MULTIPLIERS[0], c0)
        hi1, lo1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def noise_words(ids: NoiseIds, token_ids: Tensor, purpose: int = 0) -> Tensor:
    """The 32-bit words (int64) of token_ids [R, n]: counter (position, id // 4 + 2**24 * purpose, sample, segment),
    word id % 4."""
    counter = (ids.positions[:, None], token_ids // 4 + (purpose << 24), ids.samples[:, None], ids.segments[:, None])
    words = torch.stack(torch.broadcast_tensors(*philox4x32_10(counter, ids.keys[:, None])))
    return words.gather(0, (token_ids % 4).expand(words.shape[1:])[None])[0]


def uniform(words: Tensor) -> Tensor:
    """w fp32 in (0, 1): min((float(x) + 0.5) * 2**-32, 1 - 2**-24), each step one fp32 rounding."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(words: Tensor) -> Tensor:
    """g = -log(-log1p(-w)) in double, rounded to fp32: in [-2.82, 22.9], never infinite."""
    return (-(-torch.log1p(-uniform(words).double())).log()).float()


def gumbel_noise(ids: NoiseIds, vocab: int, *, purpose: int = 0) -> Tensor:
    """fp32 [R, vocab]."""
    token_ids = torch.arange(vocab, device=ids.keys.device)[None].expand(len(ids.keys), vocab)
    return gumbel(noise_words(ids, token_ids, purpose))


def gumbel_noise_at(ids: NoiseIds, token_ids: Tensor, *, purpose: int = 0) -> Tensor:
    """fp32 [R]: the noise of token_ids[r] at row r."""
    return gumbel(noise_words(ids, token_ids[:, None], purpose))[:, 0]
