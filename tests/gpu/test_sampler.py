"""The CUDA sampler against the C++ twin: equal tokens, log-probabilities within fp32's rounding. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.params import NoiseIds, RowParams, SampleResult
from tlt_kernels.sampling import sample
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT = torch.int32
# The twin rounds z = x / T to fp32 before it subtracts; |z| reaches 150 here, half an ulp is 7.6e-6. The GPU subtracts
# first and adds fp32 terms of 2 ulp each.
LOGPROB = 2e-5


def to(params: RowParams | NoiseIds, device: str) -> RowParams | NoiseIds:
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    return type(params)(**{name: None if v is None else v.to(device) for name, v in values.items()})


def identities(rows: int, seed: int = 0) -> NoiseIds:
    rng = torch.Generator().manual_seed(seed)
    return NoiseIds(
        torch.randint(-(2**62), 2**62, (rows,), generator=rng), torch.randint(0, 5000, (rows,), generator=rng),
        torch.randint(0, 8, (rows,), generator=rng), torch.randint(0, 3, (rows,), generator=rng),
    )


def random_logits(rows: int, vocab: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 1) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def cycle(values: list[float], rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([values[i % len(values)] for i in range(rows)], dtype=dtype)


def on_gpu(logits: Tensor, ids: NoiseIds, params: RowParams, **options: object) -> SampleResult:
    forced = options.pop("forced", None)
    forced = None if forced is None else forced.cuda()
    out = sample(logits.cuda(), to(ids, "cuda"), to(params, "cuda"), forced=forced, backend="cuda", **options)
    raw = None if out.raw_logprobs is None else out.raw_logprobs.cpu()
    return SampleResult(out.tokens.cpu(), out.logprobs.cpu(), raw)


def excused(row: int, got: SampleResult, logits: Tensor, ids: NoiseIds, params: RowParams, **options: object) -> bool:
    """A filter's cut lies within 1e-5 of its threshold: moving the threshold by that much gives the GPU's answer."""
    for factor in (1 - 1e-5, 1 + 1e-5):
        moved = {
            name: (getattr(params, name) * factor).clamp(max=1.0)
            for name in ("top_p", "min_p") if getattr(params, name) is not None
        }
        if not moved:
            return False
        twin = sample(logits, ids, replace(params, **moved), backend="cpp", **options)
        close = abs(float(twin.logprobs[row]) - float(got.logprobs[row])) < LOGPROB
        if int(twin.tokens[row]) == int(got.tokens[row]) and close:
            return True
    return False


def check_equal(got: SampleResult, logits: Tensor, ids: NoiseIds, params: RowParams, **options: object) -> None:
    want = sample(logits, ids, params, backend="cpp", **options)
    near = torch.isclose(got.logprobs, want.logprobs, rtol=1e-6, atol=LOGPROB, equal_nan=True)
    for row in ((got.tokens != want.tokens) | ~near).nonzero().flatten().tolist():
        assert excused(row, got, logits, ids, params, **options), (
            f"row {row}: token {int(got.tokens[row])} at {float(got.logprobs[row])}, "
            f"twin {int(want.tokens[row])} at {float(want.logprobs[row])}"
        )
        print(f"excused: row {row}, a filter's cut within 1e-5 of its threshold")
    if want.raw_logprobs is not None:
        assert got.raw_logprobs is not None
        torch.testing.assert_close(got.raw_logprobs, want.raw_logprobs, rtol=1e-6, atol=LOGPROB, equal_nan=True)


def check_op(logits: Tensor, ids: NoiseIds, params: RowParams, **options: object) -> None:
    check_equal(on_gpu(logits, ids, params, **options), logits, ids, params, **options)


def temperatures(rows: int) -> Tensor:
    return cycle([1.0, 0.6, 0.0, 1.3, 0.1], rows)


NARROW = {"top_k": [50, 0, 5, 1, 0, 700], "top_p": [0.9, 0.9, 0.5, 1.0, 1.0, 0.95], "min_p": [0.02, 0, 0, 0, 0.1, 0]}
WIDE = {
    "top_k": [5000, 0, 2100, 2500, 0, 0], "top_p": [1.0, 0.9, 0.5, 0.99, 0.999, 0.3], "min_p": [0, 0, 0, 1e-5, 1e-4, 0]
}


def filtered(rows: int, filters: dict[str, list[float]]) -> RowParams:
    types = {"top_k": INT, "top_p": torch.float32, "min_p": torch.float32}
    return RowParams(temperatures(rows), **{name: cycle(v, rows, types[name]) for name, v in filters.items()})


def modified(rows: int, vocab: int) -> RowParams:
    """Masks, bias lists with a ban and repeats, penalties with branches of a tree over half of the rows."""
    rng = torch.Generator().manual_seed(3)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=rng)

    history = torch.cat([draw(vocab, 300), draw(40, 100), draw(vocab, 50), torch.full((70,), 5)])
    parents = torch.tensor([-1 if i % 4 == 0 else i - 1 for i in range(rows)], dtype=INT)
    return RowParams(
        temperatures(rows), allowed_row=cycle([-1, 0, 1], rows, INT),
        allowed_bits=torch.randint(-(2**31), 2**31 - 1, (2, -(-vocab // 32)), generator=rng, dtype=INT),
        bias_row=cycle([0, 1, -1], rows, INT), bias_indptr=torch.tensor([0, 3, 203], dtype=INT),
        bias_ids=torch.cat([torch.tensor([7, 7, 100]), draw(vocab, 200)]),
        bias_values=torch.cat([torch.tensor([3.0, 2.0, -torch.inf]), torch.randn(200, generator=rng) * 4]),
        repetition=cycle([1.3, 1.0, 1.1], rows), presence=cycle([0.5, 0.0, 1.0], rows),
        frequency=cycle([0.1, 0.2, 0.0], rows), history_row=cycle([0, 1, 0, -1], rows, INT),
        history_indptr=torch.tensor([0, 400, 520], dtype=INT), history_ids=history,
        history_prompt=torch.tensor([300, 30], dtype=INT), parent_row=parents, node_tokens=draw(40, rows),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 9001, 49152, 151936])
def test_plain(dtype: torch.dtype, vocab: int) -> None:
    rows = 21
    params = RowParams(temperatures(rows))
    logits, ids = random_logits(rows, vocab, dtype), identities(rows)
    check_op(logits, ids, params, want_raw=True)
    check_op(logits, ids, params, vocab_limit=max(1, vocab - 13))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("scale", [3.0, 0.3])
def test_filters(dtype: torch.dtype, filters: dict[str, list[float]], scale: float) -> None:
    rows = 18
    for vocab in (9001, 151936):
        logits, ids = random_logits(rows, vocab, dtype, scale), identities(rows, seed=vocab)
        check_op(logits, ids, filtered(rows, filters), want_raw=vocab == 9001)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_nuclei_and_loose_min_p_alone(scale: float, dtype: torch.dtype) -> None:
    """Rows that one number cuts, where neither list nor slots help: two reads of the row decide."""
    rows = 24
    shares = cycle([0.95, 0.5, 0.999, 0.1, 0.05, 0.9999], rows)
    for vocab in (5003, 151936):
        logits, ids = random_logits(rows, vocab, dtype, scale), identities(rows, seed=vocab)
        logits[3, vocab // 3 :] = -torch.inf
        logits[4] = 0.0
        logits[5, 77] = 30.0
        plain = RowParams(cycle([1.0, 0.7, 1.5], rows))
        check_op(logits, ids, replace(plain, top_p=shares), want_raw=True)
        check_op(logits, ids, replace(plain, top_p=shares), vocab_limit=vocab - 77)
        check_op(logits, ids, replace(plain, min_p=1 - shares))
        narrow = replace(plain, top_p=shares * 0.97)
        with pytest.raises(AssertionError, match="row"):
            check_equal(on_gpu(logits, ids, narrow), logits, ids, replace(plain, top_p=shares))


def test_noise_decides_among_huge_and_equal_logits() -> None:
    """Scores too close for fast logs: logits that dwarf the noise, and one score for all."""
    rows, vocab = 12, 9001
    logits = random_logits(rows, vocab, torch.float32, 1.0)
    logits[:6] = (logits[:6] * 4).round() * 2.0**20
    logits[6:9] = -3.0e6
    for temperature in (1.0, 1e-2, 50.0):
        check_op(logits, identities(rows), RowParams.plain(rows, temperature))


@pytest.mark.parametrize("filters", [NARROW, WIDE], ids=["narrow", "wide"])
def test_ties_keep_the_lower_ids(filters: dict[str, list[float]]) -> None:
    rows, vocab = 12, 9000
    logits = torch.zeros(rows, vocab)
    logits[:, ::2] = 1.0
    check_op(logits, identities(rows), filtered(rows, filters))
    check_op(torch.zeros(rows, vocab), identities(rows), filtered(rows, filters))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_bias_and_penalties(dtype: torch.dtype) -> None:
    rows, vocab = 12, 5003
    logits, ids, params = random_logits(rows, vocab, dtype, 2.0), identities(rows), modified(rows, vocab)
    check_op(logits, ids, params, want_raw=True)
    check_op(logits, ids, params, vocab_limit=4500)
    both = filtered(rows, NARROW)
    check_op(logits, ids, replace(params, top_k=both.top_k, top_p=both.top_p, min_p=both.min_p), vocab_limit=4700)


@pytest.mark.parametrize(
    "params", [RowParams(temperatures(8)), filtered(8, NARROW), modified(8, 5003)], ids=["plain", "filters", "mods"]
)
def test_rows_without_an_answer(params: RowParams) -> None:
    logits = random_logits(8, 5003, torch.float32)
    logits[0, 4999], logits[1, 3], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[4, 4:], logits[5, ::2] = -torch.inf, -torch.inf
    check_op(logits, identities(8), params, want_raw=True)


@pytest.mark.parametrize("filters", [{}, NARROW], ids=["plain", "narrow"])
def test_forced(filters: dict[str, list[float]]) -> None:
    rows, vocab = 12, 9001
    forced = torch.arange(rows) * 700
    logits = random_logits(rows, vocab, torch.bfloat16)
    check_op(logits, identities(rows), filtered(rows, filters), forced=forced, want_raw=True)


@pytest.mark.parametrize(
    "params", [RowParams(temperatures(256)), filtered(256, NARROW), filtered(256, WIDE)],
    ids=["plain", "narrow", "wide"],
)
def test_a_row_does_not_depend_on_its_batch(params: RowParams) -> None:
    """Bit for bit, though 256 rows are split over blocks differently from one."""
    logits, ids = random_logits(256, 32000, torch.bfloat16), identities(256)
    whole = on_gpu(logits, ids, params)
    for row in (0, 1, 3, 5, 255):
        one = slice(row, row + 1)
        alone = on_gpu(logits[one], ids[one], replace(params, **{
            f.name: getattr(params, f.name)[one] for f in fields(params) if getattr(params, f.name) is not None
        }))
        assert int(alone.tokens) == int(whole.tokens[row])
        assert alone.logprobs.view(INT).item() == whole.logprobs[row].view(INT).item()


@pytest.mark.parametrize(
    "make",
    [lambda n: RowParams(temperatures(n)), lambda n: filtered(n, NARROW), lambda n: modified(n, 5003)],
    ids=["plain", "narrow", "mods"],
)
def test_graph_replay_reads_new_inputs(make: Callable[[int], RowParams]) -> None:
    rows, vocab = 16, 5003
    logits, ids = random_logits(rows, vocab, torch.bfloat16).cuda(), to(identities(rows), "cuda")
    params = to(make(rows), "cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        cuda.sample(logits, ids, params)  # sizes the stream's scratch before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = cuda.sample(logits, ids, params)
    for seed in (5, 6):
        fresh, fresh_ids = random_logits(rows, vocab, torch.bfloat16, seed=seed), identities(rows, seed)
        logits.copy_(fresh)
        for f in fields(ids):
            getattr(ids, f.name).copy_(getattr(fresh_ids, f.name))
        graph.replay()
        torch.cuda.synchronize()
        check_equal(SampleResult(out.tokens.cpu(), out.logprobs.cpu()), fresh, fresh_ids, make(rows))


def test_memory_of_256_filtered_rows() -> None:
    """Beside logits, parameters and results: at most 8 MB."""
    rows, vocab = 256, 151936
    logits, ids = torch.randn(rows, vocab, device="cuda").bfloat16(), to(identities(rows), "cuda")
    params = to(filtered(rows, NARROW), "cuda")
    cuda._scratch.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cuda.sample(logits, ids, params)
    assert torch.cuda.max_memory_allocated() - before <= 8 << 20


def test_the_comparison_sees_other_noise_and_other_cuts() -> None:
    """The checks above must fail when the kernel is given what it should not have."""
    rows, vocab = 18, 9001
    logits, ids, params = random_logits(rows, vocab, torch.float32), identities(rows), filtered(rows, NARROW)
    later = replace(ids, segments=ids.segments + 1)
    shifted = replace(params, top_k=torch.where(params.top_k > 1, params.top_k - 1, params.top_k))
    for wrong in (on_gpu(logits, later, params), on_gpu(logits, ids, shifted)):
        with pytest.raises(AssertionError, match="row"):
            check_equal(wrong, logits, ids, params)
