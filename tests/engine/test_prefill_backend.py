"""Who attends to prompt chunks: the choice, and the GPU's pass split between FlashInfer and our kernel. Both are played
on the CPU: FlashInfer by tests/kernels/fake_flashinfer.py, our kernel by tree_attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import pytest
import torch
from tlt_kernels.attention import tree_attention
from tlt_kernels.triton import attention as triton_attention
from tlt_kernels.triton import invariant as triton_invariant

from tests.engine.emulated import emulation
from tests.engine.engines import OFF, greedy, tiny_engine, tokens
from tests.tiny import tiny_hf_model
from tlt_engine import EngineConfig, RolloutEngine
from tlt_engine.engine import device
from tlt_engine.models import cuda_pass
from tlt_engine.models.cuda_pass import Chunks, CudaPass
from tlt_engine.models.loader import load_model
from tlt_engine.types import StepInputs

BF16 = torch.bfloat16
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


class PlayedAttention:
    """TreeAttention on the CPU. rows: of each run."""

    rows: list[int] = []  # noqa: RUF012
    workspace_bytes = 1000

    def __init__(self, geometry: Any, **_: Any) -> None:
        self.window = geometry.window

    def plan(self, *step: Any) -> Any:
        return step

    def run(self, step: Any, q: Any, k_cache: Any, v_cache: Any, *, scale: float, out: Any, early: bool) -> Any:
        type(self).rows.append(len(q))
        if not len(q):
            return out
        return tree_attention(q, k_cache, v_cache, *step, scale=scale, window=self.window, out=out)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(triton_attention, "TreeAttention", PlayedAttention)
    monkeypatch.setattr(PlayedAttention, "rows", [])
    cuda_pass._say_once.cache_clear()
    yield
    cuda_pass._say_once.cache_clear()


def mixed_step(trees: int, chunks: int) -> StepInputs:
    """Roots in front, chunks behind, over pages of 16 in order; committed keys are whatever the cache holds."""
    counts, prefix = [1] * trees + [9, 20, 3][:chunks], ([5, 30] * 2)[:trees] + [0, 14, 33][:chunks]
    pages = torch.arange(4 * len(counts), dtype=torch.int32).view(-1, 4)
    at = [(b, p + i) for b, (p, n) in enumerate(zip(prefix, counts)) for i in range(n)]
    rows = sum(counts)
    return StepInputs(
        token_ids=torch.arange(rows) % 64, positions=torch.tensor([slot for _, slot in at]),
        slots=torch.tensor([int(pages[b, slot // 16]) * 16 + slot % 16 for b, slot in at]), page_table=pages,
        prefix_lens=torch.tensor(prefix, dtype=torch.int32),
        node_indptr=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        ancestors=torch.tensor([[1, 0]] * rows), causal=torch.tensor([0] * trees + [1] * chunks, dtype=torch.uint8),
        logit_rows=torch.arange(rows),
    )


@pytest.mark.parametrize("arch,model", [("llama", {}), ("mistral", {"sliding_window": 11})])
@pytest.mark.parametrize("trees,chunks", [(0, 3), (2, 2), (1, 1), (2, 0)])
def test_a_pass_split_between_both(arch: str, model: dict[str, Any], trees: int, chunks: int) -> None:
    target = load_model(tiny_hf_model(arch, **WIDE, **model), dtype=BF16).model
    step, kv = mixed_step(trees, chunks), target.new_kv(32, 16)
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    before = kv.data.clone()
    expected = target.forward(step, kv).logits
    kv.data.copy_(before)
    both = CudaPass(target, kv, max_rows=64, max_batch=8, prefill_backend="flashinfer")
    told = Chunks(trees, trees, step.prefix_lens, step.node_indptr, step.page_table) if chunks else None
    PlayedAttention.rows.clear()
    logits = both.forward(step, chunks=told).logits
    assert PlayedAttention.rows == [trees] * 2
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()  # bf16, 8 bits: sums in another order
    ours = CudaPass(target, kv, max_rows=64, max_batch=8, prefill_backend="triton")
    kv.data.copy_(before)
    ours.forward(step, chunks=told)
    assert PlayedAttention.rows[2:] == [len(step.token_ids)] * 2
    assert both.prefill_backend == "flashinfer" and ours.prefill_backend == "triton"
    assert both.bytes - ours.bytes > 128 << 20


def test_the_comparison_sees_a_chunk_at_the_wrong_place() -> None:
    target = load_model(tiny_hf_model(**WIDE), dtype=BF16).model
    step, kv = mixed_step(1, 2), target.new_kv(32, 16)
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = target.forward(step, kv).logits
    both = CudaPass(target, kv, max_rows=64, max_batch=8, prefill_backend="flashinfer")
    told = Chunks(1, 1, step.prefix_lens, step.node_indptr, step.page_table.roll(1, 1))
    assert (both.forward(step, chunks=told).logits - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines run on the GPU's runner and pass, without graphs."""
    with emulation(buckets=None):
        monkeypatch.setattr(device, "CudaPass", CudaPass)
        yield


