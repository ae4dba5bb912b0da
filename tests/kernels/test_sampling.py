"""Sampling: C++ against the reference over random parameters, and each step of processing on its own.

The noise and every step up to the cuts are equal bits on both backends, so tokens and filtered sets must be equal;
only a top-p cut whose cumulative mass lies within 1e-6 of p is excused (exp differs in the last bits).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import bits, draw_ids, int32, int64, make_ids, raw_sample
from tlt_kernels import NoiseIds, RowParams, gumbel_noise, process_logits, sample
from tlt_kernels.backend import BackendName
from tlt_kernels.reference import sampling as reference

from tlt_engine import _C

NEG_INF = -math.inf


def near_top_p(logits: torch.Tensor, params: RowParams, limit: int) -> torch.Tensor:
    """Rows whose top-p cut lies within 1e-6 of the threshold."""
    if params.top_p is None:
        return torch.zeros(len(logits), dtype=torch.bool)
    off = replace(params, top_p=torch.ones_like(params.top_p))
    before = process_logits(logits, off, vocab_limit=limit, backend="reference")
    mass = torch.softmax(before.double(), 1).sort(dim=1, descending=True, stable=True).values.cumsum(1)
    near = ((mass - params.top_p[:, None]).abs() < 1e-6).any(1)
    return near & (params.top_p < 1) & (params.temperature >= 1e-5)


def assert_equal_backends(logits, ids, params, limit=None, forced=None):
    limit = limit or logits.shape[1]
    both: tuple[BackendName, ...] = ("cpp", "reference")
    extra = {"vocab_limit": limit, "forced": forced, "want_raw": True}
    ours, theirs = (sample(logits, ids, params, backend=b, **extra) for b in both)
    z, z_reference = (process_logits(logits, params, vocab_limit=limit, backend=b) for b in both)
    live = ~near_top_p(logits, params, limit)
    assert torch.equal(z[live].nan_to_num(nan=7.0), z_reference[live].nan_to_num(nan=7.0))
    assert torch.equal(ours.tokens[live], theirs.tokens[live])
    for a, b in ((ours.logprobs, theirs.logprobs), (ours.raw_logprobs, theirs.raw_logprobs)):
        torch.testing.assert_close(a[live], b[live], atol=1e-5, rtol=0, equal_nan=True)


@st.composite
def cases(draw):
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 5, 31, 32, 33, 64, 100, 257, 600, 2050]))
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    logits = torch.randn(rows, vocab, generator=rng) * scale
    if draw(st.booleans()):
        logits = logits.round()  # many ties
    if draw(st.booleans()):
        logits[torch.rand(rows, vocab, generator=rng) < 0.2] = NEG_INF
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    pick = lambda *values: torch.tensor([values[i] for i in torch.randint(len(values), (rows,), generator=rng)])  # noqa: E731
    fields: dict = {"temperature": pick(0.0, 1e-6, 0.01, 0.6, 1.0, 2.0)}
    if draw(st.booleans()):
        fields["top_k"] = pick(0, 1, 3, 40, vocab, vocab + 5).int()
    if draw(st.booleans()):
        fields["top_p"] = pick(0.0, 1e-6, 0.5, 0.9, 0.999, 1.0)
    if draw(st.booleans()):
        fields["min_p"] = pick(0.0, 0.02, 0.3, 1.0)
    if draw(st.booleans()):
        allowed = [torch.randperm(vocab, generator=rng)[: 1 + vocab // 2].tolist() for _ in range(3)]
        fields |= {"allowed_row": pick(-1, 0, 1, 2).int(), "allowed_bits": bits(allowed, vocab)}
    if draw(st.booleans()):
        values = torch.randn(8, generator=rng) * 3
        values[::3] = NEG_INF
        fields |= {
            "bias_row": pick(-1, 0, 1).int(), "bias_indptr": int32(0, 3, 8),
            "bias_ids": torch.randint(0, vocab, (8,), generator=rng), "bias_values": values,
        }
    if draw(st.booleans()):
        fields |= {
            "repetition": pick(1.0, 1.3, 0.7), "presence": pick(0.0, 0.5, -1.0), "frequency": pick(0.0, 0.25),
            "history_row": pick(-1, 0, 1).int(), "history_indptr": int32(0, 5, 12), "history_prompt": int32(2, 7),
            "history_ids": torch.randint(0, vocab, (12,), generator=rng),
        }
        if draw(st.booleans()):
            parents = [int(torch.randint(-1, r, (), generator=rng)) if r else -1 for r in range(rows)]
            fields |= {"parent_row": int32(*parents), "node_tokens": torch.randint(0, vocab, (rows,), generator=rng)}
    limit = draw(st.sampled_from([vocab, max(1, vocab - 3), (vocab + 1) // 2]))
    forced = torch.randint(0, vocab, (rows,), generator=rng) if draw(st.booleans()) else None
    return logits, make_ids(rows, seed=draw(st.integers(0, 99))), RowParams(**fields), limit, forced


@settings(max_examples=250, deadline=None)
@given(cases())
def test_cpp_equals_the_reference(case):
    assert_equal_backends(*case)


def test_the_comparison_sees_a_wrong_order_of_steps(monkeypatch):
    """The sabotage: top-p before top-k."""

    def swapped(z_V, params, row):
        order = z_V.sort(descending=True, stable=True).indices
        mass = torch.softmax(z_V.double(), 0)[order].cumsum(0)
        z_V[order[int((mass >= float(params.top_p[row])).int().argmax()) + 1 :]] = NEG_INF
        z_V[order[int(params.top_k[row]) :]] = NEG_INF

    monkeypatch.setattr(reference, "filter_row", swapped)
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    with pytest.raises(AssertionError):
        assert_equal_backends(logits, make_ids(1), RowParams(torch.ones(1), top_k=int32(2), top_p=torch.tensor([0.55])))


# ------------------------------------------------------------------------------------------------ skips of the argmax
def adversarial_rows(vocab: int = 20_000) -> torch.Tensor:
    ramp = torch.linspace(-30, 30, vocab)
    spike = torch.zeros(vocab)
    spike[vocab // 2] = 24.9  # a block 22.9 + 2.82 below the best may only just be skipped
    gaps = -torch.arange(vocab) % 29 * 1.0
    huge = torch.full((vocab,), 1e30)
    low = torch.full((vocab,), torch.finfo(torch.float32).min / 2)
    lone = torch.full((vocab,), NEG_INF)
    lone[-1] = -5.0
    even = spike * (10 / 24.9)  # e^10 against 20,000: ids 10 below the best win half the draws
    return torch.stack(
        [ramp, ramp.flip(0), torch.zeros(vocab), spike, spike * 1.03, even, gaps, huge, low, lone, spike - 1e4]
    )


def test_skipping_changes_no_token():
    logits = adversarial_rows().repeat(12, 1).contiguous()
    for temperature in (0.7, 1.0, 3.0):
        params = RowParams.plain(len(logits), temperature)
        ids = make_ids(len(logits), seed=int(temperature * 10))
        fast, slow = (raw_sample(logits, ids, params, skip=skip) for skip in (True, False))
        assert torch.equal(fast.tokens, slow.tokens)
        z = process_logits(logits, params)
        scores = torch.where(z == NEG_INF, NEG_INF, z + gumbel_noise(ids, logits.shape[1]))
        best = scores.max(1, keepdim=True).values
        assert torch.equal(fast.tokens, (scores == best).int().argmax(1))


def test_an_unsafe_bound_would_be_seen():
    """The sabotage: skip ids of z below the row's best z by more than 9 (about right on average, not a bound)."""
    logits = adversarial_rows().repeat(12, 1)
    ids = make_ids(len(logits))
    scores = logits + gumbel_noise(ids, logits.shape[1])
    hasty = torch.where(logits < logits.max(1, keepdim=True).values - 9, NEG_INF, scores)
    assert (hasty.argmax(1) != scores.argmax(1)).any()


