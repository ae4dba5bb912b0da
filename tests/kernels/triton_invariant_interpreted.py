"""Batch-invariant attention under Triton's interpreter: bits, not bounds. Not collected by itself, as its neighbour
triton_attention_interpreted.py, which tests the schedule that both use."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.attention import tree_attention
from tlt_kernels.reference.attention import tree_attention as reference
from tlt_kernels.triton.invariant import Geometry, InvariantAttention
from torch import Tensor

from tests.kernels.attention_cases import Case, each_row_alone, make_case, paths

BOUND = {torch.float32: 2e-5, torch.float16: 4e-3}


def run(case: Case, window: int = 0, part_bytes: int = 1 << 30) -> Tensor:
    rows, heads, dim = case.q.shape
    _, page, kv_heads, _ = case.k_cache.shape
    keys = case.step["page_table"].shape[1] * page
    attention = InvariantAttention(
        Geometry(heads, kv_heads, dim, page, case.q.dtype, window), max_rows=rows,
        max_batch=len(case.step["prefix_lens"]), max_keys=keys, device="cpu", multiprocessors=4, part_bytes=part_bytes,
    )
    out = torch.full_like(case.q, float("nan"))
    return attention.run(attention.plan(**case.step), case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)


def small(requests: list[tuple[int, int, bool]], dtype: torch.dtype = torch.float16, **changed: int) -> Case:
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 16, "page": 16} | changed
    return make_case(requests, dtype=dtype, **sizes)


STEP = [(1190, 12, False), (37, 9, False), (0, 5, False), (120, 30, True), (0, 0, False), (700, 40, False)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equals_the_definition(dtype: torch.dtype) -> None:
    case = small(STEP[1:], dtype, heads=4, kv_heads=2)
    expected = reference(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale)
    assert float((run(case) - expected).abs().max()) < BOUND[dtype]


@pytest.mark.parametrize("window", [1, 50, 600])
def test_windows_equal_the_definition(window: int) -> None:
    case = small([(900, 9, False), (3, 3, False), (150, 40, True)])
    expected = reference(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, window=window)
    assert float((run(case, window) - expected).abs().max()) < BOUND[torch.float16]
    rows = [0, 5, 8, 9, 40]
    assert torch.equal(run(each_row_alone(case, rows), window), run(case, window)[rows])


@pytest.mark.parametrize("part_bytes", [0, 1 << 30], ids=["folded", "split"])
def test_a_node_of_a_tree_has_the_bits_of_plain_decoding(part_bytes: int) -> None:
    case = small(STEP)
    rows = [*range(0, 12), 12, 20, 21, 25, 26, 40, 55, 56, 70, 95]
    assert torch.equal(run(each_row_alone(case, rows)), run(case, part_bytes=part_bytes)[rows])


def test_contexts_around_every_border() -> None:
    """The first and the last position of a 64-key step of the border, of a split, of 128."""
    for context in (0, 63, 127, 128, 190, 191, 192, 639, 640, 704):
        case = small([(context, 3, False)])
        assert torch.equal(run(each_row_alone(case, [0, 1, 2])), run(case))


def test_chunks_and_prefix_hits_change_no_bit() -> None:
    whole = small([(0, 210, True)])
    rows = [0, 1, 63, 64, 127, 128, 129, 191, 192, 193, 209]
    out = run(whole)
    assert torch.equal(run(each_row_alone(whole, rows)), out[rows])
    for begin in (64, 100, 205):  # the rest of the prompt as a chunk behind a committed prefix
        step = dict(whole.step)
        step["prefix_lens"] = torch.tensor([begin], dtype=torch.int32)
        step["node_indptr"] = torch.tensor([0, 210 - begin], dtype=torch.int32)
        step["positions"], step["ancestors"] = step["positions"][begin:], step["ancestors"][begin:].contiguous()
        chunk = Case(whole.q[begin:].contiguous(), whole.k_cache, whole.v_cache, step, whole.scale)
        assert torch.equal(run(chunk), out[begin:])


def test_the_public_op_offers_it() -> None:
    case = small([(300, 5, False)])
    out = tree_attention(
        case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, invariant=True, backend="triton"
    )
    assert torch.equal(out, run(case))
    with pytest.raises(ValueError, match="invariant: expected a backend whose bits are fixed"):
        tree_attention(
            case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, invariant=True, backend="reference"
        )


def test_sibling_the_default_kernels_do_not_pass() -> None:
    case = small([(700, 12, False)])
    rows = list(range(12))
    alone = each_row_alone(case, rows)
    ours, theirs = (
        tree_attention(c.q, c.k_cache, c.v_cache, **c.step, scale=c.scale, backend="triton") for c in (alone, case)
    )
    assert not torch.equal(ours, theirs)


def test_sibling_a_key_out_of_path_order_is_seen() -> None:
    """Two ancestors' keys and values change places: the same set of keys, another order, other bits."""
    case = small([(150, 60, False)], dtype=torch.float32)
    row, slots = max(enumerate(slots for _, slots in paths(case)), key=lambda found: len(found[1]))
    alone = each_row_alone(case, [row])
    assert torch.equal(run(alone), run(case)[[row]])
    swapped = Case(alone.q, alone.k_cache.clone(), alone.v_cache.clone(), alone.step, alone.scale)
    pages = alone.step["page_table"][0]
    first, second = ((int(pages[at // 16]), at % 16) for at in (len(slots) - 3, len(slots) - 2 - 16))
    for cache, source in ((swapped.k_cache, alone.k_cache), (swapped.v_cache, alone.v_cache)):
        cache[first], cache[second] = source[second], source[first]
    assert not torch.equal(run(swapped), run(alone))


def test_errors_name_what_was_wrong() -> None:
    case = small([(30, 3, False)])
    attention = InvariantAttention(
        Geometry(3, 1, 16, 16, torch.float16), max_rows=2, max_batch=1, max_keys=64, device="cpu", multiprocessors=4
    )
    with pytest.raises(ValueError, match="rows, batch: expected at most 2 and 1, got 3 and 1"):
        attention.plan(**case.step)
