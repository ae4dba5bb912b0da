"""The scripted drafters themselves: legal trees, budgets kept, and the accept lengths they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drafters import AdversarialDrafter, CopyDrafter, NullDrafter, ReplayDrafter
from tlt_engine.config import SamplingParams
from tlt_engine.speculation.drafter import DraftContext, Drafter
from tlt_engine.speculation.tree import DraftTree

PROMPT = (3, 1, 4)
OUTPUT = [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def context(ids, prompt_len=3, sample=0, max_nodes=16, max_depth=8, seq_id=0, group="g"):
    params = SamplingParams()
    return DraftContext(seq_id, group, list(ids), prompt_len, 77, sample, 0, params, max_nodes, max_depth)


def accepted(tree: DraftTree, continuation) -> int:
    """Length of the path of `tree` that agrees with the continuation: what the equality walk accepts."""
    node = 0
    for depth, token in enumerate(continuation):
        children = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
        if not children:
            return depth
        node = children[0]
    return len(continuation)


def decode(drafter: Drafter, output=OUTPUT, **limits) -> list[int]:
    """Accepted drafts of each step of a run whose plain decoding gives `output`."""
    at, counts = 0, []
    while at < len(output):
        c = context([*PROMPT, *output[:at]], **limits)
        (tree,) = drafter.propose([c])
        n = min(accepted(tree, output[at:]), len(output) - at - 1)
        at += n + 1
        drafter.observe(context([*PROMPT, *output[:at]], **limits), n)
        counts.append(n)
    return counts


@pytest.mark.parametrize("known", [{PROMPT: {0: OUTPUT}}, {"g": {0: OUTPUT}}])
@pytest.mark.parametrize(("shape", "width"), [("chain", 1), ("tree", 3)])
def test_replay_without_errors_accepts_every_draft(known, shape, width):
    assert decode(ReplayDrafter(known, depth=4, width=width, shape=shape)) == [4, 4, 1]


def test_replay_errors_have_the_chosen_rate_and_are_reproducible():
    long_output = [(7 * i) % 11 for i in range(4000)]
    known = {PROMPT: {0: long_output}}
    runs = [decode(ReplayDrafter(known, 0.3, seed=s, depth=1), long_output) for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    assert sum(runs[0]) / len(runs[0]) == pytest.approx(0.7, abs=0.03)


def test_replay_puts_the_right_token_into_every_slot():
    drafter = ReplayDrafter({PROMPT: {0: OUTPUT}}, depth=1, width=3, shape="tree")
    trees = [drafter.tree(context([*PROMPT, *OUTPUT[:at]])) for at in range(len(OUTPUT))]
    slots = {tree.tokens.index(right, 1) for tree, right in zip(trees, OUTPUT)}
    assert slots == {1, 2, 3}


def test_replay_knows_nothing_of_other_samples_or_prompts():
    drafter = ReplayDrafter({PROMPT: {0: OUTPUT}})
    assert len(drafter.tree(context(PROMPT, sample=1))) == 1
    assert len(drafter.tree(context((3, 1, 5)))) == 1


def test_copy_drafter_is_always_right_and_a_wrong_copy_is_not():
    truth = [*PROMPT, *OUTPUT, 0, 0, 0, 0]
    assert decode(CopyDrafter(lambda ids, c: truth[len(ids)], depth=3)) == [3, 3, 3]
    assert decode(CopyDrafter(lambda ids, c: truth[len(ids)] + 1, depth=3)) == [0] * 12


def test_null_and_adversarial_drafters_accept_nothing():
    adversary = AdversarialDrafter(10, eos_ids=(0,), continuations={PROMPT: {0: OUTPUT}})
    for drafter in (NullDrafter(), adversary):
        assert decode(drafter) == [0] * len(OUTPUT)
        assert drafter.mean_accepted == 0
    # Without the knowledge to avoid the right token, full trees over ten ids do hit it.
    assert sum(decode(AdversarialDrafter(10, styles=("star",)))) > 0


@given(st.integers(1, 128), st.integers(0, 9), st.integers(0, 11), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_budgets_are_kept(max_nodes, max_depth, at, seed):
    c = context([*PROMPT, *OUTPUT[:at]], max_nodes=max_nodes, max_depth=max_depth)
    known = {PROMPT: {0: OUTPUT}}
    drafters = [
        NullDrafter(), CopyDrafter(lambda ids, c: 1, depth=20), AdversarialDrafter(40, (0, 2), seed),
        ReplayDrafter(known, 0.2, seed, 20), ReplayDrafter(known, 0.2, seed, 20, 4, "tree"),
    ]
    for drafter in drafters:
        tree = drafter.tree(c)
        assert tree.tokens[0] == c.token_ids[-1]
        assert len(tree) <= max_nodes
        assert max(tree.depths) <= max_depth


@pytest.mark.parametrize("style", AdversarialDrafter.STYLES)
def test_adversarial_trees_are_maximal(style):
    tree = AdversarialDrafter(200, (0, 2), styles=(style,)).tree(context(PROMPT, max_nodes=64, max_depth=6))
    assert len(tree) == 64
    assert all(0 <= t < 200 for t in tree.tokens)


def test_eos_style_puts_eos_under_most_parents():
    tree = AdversarialDrafter(200, (2,), styles=("eos",)).tree(context(PROMPT, max_nodes=64))
    assert tree.tokens.count(2) > 10