# --------------------------------------------------------------------------------------- a row depends on itself only
def mixed_batch() -> tuple[torch.Tensor, NoiseIds, RowParams]:
    """Case B02: every row its own parameters, 200 draws each, one shared distribution."""
    torch.manual_seed(2)
    logits = torch.randn(1, 50).mul(2).expand(6 * 200, 50).contiguous()
    spread = lambda values, dtype=torch.float32: torch.tensor(values, dtype=dtype).repeat_interleave(200)  # noqa: E731
    params = RowParams(
        temperature=spread([0.0, 1.0, 1.0, 1.0, 0.7, 1.0]), top_k=spread([0, 0, 1, 0, 3, 0], torch.int32),
        top_p=spread([1.0, 1.0, 1.0, 1e-6, 1.0, 1.0]), min_p=spread([0.0, 0.0, 0.0, 0.0, 0.0, 0.9]),
    )
    return logits, make_ids(1200), params


def test_each_row_uses_its_own_parameters():
    logits, ids, params = mixed_batch()
    tokens = sample(logits, ids, params).tokens.view(6, 200)
    best = int(logits[0].argmax())
    for r in (0, 2, 3):
        assert (tokens[r] == best).all()
    assert len(tokens[1].unique()) > 3
    assert set(tokens[4].tolist()) == set(logits[0].topk(3).indices.tolist())
    p = logits[0].softmax(0)
    assert set(tokens[5].tolist()) == set((p >= 0.9 * p.max()).nonzero()[:, 0].tolist())


