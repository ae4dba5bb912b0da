"""Ranking, beam and choice of a learned draft tree, on numbers written down by hand."""

from __future__ import annotations

import math

import pytest
import torch
from tlt_kernels.params import DraftTop
from torch import Tensor

from tlt_engine.speculation.candidates import Candidates, log_chances
from tlt_engine.speculation.sharpness import LEAST, MOST, Sharpness
from tlt_engine.speculation.tree import DraftTree


def top_of(q: list[float], noise: list[float], k: int) -> DraftTop:
    logprobs = torch.tensor(q).log()
    scores = logprobs + torch.tensor(noise)
    ids = scores.argsort(descending=True)[:k]
    return DraftTop(ids[None], ids[None], scores[ids][None], logprobs[ids][None])


def sharp(value: float) -> Tensor:
    return torch.tensor([value])


NOISY, GREEDY = torch.tensor([False]), torch.tensor([True])
Q, NOISE = [0.5, 0.3, 0.15, 0.05], [-0.2, 1.5, 0.1, 2.9]


def test_a_race_that_all_ids_run_is_a_softmax_of_scores() -> None:
    top = top_of(Q, NOISE, 4)
    chances = log_chances(top, NOISY, sharp(0.7)).exp()
    assert chances.sum() == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(chances, (0.7 * top.scores).softmax(-1), atol=1e-4, rtol=0)
    assert top.tokens[0].tolist() == [1, 3, 0, 2]


def test_ids_outside_the_best_run_as_one_that_is_not_among_the_best() -> None:
    for k in (1, 2, 3):
        top = top_of(Q, NOISE, k)
        chances = log_chances(top, NOISY, sharp(1.0)).exp()[0]
        rest = 1 - chances.sum()
        assert 0 < rest <= chances[-1] + 1e-6
        mass = 1 - sum(Q[i] for i in top.tokens[0].tolist())
        expected = min(mass * math.exp(0.58), math.exp(float(top.scores[0, -1])))
        assert float(rest / chances[0]) == pytest.approx(expected / math.exp(float(top.scores[0, 0])), rel=1e-3)


def test_without_noise_the_chance_is_q_or_q_sharpened() -> None:
    top = top_of(Q, [0.0] * 4, 2)
    assert log_chances(top, NOISY, None) is top.logprobs
    torch.testing.assert_close(log_chances(top, GREEDY, sharp(1.0)).exp(), torch.tensor([[0.5, 0.3]]))
    expected = torch.tensor([0.5, 0.3, 0.2]) ** 2  # the rest is 0.15 + 0.05
    torch.testing.assert_close(log_chances(top, GREEDY, sharp(2.0)).exp()[0], (expected / expected.sum())[:2])


def test_absent_ids_have_no_chance_and_leave_nothing_undefined() -> None:
    none = DraftTop(*(torch.full((1, 2), v) for v in (-1, -1)), *(torch.full((1, 2), -math.inf) for _ in range(2)))
    one = DraftTop(torch.tensor([[4, -1]]), torch.tensor([[4, -1]]), torch.tensor([[0.3, -math.inf]]),
                   torch.tensor([[0.0, -math.inf]]))
    assert log_chances(none, NOISY, sharp(0.7))[0].tolist() == [-math.inf, -math.inf]
    assert log_chances(one, NOISY, sharp(0.7))[0].tolist() == [pytest.approx(0, abs=1e-6), -math.inf]


def level(candidates: Candidates, tokens: list[int], chances: list[float], width: int = 1) -> None:
    """One request: children of the `width` best of the newest level, or of the root."""
    if not candidates._levels:
        above, parents = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    else:
        _, parents, _, above = candidates.best(width)
    candidates.add(torch.tensor([tokens]), torch.tensor([chances]).log(), above, parents)


def fresh(max_depth: int = 9, stops: tuple[int, ...] = (), min_chance: float = 0.0) -> Candidates:
    return Candidates(torch.tensor([max_depth]), torch.tensor([stops], dtype=torch.int64).view(1, -1), min_chance)


