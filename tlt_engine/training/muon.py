"""Muon's update of a weight matrix (Jordan et al., kellerjordan.github.io/posts/muon). Knows neither trainers nor
gradients' origin.

The momentum of a matrix, with all its singular values brought near 1 by Newton-Schulz iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steep at 0, singular values end in about [0.7, 1.2]
ITERATIONS = 5
RMS = 0.2  # of an update's elements at lr 1, what AdamW's are (arXiv 2502.16982)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n] -> its U V^T, nearly. Products in bf16 on a GPU."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


def update_matrix(master: Tensor, grad: Tensor, momentum: Tensor, parts: Sequence[int], lr: float) -> None:
    """In place. master, grad and momentum fp32 [m, n]; parts: rows of the matrices that lie stacked in it."""
    momentum.lerp_(grad, 1 - MOMENTUM)
    ahead = grad.lerp(momentum, MOMENTUM)
    for own, part in zip(master.split(list(parts)), ahead.split(list(parts))):
        own.add_(orthogonalised(part), alpha=-lr * RMS * max(part.shape) ** 0.5)
