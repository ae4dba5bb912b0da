"""The gated activation between the two products of an MLP.

Knows neither models nor layers. Shape legend: R packed rows, I intermediate features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check
from tlt_kernels.reference import activation as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def silu_mul(
    gate_up: Tensor, *, out: Tensor | None = None, backend: BackendName | None = None, checked: bool = True
) -> Tensor:
    """silu(gate) * up, [R, I]. gate_up [R, 2 I]: gate in the first half of a row; fp32, bf16 or fp16, contiguous.

    silu is taken in fp32 and rounded to the dtype before the product. out [R, I]: written and returned when given.
    Raises ValueError for wrong shapes and types, unless `checked` is False.
    """
    if checked:
        check("gate_up", gate_up, FLOATS, {"R": None, "2 I": None})
        if gate_up.shape[1] % 2:
            raise ValueError(
                f"gate_up: expected an even number of columns, got {list(gate_up.shape)}; pass gate and up side by side"
            )
        if out is not None:
            check("out", out, gate_up.dtype, {"R": gate_up.shape[0], "I": gate_up.shape[1] // 2}, gate_up.device)
    cpu: tuple[BackendName, ...] = ("cpp", "reference") if gate_up.dtype == torch.float32 else ("reference",)
    picked = choose("silu_mul", backend, gate_up.device, cpu=cpu, cuda=("triton", "reference"))
    if picked == "reference":
        result = reference.silu_mul(gate_up)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    if picked == "cpp":
        extension().silu_mul(gate_up.data_ptr(), *out.shape, out.data_ptr(), threads())
        return out
    from tlt_kernels.triton import activation as triton_backend  # Triton is an optional extra

    triton_backend.silu_mul(gate_up, out)
    return out