def edges(tree: DraftTree) -> set[tuple[int, ...]]:
    """Paths of all nodes below the root."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return set(paths[1:])


def two_levels(**limits: object) -> Candidates:
    candidates = fresh(**limits)
    level(candidates, [10, 11, 12], [0.6, 0.3, 0.1])
    level(candidates, [20, 21, 30, 31], [0.5, 0.4, 0.9, 0.05], width=2)
    return candidates


def test_the_likeliest_nodes_are_kept_with_their_parents() -> None:
    kept = lambda budget: edges(two_levels().trees([1], [budget], None)[0][0])  # noqa: E731
    assert kept(1) == set()
    assert kept(3) == {(10,), (11,)}  # 0.6, 0.3; then (10, 20) and its twin's 0.30, 0.27 of (11, 30)
    assert kept(5) == {(10,), (10, 20), (11,), (11, 30)}
    assert len(kept(99)) == 7


def test_stops_depths_and_small_chances_cut_the_tree() -> None:
    assert edges(two_levels(max_depth=1).trees([1], [99], None)[0][0]) == {(10,), (11,), (12,)}
    assert edges(two_levels(min_chance=0.28).trees([1], [99], None)[0][0]) == {(10,), (11,), (10, 20)}
    stopped = edges(two_levels(stops=(10,)).trees([1], [99], None)[0][0])
    assert (10,) in stopped and not any(path[0] == 10 and len(path) > 1 for path in stopped)


def test_the_beam_follows_the_path_not_the_last_step() -> None:
    places, indices, tokens, scores = two_levels().best(2)
    assert tokens.tolist() == [[20, 30]] and places.tolist() == [[0, 2]] and indices.tolist() == [[4, 6]]
    assert scores.exp().tolist() == [pytest.approx([0.30, 0.27])]


def test_another_drafters_nodes_compete_and_siblings_are_one() -> None:
    other = DraftTree((1, 11, 40, 50), (-1, 0, 1, 0))
    merged = two_levels().trees([1], [99], [(other, [1.0, 0.8, 0.7, 0.01])])[0][0]
    assert edges(merged) == edges(two_levels().trees([1], [99], None)[0][0]) | {(11, 40), (50,)}
    few = two_levels().trees([1], [4], [(other, [1.0, 0.8, 0.7, 0.01])])[0][0]
    assert edges(few) == {(11,), (11, 40), (10,)}


def test_a_tree_for_each_request() -> None:
    candidates = Candidates(torch.tensor([1, 2]), torch.zeros(2, 0, dtype=torch.int64), 0.0)

    def both(values: list[list[float]]) -> Tensor:
        return torch.tensor(values)

    candidates.add(both([[5, 6], [7, -1]]).long(), both([[0.6, 0.4], [0.9, 0.1]]).log(), torch.zeros(2, 1),
                   torch.zeros(2, 1, dtype=torch.int64))
    _, parents, _, above = candidates.best(1)
    candidates.add(both([[8, 9], [8, 9]]).long(), both([[0.6, 0.4], [0.6, 0.4]]).log(), above, parents)
    (first, second), expected = candidates.trees([1, 2], [9, 3], None)
    assert edges(first) == {(5,), (6,)} and edges(second) == {(7,), (7, 8)}
    assert expected == pytest.approx([0.6 + 0.4, 0.9 + 0.9 * 0.6])


# ---------------------------------------------------------------- calibration


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("true", [0.5, 3.0])
def test_sharpness_moves_to_where_estimates_come_true(greedy: bool, true: float) -> None:
    """A world in which a pass accepts true ** (1 / 3) drafts and is expected to accept value ** (1 / 3)."""
    sharpness, fixed = Sharpness(), Sharpness(1.5)
    for i in range(64 * 40):
        accepted = math.floor((i + 1) * true ** (1 / 3)) - math.floor(i * true ** (1 / 3))
        for s in (sharpness, fixed):
            s.count(greedy, s.value[greedy] ** (1 / 3), accepted)
    assert sharpness.value[greedy] == pytest.approx(true, rel=0.1)
    assert sharpness.value[not greedy] == Sharpness().value[not greedy]
    assert fixed.value == {False: 1.5, True: 1.5}


def test_sharpness_stays_within_bounds() -> None:
    low, high = Sharpness(), Sharpness()
    for _ in range(64 * 100):
        low.count(False, 3.0, 0)
        high.count(False, 0.0, 3)
    assert (low.value[False], high.value[False]) == (LEAST, MOST)
