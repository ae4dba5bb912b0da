"""Products of packed rows with a weight matrix.

Knows neither models nor layers. Shape legend: R packed rows, K input features, N output features.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_kernels import cuda
from tlt_kernels.activation import silu_mul as activate
from tlt_kernels.backend import BackendName, choose, current_stream, extension, threads
from tlt_kernels.checks import check

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
# Up to here "cuda" is faster than cuBLAS. H200, 28 layers of a 7B model and the head in one graph, all but attention,
# ms, "cuda" against cuBLAS: 1 row 3.68 / 4.38, 32 rows 3.90 / 4.54, 64 rows 4.18 / 4.64, 128 rows 5.28 / 4.91.
SMALL_ROWS = 64
ROWS_PER_LAUNCH = 256  # csrc/cuda/linear.h
OVERLAP = True  # False: each product waits for the kernel before it, for measurements


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, silu_mul: bool, out: Tensor | None
) -> None:
    check("x", x, FLOATS, {"R": None, "K": None}, contiguous=False)
    check("weight", weight, x.dtype, {"N": None, "K": x.shape[1]}, x.device)
    outer = weight.shape[0]
    if bias is not None:
        check("bias", bias, x.dtype, {"N": outer}, x.device)
    if base is not None:
        check("base", base, x.dtype, {"R": x.shape[0], "N": outer}, x.device, contiguous=False)
    if silu_mul and (base is not None or outer % 2):
        raise ValueError(
            f"silu_mul: expected no base and an even number of rows in weight, got base={base is not None} and "
            f"{outer}; weight holds the gates' rows, then the rows of what they scale"
        )
    if out is not None:
        check("out", out, x.dtype, {"R": x.shape[0], "N": outer // 2 if silu_mul else outer}, x.device)


@cache
def _has_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0) and bool(extension().with_hopper)


def _fits_cuda(x: Tensor, weight: Tensor) -> bool:
    outer, inner = weight.shape
    return (
        x.dtype in HALF and inner % 8 == 0 and outer % 2 == 0 and weight.data_ptr() % 16 == 0 and _has_hopper(x.device)
    )


def _pick(x: Tensor, weight: Tensor, invariant: bool, backend: BackendName | None) -> BackendName:
    if x.device.type == "cpu":
        exact: tuple[BackendName, ...] = ("cpp", "reference") if x.dtype == torch.float32 else ("reference",)
        return choose("linear", backend, x.device, cpu=exact, cuda=("triton",))
    ours: tuple[BackendName, ...] = ("cuda", "triton") if _fits_cuda(x, weight) else ("triton",)
    if invariant:
        return choose("linear", backend, x.device, cuda=ours)
    if len(ours) == 2 and x.shape[0] <= SMALL_ROWS:
        return choose("linear", backend, x.device, cuda=(*ours, "reference"))
    return choose("linear", backend, x.device, cuda=("reference", *ours))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, base: Tensor | None = None, silu_mul: bool = False,
    out: Tensor | None = None, invariant: bool = False, backend: BackendName | None = None, checked: bool = True,
) -> Tensor:
    """base + (x @ weight.T + bias), [R, N] in x's dtype. With silu_mul: silu(gate) * up, [R, N / 2], of the product's
    halves gate and up. Sums in fp32; the product, silu and each later step are rounded to the dtype, as torch does.

    x [R, K], dense within a row. weight [N, K], contiguous, in the layout of checkpoints. bias [N]. base [R, N], dense
    within a row: the residual stream, for one. out: written and returned when given; it may be base.
    invariant: the bits of a row depend on that row, the weight and the device only, not on how many rows there are.

    "cpp" (fp32 on the CPU, the default there): always invariant. It is also made for few rows: over the weights of
    SmolLM2-135M, on one core, 1 / 4 / 8 / 16 / 128 rows took 24 / 26 / 32 / 63 / 373 ms, torch (MKL) 45 / 64 / 74 / 99
    / 429 ms. "cuda" (bf16 and fp16, compute capability 9.0, K a multiple of 8, N even): always invariant, the default
    up to SMALL_ROWS rows and with `invariant`; starts while the kernel before it still runs, which must not write the
    weight.
    "triton": always invariant, any dtype, slow; the default for the rest with `invariant`. "reference" (torch): every
    other dtype and device; one row at a time with `invariant`.
    Raises ValueError for wrong shapes and types, unless `checked` is False: for a caller that owns the weights and
    whose shapes follow from them, where the checks would be a tenth of a pass over one row.
    """
    if checked:
        _check(x, weight, bias, base, silu_mul, out)
    picked = _pick(x, weight, invariant, backend)
    if picked == "reference":
        return _torch(x, weight, bias, base, silu_mul, out, invariant)
    x = x if x.stride(1) == 1 else x.contiguous()
    base = base if base is None or base.stride(1) == 1 else base.contiguous()
    if picked == "cuda":
        return _cuda(x, weight, bias, base, silu_mul, out)
    if silu_mul:
        return activate(linear(x, weight, bias, backend=picked, checked=False), out=out, checked=False)
    rows, outer = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outer, dtype=x.dtype, device=x.device) if out is None else out
    if picked == "triton":
        from tlt_kernels.triton import linear as triton_backend  # Triton is an optional extra

        triton_backend.linear(x, weight, bias, base, out)
        return out
    extension().linear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if base is None else base.data_ptr(), 0 if base is None else base.stride(0), rows, outer, x.shape[1],
        out.data_ptr(), threads(),
    )
    return out


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, silu_mul: bool, out: Tensor | None,
    invariant: bool,
) -> Tensor:
    if invariant and len(x) > 1:
        product = torch.cat([F.linear(row[None], weight, bias) for row in x])
    elif out is None or silu_mul or base is not None:
        product = F.linear(x, weight, bias)
    elif bias is None:
        return torch.mm(x, weight.T, out=out)
    else:
        return torch.addmm(bias, x, weight.T, out=out)
    if silu_mul:
        return activate(product, out=out, checked=False)
    if base is not None:
        return torch.add(base, product, out=out)
    return product if out is None else out.copy_(product)


def _aligned(x: Tensor, border: int) -> Tensor:
    """x with its rows at multiples of `border` bytes."""
    if x.data_ptr() % border == 0 and x.stride(0) * x.element_size() % border == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, silu_mul: bool, out: Tensor | None
) -> Tensor:
    (rows, inner), outer = x.shape, weight.shape[0]
    if silu_mul and outer % 16:
        return activate(_cuda(x, weight, bias, None, False, None), out=out, checked=False)
    if out is not None and out.data_ptr() % 4:
        return out.copy_(_cuda(x, weight, bias, base, silu_mul, None))
    if out is None:
        out = torch.empty(rows, outer // 2 if silu_mul else outer, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = _aligned(x, 16)
    base = None if base is None else _aligned(base, 4)
    workers = cuda._processor_count(x.device)
    scratch = cuda._scratch_of(x.device)
    # Two sizes only, so that one call of each kind before a capture is enough: 9 MB, or 35 MB, on an H200.
    most = SMALL_ROWS if rows <= SMALL_ROWS else ROWS_PER_LAUNCH
    partials = scratch.get(f"linear.{most}", extension().cuda_linear_partials(most, workers), x.device)
    arrived = scratch.get("linear.arrived", extension().cuda_linear_counters(2**21), x.device)
    extension().cuda_linear(
        cuda.DTYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), cuda._address(bias), cuda._address(base),
        0 if base is None else base.stride(0), out.data_ptr(), rows, outer, inner, silu_mul, partials.data_ptr(),
        arrived.data_ptr(), workers, OVERLAP, stream=current_stream(x.device),
    )
    return out
