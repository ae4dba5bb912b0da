"""FlashInfer's arguments for a step's chunks, on a fake that computes what they say (FlashInfer itself needs a GPU)."""

from __future__ import annotations

import subprocess
import sys

import fake_flashinfer
import pytest
import torch
from attention_cases import Case, make_case
from tlt_kernels import flashinfer_prefill
from tlt_kernels.attention import tree_attention
from tlt_kernels.flashinfer_prefill import ChunkAttention, ChunkShape

CHUNKS = [(0, 5, True), (17, 1, True), (32, 32, True), (3, 40, True), (15, 1, True)]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)


def case_of(dtype: torch.dtype = torch.bfloat16) -> Case:
    return make_case(CHUNKS, heads=6, kv_heads=2, head_dim=64, page=16, dtype=dtype)


def made(case: Case, windows: tuple[int, ...] = (0,)) -> ChunkAttention:
    return ChunkAttention(ChunkShape(6, 2, 64, 16, case.q.dtype), windows=windows, scale=case.scale, device="cpu")


def run(case: Case, attention: ChunkAttention, window: int, *, first: int = 0) -> torch.Tensor:
    """first: requests in front, which our own kernels would take."""
    step = case.step
    attention.plan(step["prefix_lens"][first:], step["node_indptr"][first:], step["page_table"][first:])
    row = int(step["node_indptr"][first])
    out = torch.full_like(case.q, float("nan"))
    attention.run(window, case.q[row:], case.k_cache, case.v_cache, out=out[row:])
    assert out[:row].isnan().all()
    return out[row:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 7, 33])
@pytest.mark.parametrize("first", [0, 2])
def test_chunks_equal_the_reference(dtype: torch.dtype, window: int, first: int) -> None:
    case = case_of(dtype)
    expected = tree_attention(
        case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale, window=window, backend="reference"
    )
    row = int(case.step["node_indptr"][first])
    out = run(case, made(case, (0, window)), window, first=first)
    torch.testing.assert_close(out.float(), expected[row:].float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("fault", ["window", "last page", "row"])
def test_a_wrong_argument_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan

    def wrong(self, rows, starts, pages, last, **options):
        if fault == "window":
            options["window_left"] += 1
        if fault == "last page":
            last = (last % 16) + 1
        if fault == "row":
            pages = pages.roll(1)
        honest(self, rows, starts, pages, last, **options)

    case = case_of()
    expected = run(case, made(case, (7,)), 7)
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", wrong)
    out = run(case, made(case, (7,)), 7)
    assert not torch.allclose(out.float(), expected.float(), atol=2e-2)


def test_one_plan_a_window_and_step_serves_all_layers() -> None:
    case = case_of()
    attention = made(case, (0, 7, 0))
    counter = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper
    before = counter.plans
    run(case, attention, 0)
    assert counter.plans - before == 2
    for window in (0, 7, 0):
        attention.run(window, case.q, case.k_cache, case.v_cache, out=torch.empty_like(case.q))
    assert counter.plans - before == 2


def test_stale_entries_of_the_page_table_are_left_out() -> None:
    case = case_of()
    expected = run(case, made(case), 0)
    held = -(-(case.step["prefix_lens"] + case.step["node_indptr"].diff()) // 16)
    stale = torch.arange(case.step["page_table"].shape[1]) >= held[:, None]
    case.step["page_table"][stale] = 10**6
    assert torch.equal(run(case, made(case), 0), expected)


def test_what_it_lacks_is_said() -> None:
    assert ChunkShape(6, 2, 64, 16, torch.bfloat16).unsupported is None
    with pytest.raises(ValueError, match="not float32; use"):
        made(case_of(torch.float32))
    with pytest.raises(ValueError, match="heads of 64, 128, 256, not 80"):
        ChunkAttention(ChunkShape(6, 2, 80, 16, torch.bfloat16), windows=(0,), scale=1.0, device="cpu")


def test_workspace_bytes_grow_with_the_windows() -> None:
    one, two = made(case_of()).workspace_bytes, made(case_of(), (0, 7)).workspace_bytes
    assert two - one == 8 << 20 and one > 128 << 20


def test_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flashinfer_prefill.installed()
    fake_flashinfer.remove(monkeypatch)
    assert not flashinfer_prefill.installed()
    code = "import sys, tlt_kernels.flashinfer_prefill as f; f.installed(); sys.exit('flashinfer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
