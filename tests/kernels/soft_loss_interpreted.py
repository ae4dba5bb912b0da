"""The fused loss under Triton's interpreter. Not collected by itself: test_soft_loss.py runs it in one process that has
TRITON_INTERPRET=1 before triton is imported. bf16 is wrong in the interpreter; tests/gpu has it."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.soft_loss import row_stats
from tlt_kernels.triton import soft_loss as backend

from tests.kernels.soft_loss_cases import SHAPES, faults


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert faults(*shape, dtype, "cpu", "triton") == []


def test_sibling_of_blocks_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel told of one column fewer than there are."""
    real = backend.soft_cross_entropy_kernel

    class Short:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            return lambda *args, **more: real[grid](*args[:-1], args[-1] - 1, **more)

    monkeypatch.setattr(backend, "soft_cross_entropy_kernel", Short())
    assert {"gradient", "cross entropy"} <= set(faults(3, 63, torch.float32, "cpu", "triton"))


def test_no_rows() -> None:
    assert all(len(t) == 0 for t in row_stats(torch.empty(0, 8), backend="triton"))
