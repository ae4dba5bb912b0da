"""batch_invariant on a GPU: the same bits with and without speculation, whatever else a step holds.

Small random models, bf16, temperature 1; contexts run over the borders at 128, 192 and 512 keys. Compared are ids and
log-probabilities, with ==.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.engines import tiny_engine
from tlt_engine import RolloutEngine, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "max_position_embeddings": 1024,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "64": ("llama", WIDE),
    "128": ("qwen3", {**WIDE, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 128}),
    "window": ("mistral", {**WIDE, "sliding_window": 150}),
    "triton": ("llama", {**WIDE, "num_attention_heads": 4, "head_dim": 96}),  # heads that CUDA is not made for
}
PROMPTS = [[5, 6, 7], list(range(70)), list(range(20, 220)), [(7 * i) % 500 for i in range(430)]]
PARAMS = SamplingParams(temperature=1.0, max_tokens=150, n=2, seed=7)
Bits = list[tuple[list[int], list[float]]]


def engine_of(kind: str = "64", drafter: Any = None, *, invariant: bool = True, **config: Any) -> RolloutEngine:
    arch, model = MODELS[kind]
    config = {"dtype": "bfloat16", "page_size": 16, "device": "cuda"} | config
    return tiny_engine(drafter=drafter, arch=arch, model=model, batch_invariant=invariant, **config)


def bits_of(engine: RolloutEngine, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[Bits]:
    outputs = engine.generate(prompts, params)
    engine.check_integrity()
    return [[(o.token_ids, o.sampled_logprobs) for o in output.outputs] for output in outputs]


def continuations(bits: list[Bits]) -> dict[tuple[int, ...], dict[int, list[int]]]:
    return {tuple(p): {i: ids for i, (ids, _) in enumerate(samples)} for p, samples in zip(PROMPTS, bits)}


@pytest.mark.parametrize("kind", MODELS)
def test_speculation_changes_no_bit(kind: str) -> None:
    engine = engine_of(kind)
    expected = bits_of(engine)
    assert engine.stats()["prefill_backend"] == ("triton" if kind == "triton" else "cuda")
    known = continuations(expected)
    for drafter in (
        ReplayDrafter(known, depth=7), ReplayDrafter(known, error_rate=0.1, depth=5, shape="tree", width=3),
        AdversarialDrafter(512),
    ):
        for eager in (False, True):
            assert bits_of(engine_of(kind, drafter, enforce_eager=eager)) == expected
        if isinstance(drafter, ReplayDrafter):
            assert 1 + drafter.mean_accepted >= 3


@pytest.mark.parametrize("kind", ["64", "128"])
def test_the_batch_its_order_chunks_preemption_and_prefix_hits_change_no_bit(kind: str) -> None:
    expected = bits_of(engine_of(kind))
    turned = bits_of(engine_of(kind), PROMPTS[::-1])
    assert turned[::-1] == expected
    one_by_one = engine_of(kind, enforce_eager=True)
    assert [bits_of(one_by_one, [prompt])[0] for prompt in PROMPTS] == expected
    for tokens in (16, 100, 4096):
        chunked = engine_of(kind, max_num_batched_tokens=tokens, enable_prefix_caching=False)
        assert bits_of(chunked) == expected
    tight = engine_of(kind, num_pages=90)
    assert bits_of(tight) == expected and tight.stats()["preemptions"] > 0
    again = engine_of(kind)
    bits_of(again)
    assert bits_of(again) == expected and again.stats()["prefix_hit_tokens"] > 400


@pytest.mark.parametrize("config", [
    {"lm_head_dtype": "float32"}, {"dtype": "float16"}, {"dtype": "float32"}, {"page_size": 32},
], ids=str)
def test_other_dtypes_and_pages(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        expected = bits_of(engine_of(**config))
    drafter = ReplayDrafter(continuations(expected), depth=5, error_rate=0.1)
    assert bits_of(engine_of("64", drafter, **config)) == expected
    if config.get("dtype") == "float32":
        assert sum("batch_invariant takes slow kernels" in r.message for r in caplog.records) <= 1


def test_scores_are_the_logged_bits() -> None:
    """Teacher forcing prefills what decoding took token by token."""
    engine = engine_of()
    for prompt, samples in zip(PROMPTS, bits_of(engine)):
        ids, logprobs = samples[0]
        assert engine.score(prompt, ids, SamplingParams(temperature=1.0)) == logprobs


def test_sibling_the_default_mode_fails_the_check() -> None:
    expected = bits_of(engine_of(invariant=False))
    drafter = ReplayDrafter(continuations(expected), depth=7)
    assert bits_of(engine_of(drafter=drafter, invariant=False)) != expected


def test_sibling_products_that_look_at_the_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps have 8 rows, those with drafts up to 64: beyond 16, the sums are of two halves, as cuBLAS splits them
    for some sizes. (cuBLAS itself gives these narrow products the same bits for every number of rows.)"""
    from tlt_kernels.activation import silu_mul as activate
    from tlt_kernels.linear import linear

    from tlt_engine.models import cuda_pass

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, silu_mul: bool = False, out: Any = None,
                **options: Any) -> torch.Tensor:
        if len(x) <= 16:
            return linear(x, weight, bias, silu_mul=silu_mul, out=out, **options)
        half = x.shape[1] // 2
        product = F.linear(x[:, :half], weight[:, :half], bias) + F.linear(x[:, half:], weight[:, half:])
        product = activate(product) if silu_mul else product
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(cuda_pass, "linear", by_rows)
    expected = bits_of(engine_of())
    drafter = ReplayDrafter(continuations(expected), depth=7)
    assert bits_of(engine_of(drafter=drafter)) != expected


