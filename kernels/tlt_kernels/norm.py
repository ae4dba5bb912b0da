"""RMSNorm over the features of packed rows, with the residual sum fused in.

Knows neither models nor layers. Shape legend: R packed rows, H features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check
from tlt_kernels.reference import norm as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_FEATURES = 32768  # a row lives in the registers of one program


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None,
    residual_out: Tensor | None = None, backend: BackendName | None = None, checked: bool = True,
) -> tuple[Tensor, Tensor]:
    """(weight * h / sqrt(mean(h ** 2) + eps), h) with h = x + residual, or x itself without a residual.

    x, residual [R, H] and weight [H] of one dtype, fp32, bf16 or fp16, contiguous. Sums in fp32; h, the normed row and
    the product are each rounded to the dtype, as transformers rounds them. out, residual_out [R, H]: written and
    returned when given; out may be x, residual_out may be x or residual, but not the same as out.

    A row's bits depend on that row only. Raises ValueError for wrong shapes and types, unless `checked` is False.
    """
    if checked:
        shape = {"R": None, "H": None}
        check("x", x, FLOATS, shape)
        check("weight", weight, x.dtype, {"H": x.shape[1]}, x.device)
        for name, tensor in (("residual", residual), ("out", out), ("residual_out", residual_out)):
            if tensor is not None:
                check(name, tensor, x.dtype, {"R": x.shape[0], "H": x.shape[1]}, x.device)
        if residual_out is not None and residual is None:
            raise ValueError("residual_out: expected None without a residual, got a tensor; the sum is then x itself")
    cuda: tuple[BackendName, ...] = ("triton", "reference") if x.shape[1] <= MAX_FEATURES else ("reference",)
    # The C++ path takes fp32 and leaves the residual sum to the product before it (linear's base).
    in_cpp = x.dtype == torch.float32 and residual is None
    cpu: tuple[BackendName, ...] = ("cpp", "reference") if in_cpp else ("reference",)
    picked = choose("rms_norm", backend, x.device, cpu=cpu, cuda=cuda)
    if picked == "cpp":
        out = torch.empty_like(x) if out is None else out
        rows, width = x.shape
        extension().rms_norm(x.data_ptr(), width, weight.data_ptr(), eps, rows, width, out.data_ptr(), threads())
        return out, x
    if picked == "reference":
        y, h = reference.rms_norm(x, weight, eps, residual)
        if residual_out is not None:
            h = residual_out.copy_(h)
        return (y if out is None else out.copy_(y)), h
    from tlt_kernels.triton import norm as triton_backend  # Triton is an optional extra

    out = torch.empty_like(x) if out is None else out
    if residual is not None and residual_out is None:
        residual_out = torch.empty_like(x)
    triton_backend.rms_norm(x, weight, eps, residual, out, residual_out)
    return out, x if residual_out is None else residual_out
