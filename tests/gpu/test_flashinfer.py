"""Prompt chunks through FlashInfer on a GPU: our kernel's results within rounding, and the engine's tokens.

Needs flashinfer-python, which compiles a kernel for each dtype, head size and windowed or not: one of each here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tlt_kernels.flashinfer_prefill import ChunkAttention, ChunkShape, installed
from tlt_kernels.reference.attention import tree_attention as reference

from tests.engine.engines import OFF, greedy, tiny_engine
from tests.kernels.attention_cases import Case, make_case
from tlt_engine import RolloutEngine, SamplingParams
from tlt_engine.engine.equality import compare_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and installed()), reason="needs a CUDA device and FlashInfer"),
]
CHUNKS = [(0, 200, True), (17, 1, True), (1000, 65, True), (3, 128, True), (4095, 1, True), (2000, 300, True)]
HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
BOUND = 2e-2  # bf16: half an ulp of outputs up to 4, and the rounding of the weights


def case_on_gpu(page: int = 16) -> Case:
    return make_case(CHUNKS, heads=28, kv_heads=4, head_dim=128, page=page, dtype=torch.bfloat16).to("cuda")


def chunks_of(case: Case, window: int, plan_window: int | None = None, page: int = 16) -> torch.Tensor:
    shape = ChunkShape(28, 4, 128, page, torch.bfloat16)
    planned = window if plan_window is None else plan_window
    attention = ChunkAttention(shape, windows=(planned,), scale=case.scale, device="cuda")
    host = {name: case.step[name].cpu() for name in ("prefix_lens", "node_indptr", "page_table")}
    attention.plan(**host)
    out = torch.full_like(case.q, float("nan"))
    return attention.run(planned, case.q, case.k_cache, case.v_cache, out=out)


def wanted(case: Case, window: int) -> torch.Tensor:
    with torch.device("cuda"):
        return reference(case.q.float(), case.k_cache, case.v_cache, **case.step, scale=case.scale, window=window)


@pytest.mark.parametrize("page", [16, 64])
def test_chunks_equal_our_kernel_and_the_definition(page: int) -> None:
    from tlt_kernels.triton.attention import tree_attention

    case = case_on_gpu(page)
    out, exact = chunks_of(case, 0, page=page).float(), wanted(case, 0)
    ours = tree_attention(case.q, case.k_cache, case.v_cache, **case.step, scale=case.scale).float()
    assert bool(out.isfinite().all()), "read a slot of no request, or left a row unwritten"
    error = (out - exact).abs().max()
    assert error < BOUND and error < 2 * (ours - exact).abs().max() + 1e-3
    assert (out - ours).abs().max() < BOUND


def test_windows() -> None:
    case = case_on_gpu()
    for window in (1, 40, 700):
        assert (chunks_of(case, window).float() - wanted(case, window)).abs().max() < BOUND
    assert (chunks_of(case, 41).float() - wanted(case, 40)).abs().max() > BOUND  # the bound sees one key more


def engine_with(prefill_backend: str, **config: Any) -> RolloutEngine:
    return tiny_engine(
        model=HEADS, dtype="bfloat16", device="cuda", prefill_backend=prefill_backend, page_size=16, speculation=OFF,
        max_num_batched_tokens=64, max_model_len=256, **config,
    )


def test_tokens_of_an_engine_with_our_kernel() -> None:
    """Chunks of 64 beside decodes. Roundings of bf16 differ, so a token may flip where two scores lie within 0.1."""
    prompts = [[(7 * i + j * j) % 60 + 1 for j in range(40 + 17 * i)] for i in range(8)]
    params = greedy(24)
    ours, theirs = engine_with("triton"), engine_with("flashinfer")
    expected, got = ours.generate(prompts, params), theirs.generate(prompts, params)
    theirs.check_integrity()
    assert ours.stats()["prefill_backend"] == "triton" and theirs.stats()["prefill_backend"] == "flashinfer"
    extra = theirs.stats()["memory"]["buffers"] - ours.stats()["memory"]["buffers"]
    assert extra >= 8 << 20
    result = compare_runs(ours, expected, got, params)
    assert result.tokens > 120 and len(result.differences) <= 3, "\n".join(map(str, result.differences))
    assert all(abs(tie.margin) < 0.1 for tie in result.differences), "\n".join(map(str, result.differences))
    assert result.max_logprob_error < 0.1


def test_prefill_steps_do_not_wait() -> None:
    engine = engine_with("flashinfer")
    engine.generate([[1] * 100], greedy(4))
    for i in range(4):
        engine.add_request([i + 2] * 150, SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(6):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_unfinished():
        engine.step()