@pytest.mark.parametrize("features", [896, 3584])
def test_norms_rotation_and_draws_know_one_row(features: int) -> None:
    from tlt_kernels import NoiseIds, RowParams, sample
    from tlt_kernels.norm import rms_norm
    from tlt_kernels.rope import rope_write_kv

    draw = torch.Generator("cuda").manual_seed(0)
    rows, heads, kv_heads, dim = 300, 7, 1, 128

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda").bfloat16()

    x, residual, weight = randn(rows, features), randn(rows, features), randn(features)
    qkv, cos, sin = randn(rows, (heads + 2 * kv_heads) * dim), randn(1024, dim).float(), randn(1024, dim).float()
    positions = torch.arange(rows, device="cuda")
    logits = randn(rows, 152064) * 3
    temperature = torch.full((rows,), 1.0, device="cuda")
    top_p = torch.where(positions % 3 == 0, 0.9, 1.0).float()

    def results(pick: slice) -> list[torch.Tensor]:
        ids = NoiseIds(*(t[pick] for t in (positions * 977, positions, positions % 5, positions * 0)))
        cache = torch.zeros(2, rows // 16 + 1, 16, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        q = rope_write_kv(qkv[pick].contiguous(), cos, sin, positions[pick], positions[pick], cache[0], cache[1])
        keys = cache.view(2, -1, kv_heads, dim)[:, pick]
        added = (x[pick] + residual[pick]).contiguous()  # as a pass that wants few logits does it
        drawn = [
            sample(logits[pick], ids, RowParams(temperature[pick].contiguous(), top_p=p), want_raw=True)
            for p in (None, top_p[pick].contiguous())
        ]
        draws = [t for r in drawn for t in (r.tokens, r.logprobs, r.raw_logprobs) if t is not None]
        normed, total = rms_norm(x[pick].contiguous(), weight, 1e-6, residual=residual[pick].contiguous())
        return [normed, total, rms_norm(added, weight, 1e-6)[0], q, *keys, *draws]

    whole = results(slice(0, rows))
    assert torch.equal(whole[0], whole[2])
    for pick in (slice(0, 1), slice(7, 12), slice(100, 164), slice(299, 300)):
        for a, b in zip(results(pick), whole, strict=True):
            assert torch.equal(a, b[pick])
