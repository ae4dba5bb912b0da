"""Programmatic dependent launch for our Triton kernels. Knows devices, no op.

A kernel launched so may start while the one before it still runs: it must call `gdc_wait` before it touches anything
that an earlier kernel writes or reads, and only constants (weights) before that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that has a constexpr PDL: on where the device has it (compute capability 9.0)."""
    return {"PDL": True, "launch_pdl": True} if _overlaps(device) else {"PDL": False}
