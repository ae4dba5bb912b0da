"""The law through the whole engine: joint distributions of emitted tokens, against enumeration of the target.

A checker here is a chi-square test at ALPHA with the family counted (about 25 tests, family-wise 1e-4). With 24,000
draws over 64 cells it detects a total variation of 0.03 with power above 0.99 (noncentrality N * 4 TV^2 >= 86 against a
critical value near 130 - 63 degrees of freedom); the fine-grained law (TV 0.003) is tested on the op with millions of
draws in tests/kernels/test_law.py. Every law has a sabotage that must fail it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.engines import OFF, shared_hf, tiny_engine, tokens
from tlt_engine import Profile, RolloutEngine, SamplingParams, SpeculationConfig

ALPHA = 1e-4 / 25
VOCAB = 4
MODEL = {"vocab_size": VOCAB}
PROMPT = [1, 2]
COUNT = 24_000


def engine(drafter=None, **config) -> RolloutEngine:
    if drafter is not None:
        config["speculation"] = SpeculationConfig(method="custom", profile=Profile(3, 3, 10))
    config.setdefault("speculation", OFF)
    return tiny_engine(drafter=drafter, model=MODEL, max_num_seqs=1024, num_pages=16384, max_model_len=32, **config)


def enumerate_law(prompt, length, params=None, eng=None) -> np.ndarray:
    """Probability of every output of `length` tokens, from the target's own logits."""
    eng = eng or engine()
    temperature = params.temperature if params else 1.0
    law = np.zeros((VOCAB,) * length)
    for path in itertools.product(range(VOCAB), repeat=length):
        p = 1.0
        for i, t in enumerate(path):
            p *= torch.softmax(eng.next_logits([*prompt, *path[:i]]).double() / temperature, -1)[t].item()
        law[path] = p
    return law


def pvalue(observed: np.ndarray, law: np.ndarray) -> float:
    """Chi-square with cells of expectation below 5 pooled."""
    expected = law.ravel() * observed.sum()
    counts = observed.ravel()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


def table(rows, shape) -> np.ndarray:
    counts = np.zeros(shape)
    np.add.at(counts, tuple(np.array(rows).T), 1)
    return counts


def rollouts(eng, prompt=PROMPT, length=3, count=COUNT, **params):
    p = SamplingParams(n=count, max_tokens=length, **{"seed": 5, **params})
    return [o.token_ids for o in eng.generate([prompt], p)[0].outputs]


def drafters():
    known = {tuple(PROMPT): dict(enumerate(rollouts(engine(), length=3)))}
    return {
        "none": None,
        "replay": ReplayDrafter(known, error_rate=0.3, depth=3),
        "replay-tree": ReplayDrafter(known, error_rate=0.3, depth=2, shape="tree", width=3),
        "adversarial": AdversarialDrafter(VOCAB),
        "constant": ReplayDrafter({tuple(PROMPT): {i: [3, 3, 3] for i in range(COUNT)}}, depth=3),
    }


@pytest.mark.parametrize("name", ["none", "replay", "replay-tree", "adversarial", "constant"])
def test_joint_law_of_three_tokens(name):
    drafter = drafters()[name]
    rows = rollouts(engine(drafter))
    assert pvalue(table(rows, (VOCAB,) * 3), enumerate_law(PROMPT, 3)) > ALPHA
    if name.startswith("replay"):
        assert drafter.mean_accepted > 0.5


def test_joint_law_with_the_model_free_drafter_and_temperature():
    config = SpeculationConfig(profile=Profile(3, 3, 10), min_chance=0.0)
    eng = engine(speculation=config)
    rows = rollouts(eng, temperature=0.6)
    params = SamplingParams(temperature=0.6)
    assert eng.stats()["accepted_tokens"] > COUNT / 10
    assert pvalue(table(rows, (VOCAB,) * 3), enumerate_law(PROMPT, 3, params)) > ALPHA


def test_sabotage_a_rejection_rule_that_trusts_drafts_fails_the_law(monkeypatch):
    """p/q-like trust: a drafted child is taken whenever its probability is not small, without redrawing."""
    from tlt_engine.engine import runner

    honest = runner.verify_tree

    def trusting(sampled, trees):
        forged = sampled.clone()
        starts = trees.node_indptr.tolist()
        for start, end in itertools.pairwise(starts):
            if end - start > 1 and trees.tokens[start] % 2:
                forged[start] = trees.tokens[start + 1]
        return honest(forged, trees)

    monkeypatch.setattr(runner, "verify_tree", trusting)
    rows = rollouts(engine(drafters()["constant"]))
    assert pvalue(table(rows, (VOCAB,) * 3), enumerate_law(PROMPT, 3)) < ALPHA


def pairs(first, second):
    return table([[a[0], a[1], b[0], b[1]] for a, b in zip(first, second)], (VOCAB,) * 4)


def product(eng_law_a, eng_law_b):
    return np.multiply.outer(eng_law_a, eng_law_b)


def many(eng, prompt, seeds, length=2, sample_index=0, **params):
    p = [SamplingParams(max_tokens=length, seed=s, sample_index=sample_index, **params) for s in seeds]
    return [o[0] for o in tokens(eng.generate([prompt] * len(p), p))]


SEEDS = range(16_000)


def test_two_samples_of_one_prompt_are_independent():
    law = enumerate_law(PROMPT, 2)
    first, second = (many(engine(), PROMPT, SEEDS, sample_index=i) for i in (0, 1))
    assert pvalue(pairs(first, second), product(law, law)) > ALPHA


