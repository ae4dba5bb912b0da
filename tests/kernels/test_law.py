"""The law of sampling: what the C++ op emits is distributed as the processed softmax, and draws of different identity
are independent. 2.5e6 draws a test.

Family-wise level 1e-4 over at most 24 tests (Bonferroni), so each fails by chance once in 240,000 runs. Power, computed
in test_power: a law at total variation 0.003 from the right one is caught with probability above 0.99 at up to 16
cells, whatever its shape. Seeds are fixed: a pass stays a pass.

Tail: 1000 ids of probability 1e-7 each are checked as a group (100 expected hits in 1e6 draws: a factor of 1.5 is
seen); single ids of 1e-7 through injected extreme words, where the chance to win is known in closed form; the noise's
own tail in test_noise.py (2e7 values) and bench/law.py (1e9).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from law_checks import ALPHA, CHUNK, DRAWS, TESTS, bulk_ids, draw, expected, joint, p_value, power
from tlt_kernels import NoiseIds, RowParams, gumbel_noise
from tlt_kernels.reference import noise as reference_noise
from tlt_kernels.reference import sampling as reference

from tlt_engine.rng import noise_key

BASE = np.array([1.5, 0.2, -0.7, 2.1, -3.0, 0.9, 0.9, -1.2, 1.1, -0.1, 0.0, 1.9])
TIED = np.array([1.0, 2.0, 1.0, 2.0, 0.0, 1.0, 0.0, 1.0])
BARRED = np.where(np.arange(12) % 3 == 0, -np.inf, BASE)
HISTORY = ((3, 11, 4), (0, 3, 3, 7))

LAWS = {
    "temperature 0.01": (BASE / 100, {"temperature": 0.01}),
    "temperature 0.6": (BASE, {"temperature": 0.6}),
    "temperature 1": (BASE, {}),
    "temperature 2": (BASE, {"temperature": 2.0}),
    "top-k over ties": (TIED, {"top_k": 4}),
    "top-p": (BASE, {"top_p": 0.8}),
    "min-p": (BASE, {"min_p": 0.15}),
    "min-p, top-k, top-p": (BASE, {"temperature": 1.3, "min_p": 0.1, "top_k": 6, "top_p": 0.85}),
    "penalties": (BASE, {"repetition": 1.3, "presence": 0.5, "frequency": 0.2, "history": HISTORY}),
    "ties": (np.zeros(16), {}),
    "zero probabilities": (BARRED, {}),
}
PAIR = np.log([0.4, 0.3, 0.2, 0.1])
PAIR_LAW = np.outer([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("case", LAWS)
def test_marginal(case):
    logits, fields = LAWS[case]
    tokens = draw(logits, bulk_ids(len(case)), **fields)
    assert tokens.min() >= 0
    assert p_value(np.bincount(tokens, minlength=len(logits)), expected(logits, **fields)) > ALPHA


def test_power():
    cells = [int((expected(logits, **fields) > 0).sum()) for logits, fields in LAWS.values()] + [PAIR_LAW.size]
    assert min(power(c, DRAWS) for c in cells if c > 1) > 0.99
    assert len(LAWS) + len(PAIRS) + 3 <= TESTS  # and the tail, the extreme words, the equality rule


def test_checker_sees_a_total_variation_of_0003():
    """Good draws against a law moved by 0.003 between its two likeliest ids."""
    logits, fields = LAWS["temperature 1"]
    wrong = expected(logits, **fields)
    wrong[np.argsort(-wrong)[:2]] += [0.003, -0.003]
    assert p_value(np.bincount(draw(logits, bulk_ids(2), **fields), minlength=len(logits)), wrong) < ALPHA


TAIL_IDS = 1000


def tail_logits() -> np.ndarray:
    return np.append(np.log(1 - TAIL_IDS * 1e-7), np.full(TAIL_IDS, np.log(1e-7)))


def test_tail_ids_as_a_group():
    tokens = draw(tail_logits(), bulk_ids(3), draws=1_000_000)
    hits = int((tokens > 0).sum())
    assert p_value(np.array([10**6 - hits, hits]), np.array([1 - TAIL_IDS * 1e-7, TAIL_IDS * 1e-7])) > ALPHA


def extreme_wins(gumbel, tail_words: torch.Tensor) -> np.ndarray:
    """[losses, wins] of an id of probability 1e-7 against one of 1, its word given, the other's random."""
    head = torch.randint(0, 2**32, tail_words.shape, generator=torch.Generator().manual_seed(5))
    noise = torch.stack([gumbel(head), gumbel(tail_words)], 1)
    logits = torch.tensor([0.0, np.log(1e-7)]).expand_as(noise)
    scores = logits + noise
    wins = int((scores.argmax(1) == 1).sum())
    return np.array([len(noise) - wins, wins])