def test_a_row_is_the_same_alone_permuted_and_threaded():
    logits, ids, params = mixed_batch()
    whole = sample(logits, ids, params)
    order = torch.randperm(1200)
    take = lambda rows: RowParams(**{k: v[rows] for k, v in vars(params).items() if v is not None})  # noqa: E731
    mixed = sample(logits[order], ids[order], take(order))
    assert torch.equal(mixed.tokens, whole.tokens[order]) and torch.equal(mixed.logprobs, whole.logprobs[order])
    for r in (0, 399, 1199):
        alone = sample(logits[r : r + 1], ids[r : r + 1], take(slice(r, r + 1)))
        assert torch.equal(alone.tokens, whole.tokens[r : r + 1])
        assert torch.equal(alone.logprobs, whole.logprobs[r : r + 1])
    for threads in (2, 5):
        again = raw_sample(logits, ids, params, skip=True, threads=threads)
        assert torch.equal(again.tokens, whole.tokens) and torch.equal(again.logprobs, whole.logprobs)


def test_every_instruction_set_gives_the_same_bits():
    logits, ids, params = mixed_batch()
    params = replace(params, top_p=torch.full((1200,), 0.93))
    best, whole, noise = _C.isa(), sample(logits, ids, params), gumbel_noise(ids, 300)
    halves = torch.randn(3, 999).half()
    processed = process_logits(halves, RowParams.plain(3, 0.7))
    try:
        for isa in ("avx2", "baseline"):
            if not _C.use_isa(isa):
                continue
            again = sample(logits, ids, params)
            assert torch.equal(again.tokens, whole.tokens) and torch.equal(again.logprobs, whole.logprobs)
            assert torch.equal(gumbel_noise(ids, 300), noise)
            assert torch.equal(process_logits(halves, RowParams.plain(3, 0.7)), processed)
    finally:
        assert _C.use_isa(best)
    assert not _C.use_isa("mmx")


