"""Products on a GPU: near the exact ones, each row the same bits for any number of rows, whole under overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.activation import silu_mul
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

HALF = [torch.bfloat16, torch.float16]
# Whole and broken tiles and steps of 128, fewer stages than multiprocessors, one worker to many tiles, many to one.
SHAPES = [
    (8, 8), (128, 128), (2, 136), (576, 576), (960, 576), (300, 4096), (4608, 3584), (3584, 3584), (3584, 18944),
    (37888, 3584), (9000, 896),
]
ROWS = [1, 2, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 256, 257, 600]


def inputs(rows: int, outer: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rows * 31 + outer + inner)
    shapes = ((rows, inner), (outer, inner), (outer,), (rows, outer))
    x, weight, bias, base = (torch.randn(s, device="cuda") for s in shapes)
    return [t.to(dtype) for t in (x, weight * inner**-0.5, bias, base)]


def poisoned(rows: int, outer: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, outer), float("nan"), dtype=dtype, device="cuda")


def distance(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_as_near_as_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    outer, inner = shape
    for rows in ROWS:
        x, weight, bias, base = inputs(rows, outer, inner, dtype)
        exact = x.double() @ weight.double().T
        for b, r in ((None, None), (bias, None), (None, base), (bias, base)):
            wanted = exact + (0 if b is None else b.double()) + (0 if r is None else r.double())
            plain = linear(x, weight, b, base=r, backend="reference")
            got = linear(x, weight, b, base=r, out=poisoned(rows, outer, dtype), backend="cuda")
            assert distance(got, wanted) <= 1.2 * distance(plain, wanted) + 1e-7, (rows, b is None, r is None)
            elements = (got.double() - wanted).abs() / (wanted.abs() + 1)
            assert float(elements.max()) < 4 * torch.finfo(dtype).eps, (rows, b is None, r is None)
        assert distance(got, exact + bias.double()) > 0.1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("outer", "inner"), [(256, 128), (3072, 576), (37888, 3584), (200, 264)])
def test_gated_activation_is_fused(outer: int, inner: int, dtype: torch.dtype) -> None:
    for rows in (1, 8, 16, 32, 64, 200):
        x, weight, bias, _ = inputs(rows, outer, inner, dtype)
        for b in (None, bias):
            got = linear(x, weight, b, silu_mul=True, out=poisoned(rows, outer // 2, dtype), backend="cuda")
            wanted = silu_mul(linear(x, weight, b, backend="reference"))
            elements = (got.float() - wanted.float()).abs() / (wanted.float().abs() + 1)
            assert float(elements.max()) < 8 * torch.finfo(dtype).eps
            assert distance(got, wanted.double()) < 2 * torch.finfo(dtype).eps
        assert distance(got, silu_mul(linear(-x, weight, bias)).double()) > 0.1


Product = Callable[[Tensor, Tensor], Tensor]


def odd_rows(product: Product, outer: int, inner: int, dtype: torch.dtype) -> Iterator[int]:
    """Row counts in 1 .. 256 whose rows differ from the same rows among 256."""
    x, weight, _, _ = inputs(256, outer, inner, dtype)
    whole = product(x, weight)
    for rows in range(1, 257):
        start = (rows * 37) % (257 - rows)  # rows change their place in a tile too
        if not torch.equal(product(x[start : start + rows].contiguous(), weight), whole[start : start + rows]):
            yield rows


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize(("outer", "inner"), [(4608, 3584), (3584, 18944), (37888, 3584), (960, 576)])
def test_row_has_the_same_bits_among_any(outer: int, inner: int, silu: bool) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, silu_mul=silu, invariant=True)

    assert list(odd_rows(product, outer, inner, torch.bfloat16)) == []
    for rows in (300, 1000):
        x, weight, _, _ = inputs(rows, outer, inner, torch.bfloat16)
        whole = product(x, weight)
        assert torch.equal(whole[-3:], product(x[-3:], weight))


def test_row_check_sees_a_deal_that_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cuda._processor_count(torch.device("cuda"))

    def by_size(x: Tensor, weight: Tensor) -> Tensor:
        monkeypatch.setattr(cuda, "_processor_count", lambda device: whole - len(x) % 2)
        return linear(x, weight, backend="cuda")

    assert len(list(odd_rows(by_size, 4608, 3584, torch.bfloat16))) == 128


def test_fp32_is_invariant_too() -> None:
    x, weight, bias, base = inputs(70, 200, 300, torch.float32)
    whole = linear(x, weight, bias, base=base, invariant=True)
    exact = base.double() + x.double() @ weight.double().T + bias.double()
    assert float((whole - exact).abs().max()) < 1e-5
    for rows in (1, 2, 16, 17, 33):
        assert torch.equal(whole[:rows], linear(x[:rows], weight, bias, base=base[:rows], invariant=True))


def test_strides_and_sums_in_place() -> None:
    x, weight, bias, base = inputs(5, 384, 512, torch.bfloat16)
    wanted = linear(x, weight, bias, base=base, backend="cuda")
    wide, wide_base = torch.randn(5, 1024, device="cuda").bfloat16(), torch.randn(5, 500, device="cuda").bfloat16()
    wide[:, 256:768], wide_base[:, 3:387] = x, base
    assert torch.equal(linear(wide[:, 256:768], weight, bias, base=wide_base[:, 3:387], backend="cuda"), wanted)
    wide[:, 3:515] = x
    assert torch.equal(linear(wide[:, 3:515], weight, bias, base=base, backend="cuda"), wanted)
    assert torch.equal(linear(x, weight, bias, base=base, out=base, backend="cuda"), wanted)
    assert torch.equal(base, wanted)
    assert linear(x[:0], weight, bias, backend="cuda").shape == (0, 384)


class Chain:
    """Layers of products that feed each other, with norms between: what overlap could tear apart."""

    def __init__(self, rows: int, layers: int) -> None:
        torch.manual_seed(rows)
        sizes = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
        self.layers = [
            [torch.randn(s, device="cuda").mul_(s[1] ** -0.5).bfloat16() for s in sizes] for _ in range(layers)
        ]
        self.norm = torch.ones(3584, device="cuda").bfloat16()
        self.x = torch.randn(rows, 3584, device="cuda").bfloat16()

    def run(self, between: Callable[[], object]) -> Tensor:
        x = self.x
        for qkv, o, gate_up, down in self.layers:
            y = linear(rms_norm(x, self.norm, 1e-6)[0], qkv, invariant=True)
            between()
            x = linear(y[:, :3584], o, base=x, invariant=True)
            between()
            y = linear(rms_norm(x, self.norm, 1e-6)[0], gate_up, silu_mul=True, invariant=True)
            between()
            x = linear(y, down, base=x, invariant=True)
            between()
        return x


@pytest.mark.parametrize("rows", [1, 13, 64, 130])
def test_overlap_and_graphs_change_nothing(rows: int) -> None:
    chain = Chain(rows, 4)
    wanted = chain.run(torch.cuda.synchronize).clone()
    assert bool(wanted.isfinite().all())
    for _ in range(10):
        assert torch.equal(chain.run(lambda: None), wanted)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain.run(lambda: None)
    with torch.cuda.graph(graph, stream=stream):
        out = chain.run(lambda: None)
    first = chain.x.clone()
    for _ in range(10):
        chain.x.normal_()
        graph.replay()
        other = out.clone()
        chain.x.copy_(first)
        graph.replay()
        assert torch.equal(out, wanted) and not torch.equal(other, wanted)


def test_errors_teach() -> None:
    x, weight, _, base = inputs(4, 32, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="silu_mul: expected no base"):
        linear(x, weight, base=base, silu_mul=True)
    with pytest.raises(ValueError, match="linear: backend"):
        linear(x.float(), weight.float(), backend="cuda")
    with pytest.raises(ValueError, match="linear: backend"):
        linear(x, weight, invariant=True, backend="reference")
