"""Draft proposals: C++ against the reference over random parameters, and what the law wants of them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import bits, draw_ids, int32, int64, make_ids
from tlt_kernels import DraftTop, RowParams, noisy_top_k, process_logits, sample
from tlt_kernels.reference import draft as reference_draft
from torch import Tensor

NEG_INF = -math.inf


def assert_same(ours: DraftTop, theirs: DraftTop, live: Tensor) -> None:
    assert torch.equal(ours.tokens[live], theirs.tokens[live])
    assert torch.equal(ours.draft_ids[live], theirs.draft_ids[live])
    for name in ("scores", "logprobs"):
        torch.testing.assert_close(getattr(ours, name)[live], getattr(theirs, name)[live], atol=1e-5, rtol=1e-6)


def clear_of_top_p(logits: Tensor, params: RowParams, targets: Tensor, vocab: int, limit: int) -> Tensor:
    """Rows whose top-p cut is farther than 1e-6 from its threshold."""
    if params.top_p is None:
        return torch.ones(len(logits), dtype=torch.bool)
    off = replace(params, top_p=torch.ones_like(params.top_p))
    spread = reference_draft.spread(logits, targets, vocab)
    z = process_logits(spread, off, vocab_limit=limit, backend="reference")
    mass = torch.softmax(z.double(), 1).sort(dim=1, descending=True, stable=True).values.cumsum(1)
    return ((mass - params.top_p[:, None]).abs() > 1e-6).all(1) | (params.top_p == 1)


@st.composite
def cases(draw):
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 31, 64, 257, 1500]))
    vocab = columns * draw(st.sampled_from([1, 3]))
    targets = torch.randperm(vocab, generator=rng)[:columns].sort().values
    d2t = (targets - torch.arange(columns)).to(draw(st.sampled_from([torch.int32, torch.int64])))
    logits = torch.randn(rows, columns, generator=rng) * draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    if draw(st.booleans()):
        logits[torch.rand(rows, columns, generator=rng) < 0.3] = NEG_INF
    if draw(st.booleans()):
        logits[0, 0] = draw(st.sampled_from([math.nan, math.inf]))
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    pick = lambda *values: torch.tensor([values[i] for i in torch.randint(len(values), (rows,), generator=rng)])  # noqa: E731
    given: dict = {"temperature": pick(0.0, 0.01, 0.6, 1.0, 2.0)}
    if draw(st.booleans()):
        given |= {"top_k": pick(0, 1, 3, 40).int(), "top_p": pick(0.5, 0.9, 1.0), "min_p": pick(0.0, 0.02, 0.3)}
    if draw(st.booleans()):
        allowed = [torch.randperm(vocab, generator=rng)[: 1 + vocab // 2].tolist() for _ in range(2)]
        given |= {"allowed_row": pick(-1, 0, 1).int(), "allowed_bits": bits(allowed, vocab)}
    if draw(st.booleans()):
        values = torch.randn(8, generator=rng) * 3
        values[::3] = NEG_INF
        given |= {
            "bias_row": pick(-1, 0, 1).int(), "bias_indptr": int32(0, 3, 8),
            "bias_ids": torch.randint(0, vocab, (8,), generator=rng), "bias_values": values,
        }
    if draw(st.booleans()):
        given |= {
            "repetition": pick(1.0, 1.3), "presence": pick(0.0, 0.7), "frequency": pick(0.0, 0.2),
            "history_row": pick(-1, 0, 1).int(), "history_indptr": int32(0, 12, 40),
            "history_ids": torch.randint(0, vocab, (40,), generator=rng), "history_prompt": int32(5, 0),
            "branch_tokens": torch.randint(-1, vocab, (rows, 4), generator=rng),
        }
    limit = draw(st.sampled_from([vocab, max(1, vocab - 3)]))
    mapping = {} if vocab == columns else {"d2t": d2t, "target_vocab": vocab}
    return logits, RowParams(**given), targets, vocab, limit, mapping


@given(cases(), st.sampled_from([1, 4, 16, 700]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_backends_agree(case, k: int, noise: bool) -> None:
    logits, params, targets, vocab, limit, mapping = case
    ids = make_ids(len(logits))
    options = {"vocab_limit": limit, "noise": noise, **mapping}
    ours = noisy_top_k(logits, ids, params, k, backend="cpp", **options)
    theirs = noisy_top_k(logits, ids, params, k, backend="reference", **options)
    assert_same(ours, theirs, clear_of_top_p(logits, params, targets, vocab, limit))
    there = ours.tokens >= 0
    assert torch.equal(targets[ours.draft_ids[there]], ours.tokens[there])


def test_a_real_vocabulary() -> None:
    """Many spans of ids, and a bound that rises between them."""
    rows, vocab = 4, 151_936
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2
    ids, params = make_ids(rows), RowParams(torch.tensor([1.0, 0.6, 0.0, 3.0]))
    ours, theirs = (noisy_top_k(logits, ids, params, 16, backend=b) for b in ("cpp", "reference"))
    assert_same(ours, theirs, torch.ones(rows, dtype=torch.bool))


def test_exactly_k_found_so_far() -> None:
    """The bound is the k-th best even when no more than k have been seen: 8 in the first span of 1024 ids, 4 after."""
    rows, vocab = 100, 4096
    logits = torch.full((rows, vocab), NEG_INF)
    for row in range(rows):
        logits[row, torch.randperm(1024, generator=torch.Generator().manual_seed(row))[:8]] = 0.0
    logits[:, 1500:1504] = 0.0
    ids, params = make_ids(rows), RowParams.plain(rows)
    ours, theirs = (noisy_top_k(logits, ids, params, 8, backend=b) for b in ("cpp", "reference"))
    assert_same(ours, theirs, torch.ones(rows, dtype=torch.bool))


FULL = {
    "plain": {},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition": 1.4, "presence": 0.6, "frequency": 0.3},
}


def full_params(rows: int, what: str, temperature: float) -> RowParams:
    given: dict = {name: torch.full((rows,), value) for name, value in FULL[what].items()}
    if "top_k" in given:
        given["top_k"] = given["top_k"].int()
    if what == "penalties":
        given |= {
            "history_row": torch.zeros(rows, dtype=torch.int32), "history_indptr": int32(0, 6),
            "history_ids": int64(3, 3, 1, 7, 8, 8), "history_prompt": int32(2), "bias_row": torch.zeros(rows).int(),
            "bias_indptr": int32(0, 2), "bias_ids": int64(4, 9), "bias_values": torch.tensor([2.0, NEG_INF]),
        }
    return RowParams(torch.full((rows,), temperature), **given)


@pytest.mark.parametrize("what", FULL)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_drafter_equal_to_the_target_is_always_right(what: str, temperature: float) -> None:
    """q = p, same identity, same parameters: the best draft is the token that the sampler draws; without the noise, or
    with another row's parameters, it is not."""
    rows = 400
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(1)) * 2
    ids, params = make_ids(rows), full_params(rows, what, temperature)
    drawn = sample(logits, ids, params).tokens
    best = noisy_top_k(logits, ids, params, 1).tokens[:, 0]
    assert torch.equal(best, drawn)
    if temperature > 0:
        assert (noisy_top_k(logits, ids, params, 1, noise=False).tokens[:, 0] == drawn).float().mean() < 0.8
        shifted = replace(ids, positions=(ids.positions + 1) % 2**32)
        assert (noisy_top_k(logits, shifted, params, 1).tokens[:, 0] == drawn).float().mean() < 0.8
    if what == "penalties":
        assert not torch.equal(noisy_top_k(logits, ids, RowParams(params.temperature), 1).tokens[:, 0], drawn)


