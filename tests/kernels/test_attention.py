"""tree_attention: the reference against dense attention on each root path, C++ against the reference, and the bits of
a row against everything that must not change them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_kernels import tree_attention
from torch import Tensor

# fp32: both sides sum at most 1728 products of unit normals in different orders; measured below 2e-6.
FP32_BOUND = 1e-5
SHAPES = st.tuples(st.sampled_from([16, 24, 64, 80]), st.integers(1, 2), st.sampled_from([1, 2, 3, 5, 7]))
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 600]), st.integers(1, 128), st.just(False)),
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 600]), st.integers(0, 150), st.just(True)),
    ),
    min_size=1, max_size=4,
)


def attend(case: Case, backend: str, window: int = 0, **changed: Tensor) -> Tensor:
    return tree_attention(
        case.q, case.k_cache, case.v_cache, **{**case.step, **changed}, scale=case.scale, window=window, backend=backend
    )


def keys_of(case: Case, b: int) -> list[int]:
    """Flat slots of a request's logical slots."""
    page = case.k_cache.shape[1]
    return [int(p) * page + o for p in case.step["page_table"][b] for o in range(page)]


def node_by_node(case: Case, window: int) -> Tensor:
    """Each row alone, in float64: its visible keys as a list, one dense softmax per head."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    k, v = (cache.flatten(0, 1).double() for cache in (case.k_cache, case.v_cache))
    group = case.q.shape[1] // k.shape[1]
    bounds = case.step["node_indptr"].tolist()
    for b, prefix in enumerate(case.step["prefix_lens"].tolist()):
        slots = keys_of(case, b)
        for row in range(bounds[b], bounds[b + 1]):
            own = int(case.step["positions"][row])
            words = [int(w) % 2**64 for w in case.step["ancestors"][row]]
            local = range(row - bounds[b] + 1) if case.step["causal"][b] else range(bounds[b + 1] - bounds[b])
            seen = [(slots[t], t) for t in range(prefix)] + [
                (slots[prefix + j], int(case.step["positions"][bounds[b] + j])) for j in local
                if case.step["causal"][b] or words[j // 64] >> (j % 64) & 1
            ]
            picked = [slot for slot, position in seen if window == 0 or position > own - window]
            for head in range(case.q.shape[1]):
                scores = k[picked, head // group] @ case.q[row, head].double() * case.scale
                out[row, head] = scores.softmax(0) @ v[picked, head // group]
    return out


@pytest.mark.parametrize("window", [0, 1, 8, 40])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_each_node_attends_to_its_root_path(backend: str, window: int) -> None:
    requests = [(20, 12, False), (0, 1, False), (70, 9, True), (3, 70, False)]
    case = make_case(requests, heads=6, kv_heads=2, head_dim=16, page=4)
    assert (attend(case, backend, window) - node_by_node(case, window)).abs().max() < FP32_BOUND


@settings(max_examples=60, deadline=None)
@given(REQUESTS, SHAPES, st.sampled_from([1, 4, 16]), st.sampled_from([0, 0, 1, 8, 100]), st.integers(0, 2**31))
def test_cpp_matches_the_reference(
    requests: list[tuple[int, int, bool]], shape: tuple[int, int, int], page: int, window: int, seed: int
) -> None:
    dim, kv_heads, group = shape
    case = make_case(requests, heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim, page=page, seed=seed)
    want, got = attend(case, "reference", window), attend(case, "cpp", window)
    assert got.shape == want.shape
    assert bool(((got - want).abs() < FP32_BOUND).all())


def plain_half(case: Case) -> Tensor:
    """Attention as a low-precision implementation without care would do it: every tensor in the half type."""
    group = case.q.shape[1] // case.k_cache.shape[2]
    n = int(case.step["node_indptr"][1])
    slots = keys_of(case, 0)[: int(case.step["prefix_lens"][0]) + n]
    k, v = (cache.flatten(0, 1)[slots].repeat_interleave(group, 1) for cache in (case.k_cache, case.v_cache))
    mask = torch.ones(n, len(slots), dtype=torch.bool).tril(len(slots) - n)
    scores = torch.einsum("qhd,khd->hqk", case.q, k) * case.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 80])
def test_half_types_stay_within_twice_the_error_of_a_plain_implementation(dtype: torch.dtype, dim: int) -> None:
    case = make_case([(200, 40, True)], heads=6, kv_heads=2, head_dim=dim, page=16, dtype=dtype)
    exact = node_by_node(case, 0)
    allowed = 2 * (plain_half(case).double() - exact).abs().max()
    assert (attend(case, "cpp").double() - exact).abs().max() <= allowed
    assert (attend(case, "reference").double() - exact).abs().max() <= allowed


@settings(max_examples=25, deadline=None)
@given(REQUESTS, SHAPES, st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([0, 8]))
def test_half_types_match_the_reference(
    requests: list[tuple[int, int, bool]], shape: tuple[int, int, int], dtype: torch.dtype, window: int
) -> None:
    dim, kv_heads, group = shape
    case = make_case(requests, heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim, page=4, dtype=dtype)
    want, got = attend(case, "reference", window).float(), attend(case, "cpp", window).float()
    step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10  # one rounding of the result, either way
    assert bool(((got - want).abs() <= step * want.abs() + FP32_BOUND).all())


def one_request(case: Case, b: int, rows: slice | None = None) -> dict[str, Tensor]:
    """Arguments of a step that holds only request b, or only some of its rows with the earlier ones committed."""
    start, end = case.step["node_indptr"][b : b + 2].tolist()
    rows = rows or slice(0, end - start)
    picked = slice(start + rows.start, start + rows.stop)
    step = {name: case.step[name][b : b + 1] for name in ("page_table", "causal")}
    return step | {
        "q": case.q[picked], "ancestors": case.step["ancestors"][picked], "positions": case.step["positions"][picked],
        "prefix_lens": case.step["prefix_lens"][b : b + 1] + rows.start,
        "node_indptr": torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
    }


def run(case: Case, arguments: dict[str, Tensor], window: int = 0) -> Tensor:
    return tree_attention(
        k_cache=case.k_cache, v_cache=case.v_cache, scale=case.scale, window=window, backend="cpp", **arguments
    )


MIXED = [(100, 12, False), (64, 1, False), (0, 90, True), (333, 40, True), (7, 128, False), (1, 1, False)]


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 24), (7, 1, 80)])
def test_bits_do_not_depend_on_the_batch(heads: tuple[int, int, int], window: int) -> None:
    case = make_case(MIXED, heads=heads[0], kv_heads=heads[1], head_dim=heads[2], page=16)
    together = attend(case, "cpp", window)
    bounds = case.step["node_indptr"].tolist()
    for b in range(len(MIXED)):
        assert torch.equal(run(case, one_request(case, b), window), together[bounds[b] : bounds[b + 1]]), b


def test_bits_do_not_depend_on_threads() -> None:
    case = make_case(MIXED, heads=9, kv_heads=3, head_dim=64, page=16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(case, "cpp")
        torch.set_num_threads(4)
        for _ in range(5):
            assert torch.equal(attend(case, "cpp"), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 50])
def test_bits_do_not_depend_on_chunking(window: int) -> None:
    case = make_case([(5, 150, True)], heads=6, kv_heads=2, head_dim=64, page=16)
    whole = attend(case, "cpp", window)
    for cut in (1, 59, 64, 149):
        parts = [run(case, one_request(case, 0, rows), window) for rows in (slice(0, cut), slice(cut, 150))]
        assert torch.equal(torch.cat(parts), whole), cut


@pytest.mark.parametrize("window", [0, 6, 100])
@pytest.mark.parametrize("prefix", [0, 60, 129])
def test_a_tree_node_has_the_bits_of_plain_decoding_on_its_root_path(prefix: int, window: int) -> None:
    """The keys of a path, compacted as commit_kv would, then one row alone: what speculation off computes."""
    case = make_case([(prefix, 20, False)], heads=9, kv_heads=3, head_dim=64, page=4, seed=prefix)
    tree = attend(case, "cpp", window)
    slots = keys_of(case, 0)
    for node in range(20):
        path = [j for j in range(20) if int(case.step["ancestors"][node, 0]) >> j & 1]
        plain = replace(case, k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
        for cache, source in ((plain.k_cache, case.k_cache), (plain.v_cache, case.v_cache)):
            moved = source.flatten(0, 1)[[slots[prefix + j] for j in path]]
            cache.view(-1, *cache.shape[2:])[slots[prefix : prefix + len(path)]] = moved
        arguments = one_request(case, 0, slice(node, node + 1)) | {
            "prefix_lens": torch.tensor([prefix + len(path) - 1], dtype=torch.int32),
            "ancestors": torch.tensor([[1, 0]]),
        }
        assert torch.equal(run(plain, arguments, window), tree[node : node + 1]), node


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_sabotage_a_wrong_ancestor_word_is_caught(backend: str) -> None:
    case = make_case([(20, 70, False)], heads=6, kv_heads=2, head_dim=16, page=4)
    right = node_by_node(case, 0)
    for row, word, bit in ((5, 0, 2), (69, 1, 3), (69, 0, 63)):
        wrong = case.step["ancestors"].clone()
        wrong[row, word] ^= torch.tensor(1 << bit if bit < 63 else -(2**63))
        off = (attend(case, backend, ancestors=wrong) - right).abs().amax((1, 2))
        assert off[row] > 100 * FP32_BOUND
        assert off.sum() - off[row] < len(off) * FP32_BOUND


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_sabotage_a_window_by_flat_index_is_caught(backend: str) -> None:
    """Siblings stand at one position: counting them as successive ones must show."""
    case = make_case([(20, 12, False)], heads=6, kv_heads=2, head_dim=16, page=4)
    flat = 20 + torch.arange(12)
    assert not torch.equal(flat, case.step["positions"])
    assert (attend(case, backend, 8, positions=flat) - node_by_node(case, 8)).abs().max() > 100 * FP32_BOUND


def test_views_and_out() -> None:
    case = make_case(MIXED[:3], heads=6, kv_heads=2, head_dim=24, page=4)
    want = attend(case, "cpp")
    wide = torch.cat([case.q.flatten(1), torch.zeros(len(case.q), 50)], 1)
    strided_q = wide[:, : 6 * 24].unflatten(1, (6, 24))
    both = torch.stack([case.k_cache, case.v_cache], 3)  # [P, page, Hkv, 2, D]: every outer stride is unusual
    out = torch.full_like(case.q, float("nan"))
    got = tree_attention(
        strided_q, both[:, :, :, 0], both[:, :, :, 1], **case.step, scale=case.scale, out=out, backend="cpp"
    )
    assert got is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_no_rows(backend: str) -> None:
    case = make_case([(5, 0, True)], heads=4, kv_heads=2, head_dim=16, page=4)
    assert attend(case, backend).shape == (0, 4, 16)


def test_a_nan_key_spoils_only_the_rows_that_see_it() -> None:
    case = make_case([(100, 2, False), (40, 5, True)], heads=4, kv_heads=2, head_dim=16, page=4)
    case.k_cache.view(-1, 2, 16)[keys_of(case, 1)[42]] = float("nan")
    got = attend(case, "cpp")
    assert got[:4].isfinite().all()
    assert got[4:].isnan().all()


def test_errors_name_what_is_wrong() -> None:
    case = make_case([(5, 3, False), (0, 2, True)], heads=4, kv_heads=2, head_dim=16, page=4)
    table = case.step["page_table"].clone()
    table[1, 0] = 99
    for changed, said in (
        ({"page_table": table}, "page_table: expected pages in"),
        ({"page_table": case.step["page_table"][:, :1].contiguous()}, "page_table: expected 2 pages, got 1"),
        ({"prefix_lens": case.step["prefix_lens"].long()}, "cast with .int()"),
        ({"node_indptr": torch.tensor([0, 3, 4], dtype=torch.int32)}, "node_indptr"),
        ({"causal": torch.zeros(1, dtype=torch.uint8)}, "causal: expected uint8"),
    ):
        with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
            attend(case, "cpp", **changed)
    with pytest.raises(ValueError, match="positions: expected prefix_len"):
        attend(case, "cpp", 4, positions=case.step["positions"] + 1)
    chain = make_case([(0, 129, True)], heads=1, kv_heads=1, head_dim=16, page=4)
    with pytest.raises(ValueError, match="at most 128 nodes"):
        attend(chain, "cpp", causal=torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="Hkv a divisor"):
        tree_attention(case.q[:, :3].contiguous(), case.k_cache, case.v_cache, **case.step, scale=1.0)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_the_narrower_kernels(isa: str) -> None:
    """The same comparisons with the kernel held to fewer vector lanes; the choice is read once a process."""
    if "TLT_CPU_ISA" in os.environ:
        pytest.skip("already inside one of these")
    picked = "matches_the_reference or root_path or chunking or match_the_reference"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, "-k", picked]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, env=clean | {"TLT_CPU_ISA": isa}, capture_output=True, text=True, timeout=250,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout
