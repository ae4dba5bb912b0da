"""CUDA draft proposals against the C++ twin: equal ids in order, scores within fp32's rounding. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.draft import noisy_top_k
from tlt_kernels.params import DraftTop, NoiseIds, RowParams
from torch import Tensor

from tests.gpu.test_sampler import (
    DTYPES,
    LOGPROB,
    NARROW,
    WIDE,
    filtered,
    identities,
    modified,
    random_logits,
    temperatures,
    to,
)

INT = torch.int32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def same(got: DraftTop, want: DraftTop, row: int) -> bool:
    return torch.equal(got.tokens[row], want.tokens[row]) and torch.equal(got.draft_ids[row], want.draft_ids[row]) and (
        torch.allclose(got.logprobs[row], want.logprobs[row], rtol=1e-6, atol=LOGPROB)
        and torch.allclose(got.scores[row], want.scores[row], rtol=1e-6, atol=LOGPROB)
    )


def check(logits: Tensor, ids: NoiseIds, params: RowParams, k: int, **options: object) -> None:
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    on_gpu = noisy_top_k(logits.cuda(), to(ids, "cuda"), to(params, "cuda"), k, backend="cuda", **moved)
    got = DraftTop(*(getattr(on_gpu, n).cpu() for n in ("tokens", "draft_ids", "scores", "logprobs")))
    want = noisy_top_k(logits, ids, params, k, backend="cpp", **options)
    for row in [row for row in range(len(logits)) if not same(got, want, row)]:
        # A filter's cut lies within 1e-5 of its threshold: moving the threshold by that much gives the GPU's answer.
        names = [name for name in ("top_p", "min_p") if getattr(params, name) is not None]
        shifted = [
            replace(params, **{name: (getattr(params, name) * factor).clamp(max=1.0) for name in names})
            for factor in (1 - 1e-5, 1 + 1e-5)
        ]
        twins = [noisy_top_k(logits, ids, p, k, backend="cpp", **options) for p in shifted] if names else []
        assert any(same(got, twin, row) for twin in twins), (
            f"row {row}: {got.tokens[row, :8].tolist()} at {got.scores[row, :8].tolist()}, twin "
            f"{want.tokens[row, :8].tolist()} at {want.scores[row, :8].tolist()}"
        )


def mapping(columns: int, vocab: int, dtype: torch.dtype = torch.int64) -> dict[str, object]:
    targets = torch.randperm(vocab, generator=torch.Generator().manual_seed(vocab))[:columns].sort().values
    return {"d2t": (targets - torch.arange(columns)).to(dtype), "target_vocab": vocab}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns,k", [(32000, 8), (32000, 64), (151936, 4), (9, 16), (1, 1), (5003, 1024)])
@pytest.mark.parametrize("reduced", [False, True])
def test_plain(columns: int, k: int, reduced: bool, dtype: torch.dtype) -> None:
    rows = 10
    logits, ids, params = random_logits(rows, columns, dtype), identities(rows), RowParams(temperatures(rows))
    logits[2:4] = 0.0  # equal logits everywhere; row 2 greedy, so k of thousands of ties
    if columns > 2:
        logits[4, 2:], logits[5, 1], logits[6] = -torch.inf, torch.nan, -torch.inf
    options = mapping(columns, 4 * columns, torch.int32 if columns == 9 else torch.int64) if reduced else {}
    check(logits, ids, params, k, **options)
    check(logits, ids, params, k, noise=False, **options)


@pytest.mark.parametrize("filters", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("scale", [3.0, 0.3])
def test_filters(filters: dict[str, list[float]], scale: float) -> None:
    rows, columns = 18, 32000
    logits, ids, params = random_logits(rows, columns, torch.bfloat16, scale), identities(rows), filtered(rows, filters)
    for noise in (True, False):
        check(logits, ids, params, 8, noise=noise)
        check(logits, ids, params, 8, noise=noise, **mapping(columns, 151936))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_bias_and_penalties_in_target_ids(dtype: torch.dtype) -> None:
    rows, columns, vocab = 12, 5003, 9001
    logits, ids, by_rows = random_logits(rows, columns, dtype, 2.0), identities(rows), modified(rows, vocab)
    branch = torch.randint(-1, 40, (rows, 6), generator=torch.Generator().manual_seed(4))
    by_list = replace(by_rows, parent_row=None, node_tokens=None, branch_tokens=branch)
    both = filtered(rows, NARROW)
    for params in (by_rows, by_list, replace(by_list, top_k=both.top_k, top_p=both.top_p, min_p=both.min_p)):
        check(logits, ids, params, 16, **mapping(columns, vocab))
        check(logits, ids, params, 16, vocab_limit=8000, **mapping(columns, vocab, torch.int32))
    check(logits, ids, RowParams(temperatures(rows)), 16, vocab_limit=600, **mapping(columns, vocab))


@pytest.mark.parametrize("columns", [32000, 151936])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(columns: int) -> None:
    """Shared by 32 blocks, by two or by none."""
    rows = 140
    logits, ids = random_logits(rows, columns, torch.bfloat16).cuda(), to(identities(rows), "cuda")
    params = to(RowParams(temperatures(rows)), "cuda")
    whole = cuda.noisy_top_k(logits, ids, params, 8)
    for row in range(0, rows, 37):
        one = RowParams(params.temperature[row : row + 1])
        alone = cuda.noisy_top_k(logits[row : row + 1], ids[row : row + 1], one, 8)
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        for name in ("scores", "logprobs"):
            assert torch.equal(getattr(alone, name)[0].view(INT), getattr(whole, name)[row].view(INT))
    assert not torch.equal(whole.scores[0], whole.scores[1])


def test_the_comparison_sees_a_lost_coupling() -> None:
    rows, columns = 12, 5003
    logits, ids, params = random_logits(rows, columns, torch.float32), identities(rows), RowParams(temperatures(rows))
    options = mapping(columns, 9001)
    later = replace(ids, positions=ids.positions + 1)
    got = noisy_top_k(logits.cuda(), to(later, "cuda"), to(params, "cuda"), 4, backend="cuda", **{
        "d2t": options["d2t"].cuda(), "target_vocab": 9001,  # type: ignore[union-attr]
    })
    want = noisy_top_k(logits, ids, params, 4, backend="cpp", **options)
    assert not torch.equal(got.tokens.cpu(), want.tokens)


def test_graph_replay_reads_new_inputs() -> None:
    rows, columns = 16, 5003
    logits, ids = random_logits(rows, columns, torch.bfloat16).cuda(), to(identities(rows), "cuda")
    params = to(modified(rows, columns), "cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        cuda.noisy_top_k(logits, ids, params, 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = cuda.noisy_top_k(logits, ids, params, 8)
    for seed in (5, 6):
        fresh, fresh_ids = random_logits(rows, columns, torch.bfloat16, seed=seed), identities(rows, seed)
        logits.copy_(fresh)
        for name in ("keys", "positions", "samples", "segments"):
            getattr(ids, name).copy_(getattr(fresh_ids, name))
        graph.replay()
        torch.cuda.synchronize()
        want = noisy_top_k(fresh, fresh_ids, modified(rows, columns), 8, backend="cpp")
        assert torch.equal(out.tokens.cpu(), want.tokens)