def test_noise_is_read_at_target_ids() -> None:
    """A drafter of half the vocabulary that knows the target's distribution on it proposes what the target draws
    whenever that can be proposed at all."""
    rows, vocab = 2000, 40
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    ids, params = make_ids(rows), RowParams.plain(rows)
    targets = torch.arange(1, vocab, 2)
    drawn = sample(logits, ids, params).tokens
    known = torch.isin(drawn, targets)
    options = {"d2t": targets - torch.arange(len(targets)), "target_vocab": vocab}
    got = noisy_top_k(logits[:, targets].contiguous(), ids, params, 1, **options)
    assert torch.equal(got.tokens[known, 0], drawn[known])
    assert torch.equal(targets[got.draft_ids[:, 0]], got.tokens[:, 0])
    unmapped = noisy_top_k(logits[:, targets].contiguous(), ids, params, 1)  # noise read at draft ids: coupling lost
    assert (targets[unmapped.tokens[known, 0]] == drawn[known]).float().mean() < 0.5


def test_the_first_proposal_is_a_draw_from_q() -> None:
    """Over positions, the best draft has the law of q / T: chi-square, p > 1e-3; a wrong temperature fails it."""
    rows, vocab = 20_000, 12
    logits = torch.linspace(-2, 2, vocab).expand(rows, vocab).contiguous()
    ids = draw_ids(rows, key=99)
    law = torch.softmax(logits[0].double() / 0.8, 0) * rows

    def chi_square(temperature: float) -> float:
        best = noisy_top_k(logits, ids, RowParams.plain(rows, temperature), 3).tokens[:, 0]
        return float(((best.bincount(minlength=vocab) - law) ** 2 / law).sum())

    assert chi_square(0.8) < 31.26  # 11 degrees of freedom, p = 1e-3
    assert chi_square(1.0) > 31.26


