"""The element-wise kernels under Triton's interpreter. Not collected by itself: test_elementwise.py runs it in one
process that has TRITON_INTERPRET=1 before triton is imported. bf16 is wrong in the interpreter; tests/gpu has it."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.activation import silu_mul
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv
from tlt_kernels.triton import rope as rope_backend

from tests.kernels.elementwise_cases import RopeCase, rope_case, within_a_step

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("features", [576, 1024, 33])
def test_norm(features: int, add: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(features)
    x, residual = torch.randn(2, 3, features, generator=g).to(dtype)
    weight = torch.randn(features, generator=g).to(dtype)
    got = rms_norm(x, weight, 1e-5, residual=residual if add else None, backend="triton")
    wanted = rms_norm(x, weight, 1e-5, residual=residual if add else None, backend="reference")
    assert within_a_step(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_norm_in_place() -> None:
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    wanted = rms_norm(x, weight, 1e-5, residual=residual)
    got = rms_norm(x, weight, 1e-5, residual=residual, out=x, residual_out=residual, backend="triton")
    assert got[0] is x and got[1] is residual
    assert within_a_step(x, wanted[0]) and torch.equal(residual, wanted[1])


def test_sibling_of_the_norm_without_its_root() -> None:
    x, weight = torch.randn(3, 64) * 3, torch.randn(64)
    y, _ = rms_norm(x, weight, 1e-5, backend="triton")
    assert not within_a_step(y, weight * x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [7, 1500])
def test_silu_mul(features: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(3, 2 * features)).to(dtype)
    got = silu_mul(gate_up, backend="triton")
    assert within_a_step(got, silu_mul(gate_up, backend="reference"))
    swapped = torch.cat((gate_up[:, features:], gate_up[:, :features]), 1)
    assert not within_a_step(silu_mul(swapped, backend="triton"), silu_mul(gate_up, backend="reference"))


def agree(case: RopeCase) -> bool:
    """Queries and the whole cache, so that a write to a wrong slot shows."""
    ours, theirs = case.fresh(), case.fresh()
    q = rope_write_kv(*ours.args(), q_norm=case.q_norm, k_norm=case.k_norm, backend="triton")
    wanted = rope_write_kv(*theirs.args(), q_norm=case.q_norm, k_norm=case.k_norm, backend="reference")
    if case.q_norm is None and case.qkv.dtype != torch.float32:
        return torch.equal(q, wanted) and torch.equal(ours.kv, theirs.kv)
    close = torch.allclose if case.qkv.dtype == torch.float32 else within_a_step
    return bool(close(q, wanted, **({"atol": 2e-6} if close is torch.allclose else {}))) and bool(
        close(ours.kv, theirs.kv, **({"atol": 2e-6} if close is torch.allclose else {}))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "page"), [
    (3, 1, 64, 64, 16), (2, 2, 80, 32, 32), (4, 1, 16, 16, 12), (2, 1, 96, 48, 64),
])
def test_rope(heads: int, kv_heads: int, dim: int, rotary: int, page: int, norm: bool, dtype: torch.dtype) -> None:
    assert agree(rope_case(5, heads, kv_heads, dim, rotary, page, norm=norm, dtype=dtype))


def test_sibling_of_the_rope_with_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rope_backend.rope_write_kv
    monkeypatch.setattr(rope_backend, "rope_write_kv", lambda a, b, c, at, *rest: real(a, b, c, at + 1, *rest))
    assert not agree(rope_case(5, 2, 1, 16, 16))


def test_sibling_of_the_rope_with_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rope_backend.rope_write_kv
    monkeypatch.setattr(rope_backend, "rope_write_kv", lambda a, b, c, p, at, *rest: real(a, b, c, p, at ^ 1, *rest))
    assert not agree(rope_case(5, 2, 1, 16, 16))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, backend="triton")[0].shape == (0, 8)
    assert silu_mul(torch.empty(0, 8), backend="triton").shape == (0, 4)
    assert agree(rope_case(0, 2, 1, 16, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outer", "inner"), [(1, 33, 70), (17, 40, 64), (5, 7, 130)])
def test_product(rows: int, outer: int, inner: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, inner + 3, generator=g).to(dtype)
    x, weight = wide[:, :inner], torch.randn(outer, inner, generator=g).to(dtype)
    bias, base = torch.randn(outer, generator=g).to(dtype), torch.randn(rows, outer, generator=g).to(dtype)
    got = linear(x, weight, bias, base=base, backend="triton")
    exact = base.double() + x.double() @ weight.double().T + bias.double()
    bound = 3 * torch.finfo(dtype).eps * (exact.abs() + 8 + base.abs()) + inner * 2**-22
    assert bool(((got.double() - exact).abs() <= bound).all())
    alone = torch.cat([linear(x[i : i + 1], weight, bias, base=base[i : i + 1], backend="triton") for i in range(rows)])
    assert torch.equal(got, alone)
    assert not bool(((linear(x, weight, base=base, backend="triton").double() - exact).abs() <= bound).all())
