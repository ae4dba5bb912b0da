"""The loss of a row of logits against a teacher's, and its gradient, over large vocabularies.

Knows neither drafters nor optimisers. Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose
from tlt_kernels.checks import check
from tlt_kernels.reference import soft_loss as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def row_stats(logits: Tensor, *, backend: BackendName | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V], fp32, bf16 or fp16 -> logsumexp and entropy (nats) fp32 [R], and the best id int64 [R], the lowest
    of equal ones. Sums in fp32; no logit may be -inf. ValueError for wrong shapes and types."""
    check("logits", logits, FLOATS, {"R": None, "V": None})
    if choose("row_stats", backend, logits.device, cpu=("reference",), cuda=("triton", "reference")) == "reference":
        return reference.row_stats(logits)
    from tlt_kernels.triton import soft_loss as triton_backend  # Triton is an optional extra

    return triton_backend.row_stats(logits)


def soft_cross_entropy(
    q_logits: Tensor, p_logits: Tensor, p_norm: Tensor, weight: Tensor, *, backend: BackendName | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy -sum p log q, overlap sum min(p, q), both fp32 [R]; q's best id int64 [R]).

    q_logits, p_logits [R, V] of one dtype, fp32, bf16 or fp16; p_norm fp32 [R]: the logsumexp of p_logits; weight
    fp32 [R]. **q_logits is overwritten** by the gradient weight * (softmax(q_logits) - p). A row of weight 0 is not
    looked at: its gradient and figures are 0. ValueError for wrong shapes and types."""
    check("q_logits", q_logits, FLOATS, {"R": None, "V": None})
    rows, vocab = q_logits.shape
    check("p_logits", p_logits, q_logits.dtype, {"R": rows, "V": vocab}, q_logits.device)
    for name, tensor in (("p_norm", p_norm), ("weight", weight)):
        check(name, tensor, torch.float32, {"R": rows}, q_logits.device)
    picked = choose("soft_cross_entropy", backend, q_logits.device, cpu=("reference",), cuda=("triton", "reference"))
    if picked == "reference":
        return reference.soft_cross_entropy(q_logits, p_logits, p_norm, weight)
    from tlt_kernels.triton import soft_loss as triton_backend

    return triton_backend.soft_cross_entropy(q_logits, p_logits, p_norm, weight)
