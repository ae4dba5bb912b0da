"""The contract of draft trees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_engine.speculation.tree import DraftTree, clip_tree


def test_root_and_chain():
    assert DraftTree.root(7) == DraftTree((7,), (-1,))
    chain = DraftTree.chain(7, [1, 2, 1])
    assert chain == DraftTree((7, 1, 2, 1), (-1, 0, 1, 2))
    assert chain.depths == (0, 1, 2, 3)
    assert len(chain) == 4


def test_depths_follow_parents_not_order():
    assert DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3)).depths == (0, 1, 1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (-1,), "parents: expected 2"),
        ((), (), "1 to 128 nodes"),
        (tuple(range(129)), (-1, *range(128)), "1 to 128 nodes"),
        ((1, 2), (0, 0), r"parents\[0\]"),
        ((1, 2, 3), (-1, 2, 0), "parents first"),
        ((1, 2), (-1, -1), "parents first"),
        ((1, 2, 2), (-1, 0, 0), "merge them"),
    ],
)
def test_illegal_trees_are_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(tokens, parents)


def test_equal_tokens_under_different_parents_are_legal():
    assert len(DraftTree((1, 2, 3, 5, 5), (-1, 0, 0, 1, 2))) == 5


@given(st.data(), st.integers(1, 40), st.integers(1, 20), st.integers(0, 6), st.integers(1, 30))
def test_clipped_trees_keep_what_fits_and_no_orphans(data, n, max_nodes, max_depth, vocab):
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, n)]
    tree = DraftTree(tuple(range(n)), tuple(parents))
    clipped = clip_tree(tree, 0, max_nodes, max_depth, vocab)
    assert len(clipped) <= max_nodes
    assert max(clipped.depths) <= max_depth
    assert max(clipped.tokens) < vocab
    parent_of = {t: tree.parents[t] for t in tree.tokens}  # tokens name the nodes here
    assert all(clipped.tokens[p] == parent_of[t] for t, p in zip(clipped.tokens[1:], clipped.parents[1:]))
    fits = [t for t, d in zip(tree.tokens, tree.depths) if d <= max_depth and t < vocab]
    assert list(clipped.tokens) == [t for t in fits if t in clipped.tokens], "order kept"
    if len(clipped) < max_nodes:
        dropped = [t for t in fits if t not in clipped.tokens]
        assert all(parent_of[t] not in clipped.tokens for t in dropped), "only orphans go while there is room"


def test_clipping_refuses_another_root():
    with pytest.raises(ValueError, match="expected the root 3"):
        clip_tree(DraftTree.root(4), 3, 8, 8, 100)
