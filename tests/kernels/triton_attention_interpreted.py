"""The attention kernels under Triton's interpreter. Not collected by itself: test_triton_attention.py runs it in a
process that has TRITON_INTERPRET=1 before triton is imported. Shapes are tiny: ~3.5 ms a program and key block."""

from __future__ import annotations

import itertools

import pytest
import torch
from tlt_kernels.attention import tree_attention
from tlt_kernels.reference.attention import tree_attention as reference
from tlt_kernels.triton import attention as host
from tlt_kernels.triton.attention import Geometry, Step, Tiling, TreeAttention

from tests.kernels.attention_cases import Case, make_case

# fp32: two sums of at most 300 products in another order. fp16: the weights are rounded to 2^-11 before P @ V.
BOUND = {torch.float32: 2e-5, torch.float16: 4e-3}
SMALL = Tiling(block_n=16, warps=4, stages=2, programs=1, min_blocks=1)


def planned(
    case: Case, window: int = 0, multiprocessors: int = 8, tiling: Tiling | None = SMALL
) -> tuple[TreeAttention, Step]:
    rows, heads, dim = case.q.shape
    _, page, kv_heads, _ = case.k_cache.shape
    attention = TreeAttention(
        Geometry(heads, kv_heads, dim, page, case.q.dtype, window), max_rows=rows,
        max_batch=len(case.step["prefix_lens"]), device="cpu", tiling=tiling, multiprocessors=multiprocessors,
    )
    return attention, attention.plan(**case.step)


def error(case: Case, window: int = 0, multiprocessors: int = 8, tiling: Tiling | None = SMALL) -> float:
    attention, step = planned(case, window, multiprocessors, tiling)
    out = torch.full_like(case.q, float("nan"))
    attention.run(step, case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)
    rows = int(case.step["node_indptr"][-1])
    expected = reference(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, window=window)
    assert bool(out[rows:].isnan().all()), "wrote rows of no request"
    assert bool(out[:rows].isfinite().all()), "read a slot of no request, or left a row unwritten"
    return float((out[:rows].float() - expected[:rows].float()).abs().max())


MIXED = [(0, 1, False), (37, 7, False), (64, 5, False), (20, 9, True), (0, 0, False), (63, 2, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page"), [
    (2, 2, 64, 16), (6, 2, 80, 16), (5, 1, 96, 32), (7, 1, 16, 64), (8, 1, 256, 12),
])
def test_ragged_step_equals_the_definition(
    heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype
) -> None:
    case = make_case(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype)
    assert error(case) < BOUND[dtype]


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 65])
def test_contexts_around_a_block(context: int) -> None:
    case = make_case([(context, 3, False)], heads=3, kv_heads=1, head_dim=16, page=16, seed=context)
    assert error(case) < BOUND[torch.float32]


@pytest.mark.parametrize("nodes", [63, 64, 65, 128])
def test_trees_over_both_ancestor_words(nodes: int) -> None:
    case = make_case([(30, nodes, False)], heads=1, kv_heads=1, head_dim=16, page=16, seed=nodes)
    assert error(case, multiprocessors=3) < BOUND[torch.float32]