def win_chance() -> float:
    """Words 0 .. 4095: E = w to 1e-6, and the id wins if the other's E exceeds 1e7 * w."""
    w = (np.arange(4096) + 0.5) / 2**32
    return float(np.exp(-np.float32(np.exp(-np.float32(np.log(1e-7)))) * w).mean())


def extreme_words() -> torch.Tensor:
    return torch.randint(0, 4096, (DRAWS,), generator=torch.Generator().manual_seed(6))


def test_extreme_words_win_as_often_as_they_should():
    wins = win_chance()
    assert p_value(extreme_wins(reference_noise.gumbel, extreme_words()), np.array([1 - wins, wins])) > ALPHA


def test_u_that_rounds_to_one_fails():
    """The sabotage: -log(-log u) in fp32; its winning words are those at the top, 128 of which give +inf."""
    def naive(words):
        u = (words.float() + 0.5) * 2.0**-32
        return -(-u.log()).log()

    wins = win_chance()
    assert p_value(extreme_wins(naive, 2**32 - 1 - extreme_words()), np.array([1 - wins, wins])) < ALPHA


# ------------------------------------------------------------------------------------------------------- independence
def consecutive_keys(first: int, count: int) -> NoiseIds:
    index = torch.arange(first, first + count)
    return NoiseIds(index, torch.full_like(index, 7), torch.zeros_like(index), torch.zeros_like(index))


