"""The CUDA kernels of batch-invariant attention on the CPU (emulation/): bits, masks, orders and races, not speed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tlt_kernels.reference.attention import tree_attention as reference
from torch import Tensor

from tests.kernels.attention_cases import Case, each_row_alone, make_case
from tests.kernels.emulation.build import Emulated

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
BOUND = 4e-3


def use(emulated: Emulated, patch: pytest.MonkeyPatch) -> None:
    from tlt_kernels.triton import invariant_cuda

    patch.setattr(invariant_cuda, "extension", lambda: emulated)
    patch.setattr(invariant_cuda, "current_stream", lambda device: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(built: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    use(built, monkeypatch)
    yield built
    built.seed = 0


def run(case: Case, window: int = 0, part_bytes: int = 1 << 24, chunks: bool = True, height: int = 0) -> Tensor:
    """height: rows of a tile, in place of what the step's shape asks for."""
    from tlt_kernels.triton import invariant_cuda
    from tlt_kernels.triton.invariant_cuda import CudaInvariantAttention, Geometry

    rows, heads, dim = case.q.shape
    _, page, kv_heads, _ = case.k_cache.shape
    with pytest.MonkeyPatch.context() as patch:
        if height:
            patch.setattr(invariant_cuda, "tile_rows", lambda *_: height)
        attention = CudaInvariantAttention(
            Geometry(heads, kv_heads, dim, page, case.q.dtype, window), max_rows=rows,
            max_batch=len(case.step["prefix_lens"]), max_keys=case.step["page_table"].shape[1] * page, device="cpu",
            part_bytes=part_bytes,
        )
        for buffer in (attention._parts, attention._stats, attention._recent_parts, attention._recent_stats):
            buffer.fill_(float("nan"))
        attention._recent.fill_(2**30)
        out = torch.full_like(case.q, float("nan"))
        plan = attention.plan(**case.step, chunks=chunks)
        for _ in range(2):  # the second layer finds the counters as the first one did
            attention.run(plan, case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)
    return out


def case_of(requests: list[tuple[int, int, bool]], **changed: int) -> Case:
    sizes: dict[str, Any] = {"heads": 3, "kv_heads": 1, "head_dim": 64, "page": 16} | changed
    return make_case(requests, dtype=torch.float16, **sizes)


STEP = [(829, 5, False), (37, 2, False), (0, 3, False), (120, 20, True), (0, 0, False), (650, 1, False)]


def check(case: Case, **options: Any) -> Tensor:
    out = run(case, **options)
    wanted = reference(
        case.q.float(), case.k_cache, case.v_cache, **case.step, scale=case.scale, window=options.get("window", 0)
    )
    assert float((out.float() - wanted).abs().max()) < BOUND
    return out


@pytest.mark.parametrize(("sizes", "heights"), [
    ({}, (32, 64)), ({"head_dim": 128, "heads": 7}, (16,)), ({"heads": 4, "kv_heads": 2, "page": 32}, (16,)),
    ({"heads": 20}, (32,)),
], ids=str)
def test_tiles_of_every_height_and_plain_decoding_agree(
    sizes: dict[str, int], heights: tuple[int, ...], emulated: Emulated
) -> None:
    case = case_of(STEP, **sizes)
    out = check(case)
    rows = [0, 4, 6, 9, 10, 29, 30]
    assert torch.equal(run(each_row_alone(case, rows)), out[rows])
    for height in heights:
        assert torch.equal(run(case, height=height, chunks=False), out)
    assert torch.equal(run(case, part_bytes=0), out)


@pytest.mark.parametrize("window", [1, 50, 600])
def test_windows(window: int, emulated: Emulated) -> None:
    case = case_of([(1205, 3, False), (3, 3, False), (710, 20, True)])
    out = check(case, window=window)
    assert torch.equal(run(case, window=window, chunks=False, height=64), out)
    assert torch.equal(run(case, window=window, part_bytes=0), out)
    rows = [0, 2, 4, 6, 25]
    assert torch.equal(run(each_row_alone(case, rows), window=window), out[rows])


def test_chunks_at_any_border(emulated: Emulated) -> None:
    whole = case_of([(0, 700, True)], heads=1)
    out = check(whole)
    rows = [0, 63, 64, 127, 128, 191, 192, 640, 699]
    assert torch.equal(run(each_row_alone(whole, rows)), out[rows])
    for begin in (333, 690):  # the rest of the prompt as a chunk behind a committed prefix
        step = dict(whole.step)
        step["prefix_lens"] = torch.tensor([begin], dtype=torch.int32)
        step["node_indptr"] = torch.tensor([0, 700 - begin], dtype=torch.int32)
        step["positions"], step["ancestors"] = step["positions"][begin:], step["ancestors"][begin:].contiguous()
        chunk = Case(whole.q[begin:].contiguous(), whole.k_cache, whole.v_cache, step, whole.scale)
        assert torch.equal(run(chunk), out[begin:])


def test_contexts_around_every_border(emulated: Emulated) -> None:
    for context in (0, 15, 63, 126, 127, 190, 191, 638, 639):
        case = case_of([(context, 2, False)])
        assert torch.equal(run(each_row_alone(case, [0, 1])), check(case))


def test_a_wide_batch_has_all_its_requests(emulated: Emulated) -> None:
    case = case_of([(i % 7 * 40, 1, False) for i in range(70)], heads=1)
    out = check(case)
    assert torch.equal(run(each_row_alone(case, [0, 33, 69])), out[[0, 33, 69]])


def test_the_order_of_threads_changes_nothing(emulated: Emulated) -> None:
    case = case_of([(700, 2, False), (130, 20, True)], heads=3)
    for height in (16, 64):
        expected = run(case, height=height)
        for emulated.seed in (1, 2):
            assert torch.equal(run(case, height=height), expected)


BROKEN = {
    "a barrier less": {"        sync_group<kTeam>(wk);": "        "},
    "the border of another row": {"recent ? t + 1 : border_of(t);": "recent ? t + 1 : work.border;"},
}


@pytest.mark.parametrize("what", BROKEN)
def test_siblings_broken_kernels_are_seen(what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wide_heads = {"    case 128: return launch_all<T, 128>(s, plan, l, as_stream(stream));\n": ""}  # compiles faster
    use(Emulated(tmp_path, BROKEN[what] | wide_heads), monkeypatch)
    case = case_of([(828, 40, False)], heads=1)  # borders of 640 and 704 in one tile
    wanted = reference(case.q.float(), case.k_cache, case.v_cache, **case.step, scale=case.scale)
    out = run(case, height=64)
    near = float((out.float() - wanted).abs().max()) < BOUND
    rows = [0, 10, 20, 39]
    assert not (near and torch.equal(run(each_row_alone(case, rows), height=64), out[rows]))
