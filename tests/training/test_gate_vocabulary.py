"""When to train, and which ids a reduced draft vocabulary holds."""

from __future__ import annotations

import pytest
import torch

from tests.training.drafters import random_texts, tiny_drafter, tiny_target
from tlt_engine.training.gate import GateConfig, TrainingGate
from tlt_engine.training.vocabulary import choose_vocabulary, count_tokens, coverage, vocabulary_maps


def decisions(gate: TrainingGate, lengths: list[float | None]) -> list[bool]:
    return [gate.decide(length) for length in lengths]


def test_a_steady_drafter_is_left_alone() -> None:
    gate = TrainingGate(GateConfig(decline=0.05))
    assert not any(decisions(gate, [2.53 + 0.03 * (i % 2) for i in range(36)]))


def test_a_decline_trains_until_half_of_it_is_made_good() -> None:
    gate = TrainingGate(GateConfig(decline=0.10))
    assert decisions(gate, [3.0, 2.8, 2.69, 2.75, 2.84, 2.86, 2.75]) == [
        False, False, True, True, True, False, False,
    ]


def test_a_slow_decline_counts_from_the_best_ever() -> None:
    gate = TrainingGate(GateConfig(decline=0.10))
    assert decisions(gate, [3.0, 2.95, 2.9, 2.85, 2.8, 2.75, 2.69]) == [False] * 6 + [True]


def test_a_best_that_never_comes_back_is_given_up() -> None:
    gate = TrainingGate(GateConfig(decline=0.10, patience=3))
    assert decisions(gate, [3.0, *[2.5] * 6]) == [False, True, True, True, False, False, False]
    assert gate.best == 2.5 and gate.decide(2.2)


def test_nothing_drafted_is_no_decline() -> None:
    gate = TrainingGate(GateConfig())
    assert decisions(gate, [3.0, None, None, 2.9]) == [False] * 4
    assert decisions(gate, [2.0, None]) == [True, True]


def test_intervals_and_always() -> None:
    assert decisions(TrainingGate(GateConfig(mode="interval", every=3)), [3.0] * 7) == [
        False, False, True, False, False, True, False,
    ]
    assert all(decisions(TrainingGate(GateConfig(mode="always")), [3.0, None]))


@pytest.mark.parametrize("wrong", [{"mode": "often"}, {"decline": 0}, {"decline": 1.5}, {"every": 0}])
def test_gate_refusals(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="GateConfig"):
        GateConfig(**wrong)  # type: ignore[arg-type]


def test_the_most_frequent_ids_and_those_that_must_be_there() -> None:
    counts = count_tokens([[3, 7, 7, 20, 8], torch.tensor([8, 3, 20, 20]), []], 24)
    assert counts[[3, 7, 8, 20]].tolist() == [2, 2, 2, 3] and counts.sum() == 9
    assert choose_vocabulary(counts, 2).tolist() == [3, 20]  # of equal counts the lower id
    assert choose_vocabulary(counts, 4).tolist() == [3, 7, 8, 20]
    assert choose_vocabulary(counts, 3, always=[0]).tolist() == [0, 3, 20]
    assert choose_vocabulary(counts, 6).tolist() == [0, 1, 3, 7, 8, 20]
    assert coverage(counts, torch.tensor([3, 20])) == pytest.approx(5 / 9)


def test_maps_are_offsets_and_the_invariant_of_the_loaders_holds() -> None:
    """E03"""
    d2t, t2d = vocabulary_maps(torch.tensor([3, 7, 8, 20]), 24)
    assert d2t.tolist() == [3, 6, 6, 17]
    assert t2d.nonzero()[:, 0].tolist() == (d2t + torch.arange(4)).tolist() == [3, 7, 8, 20]


def test_a_drafter_takes_the_choice() -> None:
    target = tiny_target(num_hidden_layers=3)
    chosen = choose_vocabulary(count_tokens(random_texts([200]), 64), 16, always=[63])
    model = tiny_drafter(target, vocabulary=chosen.tolist())
    d2t, t2d = vocabulary_maps(chosen, 64)
    assert torch.equal(model.d2t, d2t) and torch.equal(model.t2d, t2d) and 63 in chosen


def test_vocabulary_refusals() -> None:
    counts = torch.ones(8, dtype=torch.int64)
    for size, always in ((0, []), (9, []), (1, [1, 2])):
        with pytest.raises(ValueError, match="size"):
            choose_vocabulary(counts, size, always)
    with pytest.raises(ValueError, match="token_lists"):
        count_tokens([[1, 8]], 8)