@pytest.mark.parametrize("batch, nodes", [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_top_p_of_tree_rows_equals_each_row_alone(batch, nodes):
    """Case B14: B requests times K nodes, B == K included, flattened to rows."""
    logits = torch.randn(batch * nodes, 37) * 2
    params = RowParams(torch.ones(len(logits)), top_p=torch.full((len(logits),), 0.9))
    whole = process_logits(logits, params)
    for r in range(len(logits)):
        alone = process_logits(logits[r : r + 1], RowParams(torch.ones(1), top_p=torch.tensor([0.9])))
        assert torch.equal(alone[0], whole[r])


# --------------------------------------------------------------------------------------------------- filters, by value
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_min_p_keeps_by_share_of_the_best(backend):
    """Case B03: p = [.6, .3, .06, .04], min_p 0.2 keeps {0, 1} with [2/3, 1/3]."""
    logits = torch.tensor([[0.6, 0.3, 0.06, 0.04]]).log()
    z = process_logits(logits, RowParams(torch.ones(1), min_p=torch.tensor([0.2])), backend=backend)
    torch.testing.assert_close(z.softmax(1), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_ties_at_a_cut_keep_the_lower_ids(backend):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]])

    def kept(**fields):
        z = process_logits(logits, RowParams(torch.ones(1), **fields), backend=backend)
        return (z[0] > NEG_INF).nonzero()[:, 0].tolist()

    assert kept(top_k=int32(2)) == [1, 3]
    assert kept(top_k=int32(4)) == [0, 1, 3, 5]
    assert kept(top_p=torch.tensor([0.4])) == [1, 3]  # 0.244 a piece: one reaches .244, two .487
    assert kept(top_p=torch.tensor([0.75])) == [0, 1, 3, 5]
    assert kept(top_k=int32(2), top_p=torch.tensor([0.5])) == [1]  # top-p of what top-k left: .5 reached by one
    assert kept(top_p=torch.tensor([0.0])) == [1]
    flat = torch.zeros(1, 300)
    z = process_logits(flat, RowParams(torch.ones(1), top_k=int32(70)), backend=backend)
    assert (z[0] > NEG_INF).nonzero()[:, 0].tolist() == list(range(70))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_equal_scores_go_to_the_lowest_id(backend):
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, make_ids(2), RowParams.plain(2, 0.0), backend=backend).tokens.tolist() == [1, 0]
    huge = torch.full((1, 40), 1e30)  # z + g == z for every id
    assert sample(huge, make_ids(1), RowParams.plain(1), backend=backend).tokens.tolist() == [0]


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_logprobs_are_of_the_processed_distribution(backend):
    """Cases D04 and D05: p = [.5, .3, .15, .05], top-p .8 keeps mass .8."""
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    params = RowParams(torch.ones(1), top_p=torch.tensor([0.79]))
    out = sample(p.log(), make_ids(1), params, forced=int64(0), want_raw=True, backend=backend)
    assert out.raw_logprobs.item() == pytest.approx(-0.6931, abs=1e-4)
    assert out.logprobs.item() == pytest.approx(-0.4700, abs=1e-4)
    assert out.logprobs.item() - out.raw_logprobs.item() == pytest.approx(math.log(1 / 0.8), abs=1e-5)
    logits = torch.tensor([[1.0, 0.0]])
    before = logits.clone()
    out = sample(logits, make_ids(1), RowParams.plain(1, 0.5), forced=int64(0), want_raw=True, backend=backend)
    assert out.raw_logprobs.item() == pytest.approx(-0.3133, abs=1e-4)
    assert out.logprobs.item() == pytest.approx(-0.1269, abs=1e-4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_forced_tokens_and_greedy_logprobs(backend):
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3).contiguous()
    params = RowParams(torch.tensor([1.0, 1.0, 0.0]), top_k=int32(2, 2, 2))
    out = sample(logits, make_ids(3), params, forced=int64(1, 2, 2), backend=backend)
    assert out.tokens.tolist() == [1, 2, 2]
    two, three = torch.tensor([2.0, 1.0]).log_softmax(0), torch.tensor([2.0, 1.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(out.logprobs, torch.stack([two[1], torch.tensor(NEG_INF), three[2]]))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_allowed_ids_and_bans(backend):
    """Case B15: allowed = {1, 5, 9} at temperature 0 and 1; an empty set has no survivor."""
    vocab, rows = 40, 300
    logits = torch.randn(1, vocab).expand(rows, vocab).contiguous()
    logits[:, 0] = 9.0
    masked = {"allowed_bits": bits([[1, 5, 9], []], vocab), "allowed_row": torch.zeros(rows, dtype=torch.int32)}
    drawn = sample(logits, draw_ids(rows), RowParams(torch.ones(rows), **masked), backend=backend)
    assert set(drawn.tokens.tolist()) == {1, 5, 9}
    renormalised = logits[0, [1, 5, 9]].log_softmax(0)
    for i, token in enumerate((1, 5, 9)):
        torch.testing.assert_close(drawn.logprobs[drawn.tokens == token].unique(), renormalised[i : i + 1])
    greedy = sample(logits, draw_ids(rows), RowParams(torch.zeros(rows), **masked), backend=backend)
    assert greedy.tokens.unique().tolist() == [int(int64(1, 5, 9)[logits[0, [1, 5, 9]].argmax()])]
    masked["allowed_row"] = torch.ones(rows, dtype=torch.int32)
    empty = sample(logits, draw_ids(rows), RowParams(torch.ones(rows), **masked), backend=backend)
    assert (empty.tokens == -1).all() and empty.logprobs.isnan().all()
    bans = RowParams(torch.zeros(1), bias_row=int32(0), bias_indptr=int32(0, 2), bias_ids=int64(0, 3),
                     bias_values=torch.tensor([NEG_INF, 50.0]))
    assert sample(logits[:1], draw_ids(1), bans, backend=backend).tokens.item() == 3


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_padding_ids_do_not_exist(backend):
    """Case E05: V = 136, tokenizer 120, padding rows biased up."""
    logits = torch.randn(200, 136)
    logits[:, 120:] += 20
    out = sample(logits, draw_ids(200), RowParams.plain(200), vocab_limit=120, backend=backend)
    assert out.tokens.max() < 120
    expected = logits[:, :120].log_softmax(1).gather(1, out.tokens[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=0)
    assert sample(logits, draw_ids(200), RowParams.plain(200), backend=backend).tokens.min() >= 120


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_give_no_token_and_harm_no_other(backend, temperature):
    """Case K01: V = 100; NaN or +inf bars the row; some -inf is fine; all -inf has no survivor."""
    logits = torch.randn(6, 100)
    clean = sample(logits, make_ids(6), RowParams.plain(6, temperature), backend=backend)
    logits[1, 99], logits[2, 0], logits[3] = math.nan, math.inf, NEG_INF
    logits[4, clean.tokens[4] - 1] = NEG_INF
    out = sample(logits, make_ids(6), RowParams.plain(6, temperature), want_raw=True, backend=backend)
    assert out.tokens.tolist() == [int(t) if r not in (1, 2, 3) else -1 for r, t in enumerate(clean.tokens)]
    for values in (out.logprobs, out.raw_logprobs):
        assert values.isnan().tolist() == [False, True, True, True, False, False]
    assert torch.equal(out.logprobs[[0, 5]], clean.logprobs[[0, 5]])


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_penalties_follow_the_rows_own_branch(backend):
    """Case B06: siblings 3 and 4 under the root; the child of 4 is penalised for 4, not for 3, and the other way."""
    # Rows: 0 root, 1 node 3, 2 node 4, 3 child of 3, 4 child of 4.
    params = RowParams(
        torch.ones(5), presence=torch.full((5,), 2.0), history_row=torch.zeros(5, dtype=torch.int32),
        history_indptr=int32(0, 3), history_ids=int64(0, 1, 1), history_prompt=int32(1),
        parent_row=int32(-1, 0, 0, 1, 2), node_tokens=int64(1, 3, 4, 5, 5),
    )
    z = process_logits(torch.zeros(5, 8), params, backend=backend)
    penalised = [(row == -2).nonzero()[:, 0].tolist() for row in z]
    assert penalised == [[1], [1, 3], [1, 4], [1, 3, 5], [1, 4, 5]]  # the prompt's 0 counts for repetition only
    counted = replace(params, presence=None, frequency=torch.full((5,), 0.5), repetition=torch.full((5,), 2.0))
    z = process_logits(torch.full((5, 8), 3.0), counted, backend=backend)
    assert z[4].tolist() == [1.5, 0.5, 3.0, 3.0, 1.0, 1.0, 3.0, 3.0]  # 1 stands twice in the output
    negative = process_logits(torch.full((5, 8), -3.0), replace(counted, frequency=None), backend=backend)
    assert negative[0].tolist() == [-6.0, -6.0] + [-3.0] * 6


def test_half_precision_is_upcast_exactly():
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15).short().view(dtype)
        row = every[every.isfinite()][None].contiguous()
        z = process_logits(row, RowParams.plain(1))
        assert torch.equal(z, row.float())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": torch.ones(2).double()}, r"temperature: expected float32 \[R=2\], got float64 \[2\]; cast"),
        ({"temperature": torch.tensor([1.0, math.nan])}, r"params.temperature: expected values in \[0"),
        ({"top_p": torch.tensor([1.0, 1.5])}, r"top_p: expected values in \[0.0, 1.0\], got 1.5 at flat index 1"),
        ({"top_k": torch.tensor([1, 2])}, r"params.top_k: expected int32 .* cast with .int\(\)"),
        ({"repetition": torch.zeros(2)}, r"params.repetition: expected values"),
        ({"allowed_row": int32(0, 0)}, r"params.allowed_bits: expected a tensor beside"),
        ({"parent_row": int32(-1, 1), "node_tokens": int64(0, 0)}, r"params.parent_row - row: expected values"),
        ({"history_row": int32(0, 1), "history_indptr": int32(0, 1), "history_ids": int64(0),
          "history_prompt": int32(1)}, r"params.history_row: expected values in \[-1, 0\], got 1"),
        ({"bias_row": int32(0, 0), "bias_indptr": int32(0, 1), "bias_ids": int64(9), "bias_values": torch.ones(1)},
         r"params.bias_ids: expected values in \[0, 7\], got 9"),
    ],
)
def test_errors_teach(change, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(2, 8), make_ids(2), replace(RowParams.plain(2), **change))


def test_errors_of_the_other_arguments():
    logits, ids, params = torch.zeros(2, 8), make_ids(2), RowParams.plain(2)
    with pytest.raises(ValueError, match=r"logits: expected float32/bfloat16/float16"):
        sample(logits.double(), ids, params)
    with pytest.raises(ValueError, match=r"logits: expected contiguous .* call .contiguous\(\)"):
        sample(torch.zeros(8, 2).t(), ids, params)
    with pytest.raises(ValueError, match=r"vocab_limit: expected None or an int in \[1, V=8\], got 9"):
        sample(logits, ids, params, vocab_limit=9)
    with pytest.raises(ValueError, match=r"forced: expected values in \[0, 7\], got 8"):
        sample(logits, ids, params, forced=int64(0, 8))
    with pytest.raises(ValueError, match=r"backend: expected one of"):
        sample(logits, ids, params, backend="triton")
