"""The product of rows and weights: close to the exact one, and row by row the same bits."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.linear import linear
from torch import Tensor

# Every remainder of the register tile (6 x 4, 16 floats a vector), the chunks of rows, and shapes of real layers.
SHAPES = [(1, 1, 1), (3, 5, 7), (5, 9, 16), (6, 4, 17), (7, 3, 31), (13, 33, 48), (50, 6, 3000), (320, 10, 576)]


def inputs(rows: int, outer: int, inner: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows * 1009 + outer * 31 + inner)
    shapes = ((rows, inner), (outer, inner), (outer,), (rows, outer))
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_exact_to_fp32(shape: tuple[int, int, int], with_base: bool, with_bias: bool) -> None:
    """Against float64: at most twice the error bound of summing K products in 16 chains, and never worse than torch."""
    x, w, bias, base = inputs(*shape)
    b, r = (bias if with_bias else None), (base if with_base else None)
    exact = x.double() @ w.double().T + (bias.double() if with_bias else 0) + (base.double() if with_base else 0)
    size = x.double().abs() @ w.double().abs().T + 3
    for backend in ("cpp", "reference"):
        error = (linear(x, w, b, base=r, backend=backend) - exact).abs() / size
        assert error.max() < 2 * (shape[2] / 16 + 6) * 2**-24, backend


def rows_alone_equal(product: object, shape: tuple[int, int, int]) -> bool:
    x, w, bias, base = inputs(*shape)
    whole = product(x, w, bias, base=base)  # type: ignore[operator]
    splits = [range(i, i + 1) for i in range(len(x))] + [range(1, min(5, len(x))), range(len(x) // 2, len(x))]
    parts = ((s, product(x[s.start : s.stop], w, bias, base=base[s.start : s.stop])) for s in splits if len(s))  # type: ignore[operator]
    return all(torch.equal(part, whole[s.start : s.stop]) for s, part in parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_does_not_depend_on_its_batch(shape: tuple[int, int, int]) -> None:
    assert rows_alone_equal(linear, shape)


def test_row_check_sees_another_order_of_summation() -> None:
    def unsteady(x: Tensor, w: Tensor, bias: Tensor, *, base: Tensor) -> Tensor:
        half = x.shape[1] // 2 if len(x) > 1 else 0
        return base + ((x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T) + bias)

    assert not rows_alone_equal(unsteady, (13, 33, 48))


def test_threads_do_not_change_the_bits() -> None:
    x, w, bias, _ = inputs(20, 301, 100)
    before = torch.get_num_threads()
    results = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(linear(x, w, bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_strided_rows() -> None:
    x, w, _, base = inputs(7, 5, 12)
    wide, wide_base = torch.randn(7, 40), torch.randn(7, 9)
    wide[:, 20:32], wide_base[:, 2:7] = x, base
    assert torch.equal(linear(wide[:, 20:32], w, base=wide_base[:, 2:7]), linear(x, w, base=base))
    assert torch.equal(linear(x.T.contiguous().T, w), linear(x, w))


def test_no_rows() -> None:
    x, w, bias, _ = inputs(0, 5, 12)
    assert linear(x, w, bias).shape == (0, 5)


def test_non_finite_values_stay_in_their_row() -> None:
    x, w, _, _ = inputs(9, 6, 33)
    clean = linear(x, w)
    x[4, 32] = float("nan")
    dirty = linear(x, w)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[:4], clean[:4]) and torch.equal(dirty[5:], clean[5:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_take_torch(dtype: torch.dtype) -> None:
    x, w, bias, base = inputs(5, 6, 32, dtype)
    assert torch.equal(linear(x, w, bias, base=base), base + torch.nn.functional.linear(x, w, bias))
    with pytest.raises(ValueError, match="cpp"):
        linear(x, w, backend="cpp")


def test_wrong_arguments_are_refused() -> None:
    x, w, bias, base = inputs(5, 6, 32)
    for args, message in [
        ((x, w[:, :31].contiguous(), None, None), "weight: expected float32"),
        ((x, w.T.contiguous().T, None, None), "weight: expected contiguous"),
        ((x, w.double(), None, None), "weight"),
        ((x, w, bias[:5], None), "bias"),
        ((x, w, None, base[:4]), "base"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear(args[0], args[1], args[2], base=args[3])  # type: ignore[arg-type]
