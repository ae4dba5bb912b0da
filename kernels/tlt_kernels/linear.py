"""Products of packed rows with a weight matrix.

Knows neither models nor layers. Shape legend: R packed rows, K input features, N output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None) -> None:
    check("x", x, FLOATS, {"R": None, "K": None}, contiguous=False)
    check("weight", weight, x.dtype, {"N": None, "K": x.shape[1]}, x.device)
    outer = weight.shape[0]
    if bias is not None:
        check("bias", bias, x.dtype, {"N": outer}, x.device)
    if base is not None:
        check("base", base, x.dtype, {"R": x.shape[0], "N": outer}, x.device, contiguous=False)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, base: Tensor | None = None,
    backend: BackendName | None = None, checked: bool = True,
) -> Tensor:
    """base + x @ weight.T + bias, [R, N] in x's dtype, in a new tensor.

    x [R, K], dense within a row. weight [N, K], contiguous, in the layout of checkpoints. bias [N]. base [R, N], dense
    within a row: the residual stream, for one.

    "cpp" (fp32 on the CPU, the default there): the bits of a row depend on that row, not on how many there are, so a
    verified row equals the same row decoded alone. It is also made for few rows: over the weights of SmolLM2-135M, on
    one core, 1 / 4 / 8 / 16 / 128 rows took 24 / 26 / 32 / 63 / 373 ms, torch (MKL) 45 / 64 / 74 / 99 / 429 ms.
    "reference" (torch): every other dtype and device.
    Raises ValueError for wrong shapes and types, unless `checked` is False: for a caller that owns the weights and
    whose shapes follow from them, where the checks would be a tenth of a pass over one row.
    """
    if checked:
        _check(x, weight, bias, base)
    rows, inner = x.shape
    outer = weight.shape[0]
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    if choose("linear", backend, x.device, cpu=("cpp", "reference") if on_cpu else ("reference",)) == "reference":
        product = F.linear(x, weight, bias)
        return product if base is None else base + product
    x = x if x.stride(1) == 1 else x.contiguous()
    base = base if base is None or base.stride(1) == 1 else base.contiguous()
    out = torch.empty(rows, outer)
    extension().linear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if base is None else base.data_ptr(), 0 if base is None else base.stride(0), rows, outer, inner,
        out.data_ptr(), threads(),
    )
    return out