def turn(seed: int, prompt: list[int], first_position: int, *, drop_prompt: bool = False):
    """One turn of a chat: a prompt, and tokens from first_position on."""
    def ids(first: int, count: int) -> NoiseIds:
        index = torch.arange(first, first + count)
        # A fresh seed every 5000 tokens: a turn of millions of tokens would be one key only.
        keys = torch.tensor([noise_key(seed + b, [] if drop_prompt else prompt) for b in range(DRAWS // 5000)])
        zeros = torch.zeros_like(index)
        return NoiseIds(keys[index // 5000], first_position + index % 5000, zeros, zeros)

    return ids


def neighbours_share(first: int, count: int) -> NoiseIds:
    ids = consecutive_keys(first, count)
    return NoiseIds(ids.keys - ids.keys % 2, ids.positions, ids.samples, ids.segments)


def pair_p(a, b=None, draws: int = DRAWS) -> float:
    """p-value of the joint law of two draws against the product. b=None: draws 2i and 2i + 1 of `a`."""
    if b is None:
        x = draw(PAIR, a, draws=2 * draws)
        return p_value(joint(x[::2], x[1::2], 4), PAIR_LAW)
    return p_value(joint(draw(PAIR, a, draws=draws), draw(PAIR, b, draws=draws), 4), PAIR_LAW)


LONG = list(range(900, 940))  # turn 1; turn 2's prompt is shorter than turn 1's text, so absolute positions overlap
SHORT = LONG[:20]
PAIRS = {
    "two samples": lambda: pair_p(bulk_ids(1), bulk_ids(1, sample_index=1)),
    "seeds s and s + 1": lambda: pair_p(bulk_ids(2), bulk_ids(3)),
    "neighbouring rows": lambda: pair_p(consecutive_keys),
    "neighbouring positions": lambda: pair_p(bulk_ids(4)),
    "two segments": lambda: pair_p(bulk_ids(5), bulk_ids(5, segment=1)),
    "two turns": lambda: pair_p(turn(6, LONG, 40), turn(6, SHORT, 40)),
}
FEW = DRAWS // 10  # what a sabotage does to a joint law is gross
SABOTAGES = {
    "sample index dropped": lambda: pair_p(bulk_ids(1), bulk_ids(1), FEW),
    "segment dropped": lambda: pair_p(bulk_ids(5), bulk_ids(5), FEW),
    "prompt dropped from the key": lambda: pair_p(
        turn(6, LONG, 40, drop_prompt=True), turn(6, SHORT, 40, drop_prompt=True), FEW
    ),
    # Absolute positions start at 40 and 20; counted from the output both start at 0.
    "position relative to the output": lambda: pair_p(
        turn(6, LONG, 40 - len(LONG), drop_prompt=True), turn(6, SHORT, 20 - len(SHORT), drop_prompt=True), FEW
    ),
    "a row's noise used for its neighbour": lambda: pair_p(neighbours_share, draws=FEW),
}


@pytest.mark.parametrize("case", PAIRS)
def test_draws_are_independent(case):
    assert PAIRS[case]() > ALPHA


@pytest.mark.parametrize("case", SABOTAGES)
def test_sabotaged_identity_fails(case):
    assert SABOTAGES[case]() < ALPHA


# ------------------------------------------------------------------------------------- rules that bias what is emitted
def noise_in_bulk(vocab: int, draws: int = DRAWS) -> torch.Tensor:
    ids = bulk_ids(9)
    return torch.cat([gumbel_noise(ids(first, CHUNK), vocab) for first in range(0, draws, CHUNK)])


def test_noise_before_the_filter_fails():
    """The sabotage: argmax over all ids, then the filter (a filtered winner gives way to the best logit)."""
    logits, fields = LAWS["min-p, top-k, top-p"]
    one_row = torch.from_numpy(logits).float()[None]
    params = RowParams(**{k: torch.tensor([v], dtype=torch.int32 if k == "top_k" else None) for k, v in fields.items()})
    z = reference.process_logits(one_row, params)[0]
    tokens = (one_row / fields["temperature"] + noise_in_bulk(len(logits), FEW)).argmax(1)
    tokens = torch.where(z[tokens] > -np.inf, tokens, z.argmax())
    assert p_value(np.bincount(tokens, minlength=len(logits)), expected(logits, **fields)) < ALPHA


P, Q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.15, 0.35, 0.4])  # as in docs/guarantees.md


def test_equality_rule_with_a_shared_noise_draft():
    """The draft argmax(log q + g) sees the target's noise; the emitted token never depends on it."""
    g = noise_in_bulk(4)
    target, proposal = (P.log() + g).argmax(1), (Q.log() + g).argmax(1)
    emitted = torch.where(proposal == target, proposal, target)
    assert p_value(np.bincount(emitted, minlength=4), P.double().numpy()) > ALPHA


def test_rejection_rule_with_shared_noise_fails():
    """The sabotage: p/q rejection whose draft and recovery draws share the noise."""
    g = noise_in_bulk(4, FEW)
    proposal = (Q.log() + g).argmax(1)
    u = torch.rand(len(g), generator=torch.Generator().manual_seed(1))
    recovered = ((P - Q).clamp(min=0).log() + g).argmax(1)
    emitted = torch.where(u < P[proposal] / Q[proposal], proposal, recovered)
    assert p_value(np.bincount(emitted, minlength=4), P.double().numpy()) < ALPHA