def test_sabotage_sample_index_dropped():
    law = enumerate_law(PROMPT, 2)
    first = many(engine(), PROMPT, SEEDS)
    assert pvalue(pairs(first, first), product(law, law)) < ALPHA


def test_neighbouring_seeds_are_independent():
    law = enumerate_law(PROMPT, 2)
    rows = many(engine(), PROMPT, range(16_001))
    assert pvalue(pairs(rows, rows[1:]), product(law, law)) > ALPHA


def test_n02_turn_one_and_a_shorter_turn_two_are_independent():
    short = PROMPT[:1]
    first, second = many(engine(), PROMPT, SEEDS), many(engine(), short, SEEDS, length=3)
    law = product(enumerate_law(PROMPT, 2), enumerate_law(short, 3).sum(axis=0))
    law_second = enumerate_law(short, 3).sum(axis=0)
    assert pvalue(pairs(first, [s[1:] for s in second]), product(enumerate_law(PROMPT, 2), law_second)) > ALPHA
    assert law.shape == (VOCAB,) * 4


def test_sabotage_prompt_dropped_from_the_key(monkeypatch):
    """Then positions 2 and 3 of the shorter turn draw the longer turn's noise."""
    from tlt_engine.engine import intake

    honest = intake.noise_key
    monkeypatch.setattr(intake, "noise_key", lambda seed, prompt: honest(seed, []))
    short = PROMPT[:1]
    first, second = many(engine(), PROMPT, SEEDS), many(engine(), short, SEEDS, length=3)
    law_second = enumerate_law(short, 3).sum(axis=0)
    assert pvalue(pairs(first, [s[1:] for s in second]), product(enumerate_law(PROMPT, 2), law_second)) < ALPHA


def after_cut(count=12_000):
    """Outputs of a run that was cut after one token and resumed under other weights, with what the old weights would
    have emitted there: a leak would correlate the two."""
    weights = dict(shared_hf("llama", 77, **MODEL).state_dict())
    params = [SamplingParams(max_tokens=3, seed=s) for s in range(count)]
    eng = engine()
    old = [o[0] for o in tokens(eng.generate([PROMPT] * count, params))]
    cut = engine()
    paused = cut.generate([PROMPT] * count, params, token_quota=1)
    cut.update_weights(weights)
    new = [o[0] for o in tokens(cut.resume(paused))]
    return old, new, cut


def law_after_cut(new_engine):
    """P(first, old second, new second): the old second from the old weights, the new one from the new, both given the
    first token and independent of each other."""
    old_law = enumerate_law(PROMPT, 2)
    law = np.zeros((VOCAB,) * 3)
    for first in range(VOCAB):
        new = torch.softmax(new_engine.next_logits([*PROMPT, first]).double(), -1).numpy()
        law[first] = np.multiply.outer(old_law[first], new)
    return law


def test_tokens_after_a_cut_under_new_weights_are_independent_of_the_old_continuation():
    old, new, eng = after_cut()
    rows = [[o[0], o[1], n[1]] for o, n in zip(old, new)]
    assert pvalue(table(rows, (VOCAB,) * 3), law_after_cut(eng)) > ALPHA


def test_sabotage_segment_dropped(monkeypatch):
    from tlt_engine.engine import packing

    honest = packing.noise_ids

    def without_segment(sequences, packed):
        ids = honest(sequences, packed)
        return replace(ids, segments=torch.zeros_like(ids.segments))

    from tlt_engine.engine import runner

    monkeypatch.setattr(runner, "noise_ids", without_segment)
    old, new, eng = after_cut()
    rows = [[o[0], o[1], n[1]] for o, n in zip(old, new)]
    assert pvalue(table(rows, (VOCAB,) * 3), law_after_cut(eng)) < ALPHA


def test_sabotage_position_relative_to_the_output(monkeypatch):
    """Then the first tokens of a turn and of its continuation share noise."""
    from tlt_engine.engine import intake, packing, runner

    honest_key, honest_ids = intake.noise_key, packing.noise_ids

    def relative(sequences, packed):
        ids = honest_ids(sequences, packed)
        starts = torch.tensor([s.prompt_len for s in sequences]).repeat_interleave(torch.from_numpy(packed.nodes))
        return replace(ids, positions=ids.positions - starts)

    def run():
        first = many(engine(), PROMPT, SEEDS)
        second = many(engine(), [*PROMPT, 0], SEEDS)
        return pvalue(pairs(first, second), product(enumerate_law(PROMPT, 2), enumerate_law([*PROMPT, 0], 2)))

    monkeypatch.setattr(intake, "noise_key", lambda seed, prompt: honest_key(seed, prompt[:2]))
    monkeypatch.setattr(runner, "noise_ids", relative)
    assert run() < ALPHA
    monkeypatch.undo()
    assert run() > ALPHA


def test_sabotage_one_rows_noise_used_for_its_neighbour(monkeypatch):
    from tlt_engine.engine import packing, runner

    honest = packing.noise_ids

    def neighbours(sequences, packed):
        ids = honest(sequences, packed)
        rows = (torch.arange(len(ids.keys)) // 2) * 2
        return ids[rows]

    monkeypatch.setattr(runner, "noise_ids", neighbours)
    law = enumerate_law(PROMPT, 1)
    p = [SamplingParams(max_tokens=1, seed=s) for s in SEEDS]
    rows = [o[0][0] for o in tokens(engine().generate([PROMPT] * len(p), p))]
    joint = table([[a, b] for a, b in zip(rows[::2], rows[1::2])], (VOCAB, VOCAB))
    assert pvalue(joint, np.multiply.outer(law, law)) < ALPHA
