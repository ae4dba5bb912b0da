"""The CUDA sampler's and drafts' source on an emulated GPU against the C++ twin: what tests/gpu checks, in small.

Threads of a block run in an order that a seed decides, blocks last to first; a thread that waits for others which do
not come is an error. Times, memory and rounding of fast exponentials belong to a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.draft import noisy_top_k
from tlt_kernels.params import DraftTop, RowParams, SampleResult
from tlt_kernels.sampling import sample
from torch import Tensor

from tests.gpu import test_sampler as cases
from tests.gpu.test_draft import mapping, same
from tests.kernels.emulation.sampler import EmulatedSampler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
ROWS = 6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> EmulatedSampler:
    return EmulatedSampler(tmp_path_factory.mktemp("sampler"))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[EmulatedSampler], None]]:
    """Puts an emulated sampler below tlt_kernels.cuda."""

    def put(emulated: EmulatedSampler) -> None:
        monkeypatch.setattr(cuda, "extension", lambda: emulated)

    monkeypatch.setattr(cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(cuda, "_scratch", {})
    monkeypatch.setattr(cuda, "_processor_count", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield put


def kinds(vocab: int) -> dict[str, RowParams]:
    plain = RowParams(cases.cycle([1.0, 0.7, 1.5], ROWS))
    shares = cases.cycle([0.95, 0.5, 0.999, 0.1, 0.05, 0.9999], ROWS)
    return {
        "plain": RowParams(cases.temperatures(ROWS)), "narrow": cases.filtered(ROWS, cases.NARROW),
        "wide": cases.filtered(ROWS, cases.WIDE), "top-p": replace(plain, top_p=shares),
        "min-p": replace(plain, min_p=1 - shares), "changed": cases.modified(ROWS, vocab),
    }


def rows(vocab: int, dtype: torch.dtype, scale: float) -> Tensor:
    logits = cases.random_logits(ROWS, vocab, dtype, scale)
    logits[3, vocab // 3 :], logits[5, 77] = -torch.inf, 30.0
    logits[4] = logits[4].round()  # ties
    return logits


@pytest.mark.parametrize("kind", kinds(64))
@pytest.mark.parametrize("vocab,dtype,scale", [(2003, torch.bfloat16, 0.5), (5008, torch.float32, 3.0)])
def test_tokens_of_the_twin(
    built: EmulatedSampler, use: Callable[[EmulatedSampler], None], monkeypatch: pytest.MonkeyPatch, kind: str,
    vocab: int, dtype: torch.dtype, scale: float,
) -> None:
    """And the same bits whatever the order of threads and the number of blocks a row."""
    use(built)
    logits, ids, params = rows(vocab, dtype, scale), cases.identities(ROWS), kinds(vocab)[kind]
    results: list[SampleResult] = []
    for seed, processors in ((0, 1), (5, 200)):
        built.seed = seed
        monkeypatch.setattr(cuda, "_processor_count", lambda device, n=processors: n)
        results.append(cuda.sample(logits, ids, params, want_raw=True))
    cases.check_equal(results[0], logits, ids, params, want_raw=True)
    assert torch.equal(results[0].tokens, results[1].tokens)
    assert torch.equal(results[0].logprobs.view(torch.int32), results[1].logprobs.view(torch.int32))
    limited = cuda.sample(logits, ids, params, vocab_limit=vocab - 77)
    cases.check_equal(limited, logits, ids, params, vocab_limit=vocab - 77)
    forced = torch.arange(ROWS) * 111
    cases.check_equal(cuda.sample(logits, ids, params, forced=forced), logits, ids, params, forced=forced)


def wrong_in_nuclei() -> int:
    """Rows of 80 whose token is not the twin's: a third of the winners lie in the window that is decided last."""
    rows, wrong = 40, 0
    for scale in (0.5, 2.0):
        logits, ids = cases.random_logits(rows, 5008, torch.bfloat16, scale), cases.identities(rows)
        params = RowParams(torch.ones(rows), top_p=torch.full((rows,), 0.5))
        wrong += int((cuda.sample(logits, ids, params).tokens != sample(logits, ids, params).tokens).sum())
    return wrong


def test_nuclei(built: EmulatedSampler, use: Callable[[EmulatedSampler], None]) -> None:
    use(built)
    assert wrong_in_nuclei() == 0


@pytest.mark.parametrize("change", [
    {"if (cut.keeps(z_of(x), id)) argmax.offer(": "if (false) argmax.offer("},  # what waits for the cut is forgotten
    {"if (x >= window.high) return argmax.offer": "return argmax.offer"},  # nothing waits for it
])
def test_broken_nuclei_are_seen(
    use: Callable[[EmulatedSampler], None], tmp_path: Path, change: dict[str, str]
) -> None:
    use(EmulatedSampler(tmp_path, change))
    assert wrong_in_nuclei() > 3


