"""Rows for the fused loss, and the comparison of a backend with the definition in fp64. Shared by the tests on the CPU,
under the interpreter of Triton and on a GPU."""

from __future__ import annotations

import torch
from tlt_kernels.soft_loss import row_stats, soft_cross_entropy
from torch import Tensor

SHAPES = [(1, 1), (3, 63), (5, 4096), (4, 4097), (2, 9000)]


def rows_of(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q and p logits, one of p's rows with its best value twice, and weights, one of them 0."""
    g = torch.Generator().manual_seed(vocab)
    q, p = (4 * torch.randn(rows, vocab, generator=g) for _ in range(2))
    p[0, [vocab // 3, vocab - 1]] = 30.0
    weight = torch.rand(rows, generator=g) + 0.1
    weight[rows // 2] = 0.0
    return q.to(device, dtype), p.to(device, dtype), weight.to(device)


def faults(rows: int, vocab: int, dtype: torch.dtype, device: str, backend: str | None) -> list[str]:
    """Names of the results that are not the definition's. Figures to 1e-5; a gradient, of at most the weight, to one
    rounding of its type."""
    q, p, weight = rows_of(rows, vocab, dtype, device)
    log_q, log_p = q.double().log_softmax(-1), p.double().log_softmax(-1)
    norm, entropy, best = row_stats(p, backend=backend)  # type: ignore[arg-type]
    live = weight != 0
    wanted = {
        "norm": (norm, p.double().logsumexp(-1)), "entropy": (entropy, -(log_p.exp() * log_p).sum(-1)),
    }
    grad = q.clone()
    crossed, overlap, guess = soft_cross_entropy(grad, p, norm, weight, backend=backend)  # type: ignore[arg-type]
    wanted["cross entropy"] = (crossed, -(log_p.exp() * log_q).sum(-1) * live)
    wanted["overlap"] = (overlap, torch.minimum(log_p.exp(), log_q.exp()).sum(-1) * live)
    wrong = [n for n, (got, want) in wanted.items() if not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)]
    exact = (log_q.exp() - log_p.exp()) * weight.double()[:, None]
    bound = 2 * torch.finfo(dtype).eps * exact.abs() + 2e-6
    wrong += [] if bool(((grad.double() - exact).abs() <= bound).all()) else ["gradient"]
    first = (torch.arange(vocab, device=device) - vocab) * (p == p.max(-1, keepdim=True).values)
    wrong += [] if torch.equal(best, first.argmin(-1)) else ["best"]
    first = (torch.arange(vocab, device=device) - vocab) * (q == q.max(-1, keepdim=True).values)
    wrong += [] if torch.equal(guess, first.argmin(-1) * live) else ["guess"]
    return wrong
