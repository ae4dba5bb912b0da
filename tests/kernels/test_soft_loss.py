"""The fused loss on the CPU: the reference against the definition, the kernel under the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tlt_kernels.reference import soft_loss as reference
from tlt_kernels.soft_loss import soft_cross_entropy

from tests.kernels.soft_loss_cases import SHAPES, faults, rows_of

INTERPRETED = Path(__file__).with_name("soft_loss_interpreted.py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert faults(*shape, dtype, "cpu", None) == []


def test_sibling_with_a_teacher_that_is_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.soft_cross_entropy
    monkeypatch.setattr(reference, "soft_cross_entropy", lambda q, p, norm, weight: real(q, p, norm + 0.1, weight))
    assert {"gradient", "cross entropy", "overlap"} <= set(faults(3, 63, torch.float32, "cpu", None))


def test_it_says_what_does_not_fit() -> None:
    q, p, weight = rows_of(3, 63, torch.float32, "cpu")
    with pytest.raises(ValueError, match="p_logits"):
        soft_cross_entropy(q, p[:, :62].contiguous(), weight, weight)
    with pytest.raises(ValueError, match="weight"):
        soft_cross_entropy(q, p, weight, weight.double())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")
def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
