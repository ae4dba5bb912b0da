"""The C++ norm, activation and rope against their references in fp32, and what a row's bits depend on."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.activation import silu_mul
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv

from tests.kernels.elementwise_cases import rope_case

ROWS_AND_WIDTHS = [(1, 1), (3, 15), (7, 16), (5, 577), (200, 576)]


@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
def test_norm(rows, width):
    x, weight = torch.randn(rows, width) * 3, torch.randn(width)
    y, h = rms_norm(x, weight, 1e-5, backend="cpp")
    assert h is x
    torch.testing.assert_close(y, rms_norm(x, weight, 1e-5, backend="reference")[0], rtol=2e-6, atol=1e-6)
    alone = torch.cat([rms_norm(row[None], weight, 1e-5, backend="cpp")[0] for row in x])
    assert torch.equal(y, alone)
    assert not torch.equal(y, rms_norm(x, weight, 1e-2, backend="cpp")[0])
    assert torch.equal(rms_norm(x, weight, 1e-5, out=torch.empty_like(x), backend="cpp")[0], y)


@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
def test_activation(rows, width):
    gate_up = torch.randn(rows, 2 * width) * 4
    gate_up[0, 0] = 100.0
    gate_up[-1, -1] = -100.0
    y = silu_mul(gate_up, backend="cpp")
    # exp's error of 3e-7 and two roundings, relative to the product
    torch.testing.assert_close(y, silu_mul(gate_up, backend="reference"), rtol=1e-6, atol=1e-30)
    assert torch.equal(y, torch.cat([silu_mul(row[None], backend="cpp") for row in gate_up]))
    extreme = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = silu_mul(extreme, backend="reference")
    torch.testing.assert_close(silu_mul(extreme, backend="cpp"), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("rotary", "dim"), [(32, 32), (8, 32), (64, 64), (80, 80)])
def test_rope(norm, rotary, dim):
    one, two = (rope_case(6, 3, 1, dim, rotary, norm=norm, dtype=torch.float32) for _ in range(2))
    two.kv.copy_(one.kv)
    args = one.args()
    theirs = [*args[:5], two.kv[0], two.kv[1]]
    q = rope_write_kv(*args, q_norm=one.q_norm, k_norm=one.k_norm, backend="cpp")
    expected = rope_write_kv(*theirs, q_norm=one.q_norm, k_norm=one.k_norm, backend="reference")
    torch.testing.assert_close(q, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(one.kv, two.kv, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(one.kv[0], one.kv[1])


def test_rope_refuses_what_would_write_elsewhere():
    case = rope_case(4, 2, 1, 16, 16, norm=False, dtype=torch.float32)
    before = case.kv.clone()
    for index, value in ((3, 10**9), (4, -1), (4, 10**9)):
        args = list(case.args())
        args[index] = args[index].clone()
        args[index][2] = value
        with pytest.raises(ValueError, match="positions, slots: expected row 2"):
            rope_write_kv(*args, backend="cpp")
        assert torch.equal(case.kv, before)
