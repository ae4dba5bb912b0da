"""Which implementation of an op runs. Knows names and devices, no op.

"reference" (torch, any device) is the specification; "cpp" runs on CPU tensors, "cuda" and "triton" on CUDA
tensors. Each op lists what it has per device, the default first. There is no silent fallback.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Literal

import torch

BackendName = Literal["reference", "cpp", "cuda", "triton"]
BACKENDS: tuple[BackendName, ...] = ("reference", "cpp", "cuda", "triton")


@cache
def extension() -> ModuleType:
    """tlt_engine._C. Raises ImportError with the remedy when it has not been built."""
    try:
        from tlt_engine import _C
    except ImportError as error:
        raise ImportError(
            f"tlt_engine._C: expected the compiled extension, got {error}; build it with `pip install -e .`"
        ) from error
    return _C


def choose(
    op: str,
    backend: BackendName | None,
    device: torch.device,
    *,
    cpu: Sequence[BackendName] = ("cpp", "reference"),
    cuda: Sequence[BackendName] = ("reference",),
) -> BackendName:
    """The backend that will run `op` on `device`: `backend`, or the first one the op has there.

    Raises ValueError for a name that does not exist, or that the op lacks on this device; "triton" on the CPU
    is allowed where the op has it and TRITON_INTERPRET=1 is set.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"{op}: backend: expected None or one of {list(BACKENDS)}, got {backend!r}; None takes the best one"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: device: expected cpu or cuda tensors, got {device}; move them with .cpu()")
    offered = cuda if device.type == "cuda" else cpu
    picked = offered[0] if backend is None else backend
    if picked == "triton" and device.type == "cpu" and "triton" in cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{op}: backend: expected one of {list(offered)} for cpu tensors, got 'triton'; set "
                "TRITON_INTERPRET=1 before importing triton to interpret the kernel, or move the tensors to cuda"
            )
        return picked
    if picked not in offered:
        raise ValueError(
            f"{op}: backend: expected one of {list(offered)} for {device.type} tensors, got {picked!r}; pass one "
            "of these, or None for the first"
        )
    if picked == "cuda" and not extension().with_cuda:
        raise ValueError(
            f"{op}: backend: expected a build with CUDA for cuda tensors, got tlt_engine._C without it; rebuild "
            "where nvcc is on PATH (TLT_CUDA=1 pip install -e .), or pass backend='reference'"
        )
    return picked


def threads() -> int:
    """Threads for the C++ ops: torch's own setting, so that one knob (OMP_NUM_THREADS) rules both."""
    return torch.get_num_threads()


def current_stream(device: torch.device) -> int:
    """The address of torch's current stream on a CUDA device, as the CUDA ops require it. Every launch asks: without
    a Stream object, which takes 3 us to make."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))