def test_a_chunk_longer_than_a_tree() -> None:
    case = make_case([(21, 150, True), (5, 3, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    assert error(case, multiprocessors=16) < BOUND[torch.float32]


@pytest.mark.parametrize("window", [1, 8, 40])
def test_window_goes_by_position_not_by_index(window: int) -> None:
    case = make_case([(50, 24, False), (3, 5, False), (40, 40, True)], heads=2, kv_heads=1, head_dim=16, page=16)
    assert error(case, window=window) < BOUND[torch.float32]


def test_padded_rows_are_left_alone() -> None:
    case = make_case(MIXED, heads=2, kv_heads=1, head_dim=16, page=16, padding_rows=9)
    assert error(case) < BOUND[torch.float32]


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 40])
def test_any_number_of_splits(multiprocessors: int) -> None:
    case = make_case([(90, 4, False), (10, 1, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    assert error(case, multiprocessors=multiprocessors) < BOUND[torch.float32]


@pytest.mark.parametrize("block_m", [16, 128])
def test_default_tilings(block_m: int) -> None:
    rows = block_m // 2
    case = make_case([(70, rows, False)], heads=2, kv_heads=1, head_dim=16, page=16, dtype=torch.float16)
    assert error(case, tiling=None) < BOUND[torch.float16]


def test_the_schedule_covers_every_block_once_and_fits_its_slots() -> None:
    requests = [(300, 4, False), (0, 1, False), (1000, 40, False), (0, 0, False), (17, 90, True)]
    case = make_case(requests, heads=2, kv_heads=1, head_dim=16, page=16)
    for multiprocessors in (1, 20, 60):
        attention, step = planned(case, multiprocessors=multiprocessors)
        items = attention._items[: step.max_items].tolist()
        live = [item for item in items if item[4]]
        tiles = [tile for tile in attention._tiles[: step.max_tiles].tolist() if tile[4]]
        assert len(live) <= max(step.slots, len(tiles))
        assert sum(tile[1] for tile in tiles) == step.rows
        for first_row, nodes, first_item, stride, splits in (tile[:5] for tile in tiles):
            own = [items[first_item + i * stride] for i in range(splits)]
            b = own[0][0]
            prefix, n, causal = requests[b]
            first_node = first_row - int(step.node_indptr[b])
            seen = prefix + (first_node + nodes if causal else n)
            places = [(b, first_node, splits + (i << 16)) for i in range(splits)]
            assert [(item[0], item[1], item[4]) for item in own] == places
            assert own[0][2] == 0 and own[-1][3] == -(-seen // step.tiling.block_n)
            assert all(a[3] == c[2] for a, c in itertools.pairwise(own))


def test_a_second_step_in_the_same_workspace_leaves_nothing_behind() -> None:
    long = make_case([(200, 8, False), (90, 8, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    attention, step = planned(long, multiprocessors=30)
    attention.run(step, long.q, long.k_cache, long.v_cache, scale=long.scale)
    short = make_case([(9, 15, False), (0, 1, False)], heads=2, kv_heads=1, head_dim=16, page=16, seed=1)
    step = attention.plan(**short.step)
    out = attention.run(step, short.q, short.k_cache, short.v_cache, scale=short.scale)
    expected = reference(short.q, short.k_cache, short.v_cache, **short.step, scale=short.scale)
    assert float((out - expected).abs().max()) < BOUND[torch.float32]


def test_the_public_op_takes_it_as_a_backend() -> None:
    case = make_case(MIXED, heads=6, kv_heads=2, head_dim=16, page=16)
    out, wanted = (
        tree_attention(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, window=30, backend=backend)
        for backend in ("triton", "reference")
    )
    assert float((out - wanted).abs().max()) < BOUND[torch.float32]


# The bounds above can fail: each of these breaks one thing that a kernel could get wrong.


def test_sibling_breaks_ancestors() -> None:
    case = make_case([(30, 70, False)], heads=1, kv_heads=1, head_dim=16, page=16)
    attention, step = planned(case)
    expected = reference(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale)
    step.ancestors[69, 1] ^= 1 << 3
    out = attention.run(step, case.q, case.k_cache, case.v_cache, scale=case.scale)
    wrong = (out - expected).abs().amax((1, 2)) > BOUND[torch.float32]
    assert wrong.nonzero().flatten().tolist() == [69]


def test_sibling_breaks_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(90, 4, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    merge = host.merge_kernel

    class WithoutMaxima:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(tiles: object, parts: object, stats: torch.Tensor, *rest: object, **sizes: object) -> None:
                stats.view(-1, 2, sizes["BLOCK_M"])[:, 0] = 0.0  # type: ignore[call-overload]
                merge[grid](tiles, parts, stats, *rest, **sizes)

            return launch

    monkeypatch.setattr(host, "merge_kernel", WithoutMaxima())
    assert error(case) > 1e-3


def test_sibling_breaks_the_window() -> None:
    case = make_case([(50, 24, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    attention, step = planned(case, window=8)
    out = attention.run(step, case.q, case.k_cache, case.v_cache, scale=case.scale)
    off_by_one = reference(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, window=9)
    assert float((out - off_by_one).abs().max()) > 1e-3


def test_errors_name_what_was_wrong() -> None:
    with pytest.raises(ValueError, match=r"heads, kv_heads: expected .* got 7 and 2"):
        Geometry(7, 2, 64, 16, torch.float32)
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8 up to 256, got 100"):
        Geometry(2, 1, 100, 16, torch.float32)
    case = make_case(MIXED, heads=2, kv_heads=1, head_dim=16, page=16)
    attention, step = planned(case)
    with pytest.raises(ValueError, match="q, k_cache, v_cache: expected"):
        attention.run(step, case.q[:-1], case.k_cache, case.v_cache, scale=1.0)
    larger = make_case([*MIXED, (1, 1, False)], heads=2, kv_heads=1, head_dim=16, page=16)
    with pytest.raises(ValueError, match="rows, batch: expected at most 24 and 6, got 25 and 7"):
        attention.plan(**larger.step)