@pytest.mark.parametrize("kind", ["plain", "narrow", "changed"])
def test_rows_without_an_answer(
    built: EmulatedSampler, use: Callable[[EmulatedSampler], None], kind: str
) -> None:
    use(built)
    logits = cases.random_logits(ROWS, 2003, torch.float32)
    logits[0, 1999], logits[1, 3], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[4, 4:], logits[5, ::2] = -torch.inf, -torch.inf
    params = kinds(2003)[kind]
    cases.check_equal(cuda.sample(logits, cases.identities(ROWS), params), logits, cases.identities(ROWS), params)


def drafts(emulated: EmulatedSampler, logits: Tensor, params: RowParams, k: int, noise: bool, reduced: bool) -> None:
    options = mapping(logits.shape[1], 3 * logits.shape[1]) if reduced else {}
    ids = cases.identities(len(logits))
    got = cuda.noisy_top_k(logits, ids, params, k, noise=noise, **options)  # type: ignore[arg-type]
    want: DraftTop = noisy_top_k(logits, ids, params, k, noise=noise, backend="cpp", **options)  # type: ignore[arg-type]
    assert all(same(got, want, row) for row in range(len(logits)))


@pytest.mark.parametrize("reduced", [False, True])
def test_drafts_of_the_twin(built: EmulatedSampler, use: Callable[[EmulatedSampler], None], reduced: bool) -> None:
    use(built)
    built.seed = 3
    logits = rows(1003, torch.bfloat16, 2.0)
    logits[1] = 0.0
    vocab = 3009 if reduced else 1003
    branch = torch.randint(-1, 40, (ROWS, 5), generator=torch.Generator().manual_seed(4))
    changed = replace(kinds(vocab)["changed"], parent_row=None, node_tokens=None, branch_tokens=branch)
    for params in (kinds(vocab)["plain"], kinds(vocab)["narrow"], changed):
        for noise in (True, False):
            drafts(built, logits, params, 8, noise, reduced)
    drafts(built, logits, kinds(vocab)["plain"], 700, True, reduced)


def test_drafts_do_not_depend_on_how_rows_are_shared(
    built: EmulatedSampler, use: Callable[[EmulatedSampler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a row and one for every 1024 columns: the same bits, the twin's ids, and the counters set back."""
    use(built)
    logits, ids, vocab = rows(5008, torch.bfloat16, 2.0), cases.identities(ROWS), 3 * 5008
    logits[1], logits[2, 4000], logits[0, 5007] = 0.0, torch.nan, 25.0  # ties of thousands; the last column wins
    plain, options = RowParams(cases.temperatures(ROWS)), mapping(5008, vocab)
    mixed = replace(plain, top_k=torch.tensor([0, 0, 0, 40, 40, 40], dtype=torch.int32))
    for params in (plain, mixed):
        results: list[DraftTop] = []
        for seed, processors in ((0, 1), (7, 200), (7, 200)):
            built.seed = seed
            monkeypatch.setattr(cuda, "_processor_count", lambda device, n=processors: n)
            results.append(cuda.noisy_top_k(logits, ids, params, 8, **options))  # type: ignore[arg-type]
        want = noisy_top_k(logits, ids, params, 8, backend="cpp", **options)  # type: ignore[arg-type]
        for got in results:
            assert all(same(got, want, row) for row in range(ROWS))
            assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in (
                (got.scores, results[0].scores), (got.logprobs, results[0].logprobs)
            ))
    assert not any(scratch.zeros["arrived"].any() for scratch in cuda._scratch.values())


def test_broken_kernels_are_seen(use: Callable[[EmulatedSampler], None], tmp_path: Path) -> None:
    """Words skipped that could win; a cut that keeps every id of its logit; slots of drafts half forgotten; a nucleus's
    window that lists other ids than it has seen."""
    use(EmulatedSampler(tmp_path, {
        "<= s8[j] * most)": "<= s8[j] * most * 1e-4f)", "x > kept.sure ||": "x >= kept.sure ||",
        "x[i] <= kept.sure": "x[i] < kept.sure", "reached = fmaxf(reached, __shfl_xor_sync(kAll, reached, 1));": "",
        "(bit & 24) * 32": "(bit & 24) * 16",
    }))
    logits, ids, params = rows(5008, torch.float32, 0.5), cases.identities(ROWS), kinds(5008)["plain"]
    assert not torch.equal(cuda.sample(logits, ids, params).tokens, sample(logits, ids, params).tokens)
    flat, half = torch.zeros(ROWS, 5008), replace(kinds(5008)["top-p"], top_p=torch.full((ROWS,), 0.5))
    kept, wanted = (float(s(flat, ids, half).logprobs[0].exp()) * 5008 for s in (cuda.sample, sample))
    assert abs(kept - 1) < 0.01 and abs(wanted - 2) < 0.01
    nucleus, best = kinds(5008)["top-p"], logits.argmax(1)
    got, want = (s(logits, ids, nucleus, forced=best).logprobs for s in (cuda.sample, sample))
    assert (got - want).abs().max() > 1e-3
    with pytest.raises(AssertionError):
        drafts(cuda.extension(), logits, params, 8, True, False)  # type: ignore[arg-type]
