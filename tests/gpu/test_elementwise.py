"""Norm, gated activation and rope on a GPU against their references, and inside a captured graph."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.activation import silu_mul
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv

from tests.kernels.elementwise_cases import RopeCase, rope_case, within_a_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 7, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [64, 576, 3584, 8192, 20000])
def test_norm_equals_the_reference(features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(features)
    for rows in ROWS:
        x, residual = torch.randn(2, rows, features, device="cuda").to(dtype)
        weight = torch.randn(features, device="cuda").to(dtype)
        for add in (None, residual):
            out = torch.full_like(x, float("nan"))
            y, h = rms_norm(x, weight, 1e-6, residual=add, out=out)
            wanted, sums = rms_norm(x, weight, 1e-6, residual=add, backend="reference")
            assert y is out and within_a_step(y, wanted)
            assert torch.equal(h, sums)
        alone = rms_norm(x[:1], weight, 1e-6)[0]
        assert torch.equal(alone, rms_norm(x, weight, 1e-6)[0][:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [7, 1536, 18944])
def test_activation_equals_the_reference(features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(features)
    for rows in ROWS:
        gate_up = (4 * torch.randn(rows, 2 * features, device="cuda")).to(dtype)
        out = torch.full((rows, features), float("nan"), dtype=dtype, device="cuda")
        assert within_a_step(silu_mul(gate_up, out=out), silu_mul(gate_up, backend="reference"))


def agree(case: RopeCase, shift: int = 0) -> bool:
    ours, theirs = case.fresh(), case.fresh()
    args = list(ours.args())
    args[3] = args[3] + shift
    q = rope_write_kv(*args, q_norm=case.q_norm, k_norm=case.k_norm)  # type: ignore[arg-type]
    wanted = rope_write_kv(*theirs.args(), q_norm=case.q_norm, k_norm=case.k_norm, backend="reference")
    if case.qkv.dtype == torch.float32:
        return torch.allclose(q, wanted, atol=4e-6) and torch.allclose(ours.kv, theirs.kv, atol=4e-6)
    if case.q_norm is None:
        return torch.equal(q, wanted) and torch.equal(ours.kv, theirs.kv)
    # After a norm an input may be one step off, and the difference of two near-equal products keeps that step.
    step = 4 * torch.finfo(case.qkv.dtype).eps
    return float((q - wanted).abs().max()) < 8 * step and float((q == wanted).double().mean()) > 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "page"), [
    (28, 4, 128, 128, 16), (9, 3, 64, 64, 32), (32, 8, 80, 32, 64), (16, 4, 256, 64, 16), (8, 2, 96, 96, 12),
])
def test_rope_equals_the_reference(
    heads: int, kv_heads: int, dim: int, rotary: int, page: int, norm: bool, dtype: torch.dtype
) -> None:
    for rows in ROWS:
        case = rope_case(rows, heads, kv_heads, dim, rotary, page, norm=norm, dtype=dtype, device="cuda")
        assert agree(case)
        assert not agree(case, shift=-1 if int(case.positions.min()) else 1) or rows == 0


def test_graph_replays_with_new_inputs() -> None:
    case = rope_case(5, 28, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    x, weight = torch.randn(5, 4608, device="cuda").bfloat16(), torch.randn(4608, device="cuda").bfloat16()
    y, q = torch.empty_like(x), torch.empty(5, 28, 128, dtype=torch.bfloat16, device="cuda")
    half = torch.empty(5, 2304, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        rms_norm(x, weight, 1e-6, out=y)
        rope_write_kv(y, *case.args()[1:], q)
        silu_mul(y, out=half)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        x.normal_()
        case.positions.random_(0, 500)
        graph.replay()
        normed = rms_norm(x, weight, 1e-6, backend="triton")[0]
        assert torch.equal(y, normed) and torch.equal(half, silu_mul(normed))
        fresh = case.fresh()
        assert torch.equal(q, rope_write_kv(normed, *fresh.args()[1:]))
        assert torch.equal(fresh.kv, case.kv)