def test_branches_of_rows_and_of_lists_are_the_same_history() -> None:
    """branch_tokens says what parent_row and node_tokens say, to the sampler too."""
    rows, vocab = 8, 30
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    parents, tokens = int32(-1, 0, 1, 1, 0, 4, 5, 6), int64(0, 5, 6, 7, 8, 8, 9, 5)
    branch = torch.full((rows, 5), -1)
    for row in range(rows):
        node, at = row, 0
        while int(parents[node]) >= 0:
            branch[row, at], node, at = tokens[node], int(parents[node]), at + 1
    shared = {"presence": torch.full((rows,), 3.0), "frequency": torch.full((rows,), 0.5)}
    plain = RowParams.plain(rows)
    by_rows = replace(plain, parent_row=parents, node_tokens=tokens, **shared)
    by_list = replace(plain, branch_tokens=branch, **shared)
    for backend in ("cpp", "reference"):
        z = process_logits(logits, by_list, backend=backend)
        assert torch.equal(z, process_logits(logits, by_rows, backend=backend))
        assert not torch.equal(z, process_logits(logits, replace(plain, **shared), backend=backend))
        draft = noisy_top_k(logits, make_ids(rows), by_list, 4, backend=backend)
        assert torch.equal(draft.tokens, noisy_top_k(logits, make_ids(rows), by_rows, 4, backend=backend).tokens)
    with pytest.raises(ValueError, match="branch_tokens: expected None beside parent_row"):
        noisy_top_k(logits, make_ids(rows), replace(by_rows, branch_tokens=branch), 4)


def test_errors_teach() -> None:
    logits, ids, params = torch.randn(2, 6), make_ids(2), RowParams.plain(2)
    for options, message in (
        ({"d2t": torch.zeros(6, dtype=torch.int64)}, "target_vocab: expected the target's number of ids"),
        ({"target_vocab": 9}, "target_vocab: expected None or C=6 without d2t"),
        ({"d2t": torch.tensor([0, 0, 0, 0, 0, 4]), "target_vocab": 9}, r"d2t \+ draft id: expected values in \[0, 8\]"),
        ({"d2t": torch.tensor([1, 0, 0, 0, 0, 0]), "target_vocab": 9}, "d2t: expected target ids .* that rise"),
        ({"d2t": torch.zeros(5, dtype=torch.int64), "target_vocab": 9}, r"d2t: expected int64/int32 \[C=6\]"),
        ({"vocab_limit": 7}, r"vocab_limit: expected None or an int in \[1, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            noisy_top_k(logits, ids, params, 2, **options)
    for k in (0, 1025):
        with pytest.raises(ValueError, match="k: expected an int in"):
            noisy_top_k(logits, ids, params, k)


def test_threads_do_not_matter() -> None:
    logits, ids = torch.randn(16, 300), make_ids(16)
    one, before = {}, torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        one[count] = noisy_top_k(logits, ids, RowParams.plain(16), 5)
    torch.set_num_threads(before)
    assert all(torch.equal(getattr(one[1], f.name), getattr(one[2], f.name)) for f in fields(DraftTop))


def test_identities_stay_rows_own() -> None:
    """A row alone gives what it gives in a batch."""
    logits, ids = torch.randn(5, 300), make_ids(5)
    whole = noisy_top_k(logits, ids, RowParams.plain(5), 4)
    for row in range(5):
        one = slice(row, row + 1)
        alone = noisy_top_k(logits[one], ids[one], RowParams.plain(1), 4)
        assert torch.equal(alone.tokens[0], whole.tokens[row]) and torch.equal(alone.scores[0], whole.scores[row])