def engine_with(prefill_backend: str, dtype: str = "bfloat16", model: dict[str, Any] | None = None) -> RolloutEngine:
    return tiny_engine(
        model=WIDE if model is None else model, dtype=dtype, prefill_backend=prefill_backend, page_size=16,
        speculation=OFF, max_num_batched_tokens=24, enforce_eager=True,
    )


def test_tokens_and_stats_of_a_whole_engine(runner: None) -> None:
    prompts = [list(range(i, i + 30)) for i in range(5)]
    got = {}
    for name in ("flashinfer", "triton", "auto"):
        engine = engine_with(name)
        plans = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plans
        outputs = engine.generate(prompts, greedy(12))
        got[name] = tokens(outputs)
        planned = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plans - plans
        stats = engine.stats()
        assert stats["prefill_backend"] == ("triton" if name == "triton" else "flashinfer")
        assert bool(planned) == (name != "triton")
        assert planned < stats["steps"]
        engine.check_integrity()
    assert got["flashinfer"] == got["triton"] == got["auto"]


def test_what_is_missing_is_refused_with_a_remedy(runner: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"takes bfloat16 and float16, not float32.*prefill_backend='triton'"):
        engine_with("flashinfer", dtype="float32")
    with pytest.raises(ValueError, match="heads of 64, 128, 256, not 8"):
        engine_with("flashinfer", model={})
    monkeypatch.setattr(
        fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", lambda *_, **__: 1 / 0
    )
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        engine_with("flashinfer")
    fake_flashinfer.remove(monkeypatch)
    with pytest.raises(ValueError, match=r"flashinfer-python is not installed.*pip install flashinfer-python"):
        engine_with("flashinfer")
    with pytest.raises(ValueError, match="one of auto, flashinfer, triton, got 'fa3'"):
        EngineConfig(prefill_backend="fa3")
    with pytest.raises(ValueError, match="'auto' or 'triton' with batch_invariant"):
        EngineConfig(device="cuda", dtype="bfloat16", batch_invariant=True, prefill_backend="flashinfer")


@pytest.mark.parametrize("prefill_backend", ["auto", "triton"])
def test_batch_invariant_mode_never_asks_flashinfer(prefill_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_invariant, "make_invariant", lambda *_, **__: PlayedAttention(SimpleNamespace(window=0)))
    monkeypatch.setattr(cuda_pass, "ChunkAttention", lambda *_, **__: pytest.fail("FlashInfer in invariant mode"))
    target = load_model(tiny_hf_model(**WIDE), dtype=BF16).model
    made = CudaPass(
        target, target.new_kv(4, 16), max_rows=64, max_batch=8, prefill_backend=prefill_backend, invariant=True
    )
    assert made.prefill_backend == "triton"


def test_auto_says_once_why_it_took_ours(
    runner: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "FlashInfer" in r.getMessage()]

    with caplog.at_level(logging.WARNING):
        engine_with("auto"), engine_with("triton", dtype="float32")
        assert not said()
        assert engine_with("auto", dtype="float32").stats()["prefill_backend"] == "triton"
        engine_with("auto", dtype="float32")
        assert len(said()) == 1 and "not float32" in said()[0]
        fake_flashinfer.remove(monkeypatch)
        engine_with("auto")
        assert len(said()) == 2 and "is not installed" in said()[1]


def test_the_cpu_has_its_own() -> None:
    assert tiny_engine().stats()["prefill_backend"] == "cpp"
