"""Packing, reranking and the equality walk: against their definitions, and C++ against the reference."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_kernels import pack_trees, tree_from_candidates, verify_tree
from tlt_kernels.params import PackedTrees, Walk
from torch import Tensor

BACKENDS = ["reference", "cpp"]
Tree = tuple[list[int], list[int]]  # tokens, parents


def packed(trees: list[Tree]) -> tuple[Tensor, Tensor, Tensor]:
    bounds = torch.tensor([0, *[len(tokens) for tokens, _ in trees]]).cumsum(0).int()
    tokens = torch.tensor([t for tokens, _ in trees for t in tokens], dtype=torch.int64)
    return tokens, torch.tensor([p for _, parents in trees for p in parents], dtype=torch.int32), bounds


def trees_of(result: PackedTrees) -> list[Tree]:
    return [
        (result.tokens[a:b].tolist(), result.parents[a:b].tolist()) for a, b in pairwise(result.node_indptr.tolist())
    ]


def equal(a: PackedTrees | Walk, b: PackedTrees | Walk) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def root_path(parents: list[int], node: int) -> list[int]:
    return [node] if node == 0 else [*root_path(parents, parents[node]), node]


@st.composite
def random_trees(draw: st.DrawFn, most: int = 128) -> Tree:
    n = draw(st.one_of(st.integers(1, 12), st.integers(1, most)))
    reach = draw(st.sampled_from([1, 4, 128]))
    parents = [-1] + [draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, n)]
    return [draw(st.integers(0, 3)) for _ in range(n)], parents


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(trees=st.lists(random_trees(), min_size=0, max_size=4))
def test_pack_trees_walks_up_to_the_root(backend: str, trees: list[Tree]) -> None:
    result = pack_trees(*packed(trees), backend=backend)
    row = 0
    for _, parents in trees:
        for node in range(len(parents)):
            path = root_path(parents, node)
            word = [int(w) % 2**64 for w in result.ancestors[row]]
            assert word[0] | word[1] << 64 == sum(1 << j for j in path)
            assert int(result.depths[row]) == len(path) - 1
            row += 1
    assert (result.depths.dtype, result.ancestors.dtype, row) == (torch.int32, torch.int64, len(result.tokens))


def brute_keep(tree: Tree, scores: list[float], budget: int) -> Tree:
    """The definition on token paths, with no merging step: a merged node is a distinct path of tokens."""
    tokens, parents = tree
    best: dict[tuple[int, ...], float] = {}
    first: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens)):
        path = tuple(tokens[j] for j in root_path(parents, i))
        best[path] = max(best.get(path, float("-inf")), scores[i])
        first.setdefault(path, i)
    kept = {(tokens[0],)}
    while len(kept) < budget:
        reachable = [path for path in best if path not in kept and path[:-1] in kept]
        if not reachable:
            break
        kept.add(min(reachable, key=lambda path: (-best[path], first[path])))
    order = sorted(kept, key=first.__getitem__)
    return [path[-1] for path in order], [order.index(path[:-1]) if len(path) > 1 else -1 for path in order]


CANDIDATES = st.lists(
    st.tuples(
        random_trees(60), st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0]), min_size=60, max_size=60),
        st.integers(1, 30),
    ),
    min_size=1, max_size=3,
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(given_trees=CANDIDATES)
def test_reranking_keeps_the_best_reachable_nodes(backend: str, given_trees: list) -> None:
    """Few tokens and few scores, so that duplicates and ties are common."""
    tokens, parents, bounds = packed([tree for tree, _, _ in given_trees])
    scores = [s[: len(tree[0])] for tree, s, _ in given_trees]
    budgets = torch.tensor([budget for _, _, budget in given_trees], dtype=torch.int32)
    result = tree_from_candidates(
        tokens, parents, torch.tensor([x for s in scores for x in s]), bounds, budgets, backend=backend
    )
    want = [brute_keep(tree, s, budget) for (tree, _, budget), s in zip(given_trees, scores)]
    assert trees_of(result) == want
    assert equal(result, pack_trees(result.tokens, result.parents, result.node_indptr, backend="reference"))


def test_reranking_by_hand() -> None:
    """Node 3 scores best but hangs below node 1, the worst; 2 and 4 are one token under the root."""
    tokens, parents, bounds = packed([([9, 1, 2, 3, 2, 5], [-1, 0, 0, 1, 0, 4])])
    scores = torch.tensor([0.0, -4.0, -3.0, -0.1, -1.0, -2.0])

    def keep(budget: int) -> list[Tree]:
        budgets = torch.tensor([budget], dtype=torch.int32)
        return trees_of(tree_from_candidates(tokens, parents, scores, bounds, budgets))

    assert keep(1) == [([9], [-1])]
    assert keep(3) == [([9, 2, 5], [-1, 0, 1])]
    assert keep(5) == [([9, 1, 2, 3, 5], [-1, 0, 0, 1, 2])]
    assert keep(128) == keep(5)


def test_sabotage_keeping_the_best_scores_regardless_of_parents_is_caught() -> None:
    tree, scores = ([9, 1, 3], [-1, 0, 1]), [0.0, -4.0, -0.1]
    orphaned = sorted(sorted(range(3), key=lambda i: -scores[i])[:2])
    assert [tree[0][i] for i in orphaned] != brute_keep(tree, scores, 2)[0]


def all_small_trees() -> list[Tree]:
    """Every tree of at most 4 nodes over 3 tokens whose siblings differ."""
    trees = []
    for n in range(1, 5):
        for parents in product(*[[-1] if i == 0 else range(i) for i in range(n)]):
            for drafts in product(range(3), repeat=n - 1):
                if len(set(zip(parents[1:], drafts))) == n - 1:
                    trees.append(([0, *drafts], list(parents)))
    return trees


def walk_by_children(tree: Tree, drawn: tuple[int, ...]) -> tuple[list[int], list[int]]:
    tokens, parents = tree
    children = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
    path = [0]
    while (path[-1], drawn[path[-1]]) in children:
        path.append(children[path[-1], drawn[path[-1]]])
    return path, [drawn[node] for node in path]


def check_walk(walk: Walk, trees: list[Tree], drawn: list[tuple[int, ...]]) -> None:
    for b, (tree, sampled) in enumerate(zip(trees, drawn)):
        path, emitted = walk_by_children(tree, sampled)
        n, rest = len(path), walk.paths.shape[1] - len(path)
        assert int(walk.accept_lens[b]) == n
        assert walk.paths[b].tolist() == path + [-1] * rest
        assert walk.tokens[b].tolist() == emitted + [-1] * rest


@pytest.fixture(scope="module")
def everything() -> tuple[list[Tree], list[tuple[int, ...]]]:
    pairs = [(tree, drawn) for tree in all_small_trees() for drawn in product(range(-1, 3), repeat=len(tree[0]))]
    return [tree for tree, _ in pairs], [drawn for _, drawn in pairs]


def test_every_walk_on_every_small_tree(everything: tuple[list[Tree], list[tuple[int, ...]]]) -> None:
    trees, drawn = everything
    assert len(trees) > 20_000
    sampled = torch.tensor([t for row in drawn for t in row])
    forest = pack_trees(*packed(trees))
    walk = verify_tree(sampled, forest)
    check_walk(walk, trees, drawn)
    assert equal(verify_tree(sampled, forest, backend="reference"), walk)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(trees=st.lists(random_trees(), min_size=1, max_size=4), salt=st.integers(0, 999))
def test_the_walk_emits_what_plain_decoding_would(backend: str, trees: list[Tree], salt: int) -> None:
    """The target as a function of the tokens so far: verification must emit its own continuation, whatever the tree."""
    scores = torch.zeros(sum(len(tokens) for tokens, _ in trees))
    budgets = torch.full((len(trees),), 128, dtype=torch.int32)
    tokens, parents, bounds = packed(trees)
    forest = tree_from_candidates(tokens, parents, scores, bounds, budgets, backend=backend)  # siblings now differ

    def target(text: list[int]) -> int:
        return hash((salt, *text)) % 4

    merged = trees_of(forest)
    drawn = [target([own[j] for j in root_path(above, node)]) for own, above in merged for node in range(len(own))]
    walk = verify_tree(torch.tensor(drawn), forest, backend=backend)
    for b, (own, above) in enumerate(merged):
        text = own[:1]
        emitted = walk.tokens[b, : int(walk.accept_lens[b])].tolist()
        for token in emitted:
            assert token == target(text)
            text.append(token)
        paths = {tuple(own[j] for j in root_path(above, node)) for node in range(len(own))}
        assert tuple(text[:-1]) in paths and tuple(text) not in paths  # as far as the tree allows, plus the bonus


def test_sabotage_a_walk_that_takes_the_first_child_is_caught() -> None:
    trees, drawn = [([0, 1, 2, 3], [-1, 0, 0, 2])], [(2, 0, 3, 1)]
    first_child = Walk(torch.tensor([2]), torch.tensor([[0, 1, -1]]), torch.tensor([[2, 0, -1]]))
    check_walk(verify_tree(torch.tensor(drawn[0]), pack_trees(*packed(trees))), trees, drawn)
    with pytest.raises(AssertionError):
        check_walk(first_child, trees, drawn)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_name_what_is_wrong(backend: str) -> None:
    def candidates(scores: list[float], budget: int) -> None:
        tokens, parents, bounds = packed([([1, 2], [-1, 0])])
        budgets = torch.tensor([budget], dtype=torch.int32)
        tree_from_candidates(tokens, parents, torch.tensor(scores), bounds, budgets, backend=backend)

    chain = (list(range(129)), list(range(-1, 128)))
    with pytest.raises(ValueError, match="1 to 128 nodes a tree, got 129"):
        pack_trees(*packed([chain]), backend=backend)
    for parents in ([0], [-1, -1], [-1, 1], [-1, 2, 0]):
        with pytest.raises(ValueError, match="parents: expected -1 for node 0"):
            pack_trees(*packed([([0] * len(parents), parents)]), backend=backend)
    with pytest.raises(ValueError, match="expected to run from 0 to 2"):
        pack_trees(torch.zeros(2).long(), torch.tensor([-1, 0]).int(), torch.tensor([0, 1]).int(), backend=backend)
    for budget in (0, 129):
        with pytest.raises(ValueError, match="budgets: expected 1 to 128"):
            candidates([0.0, 0.0], budget)
    with pytest.raises(ValueError, match="scores: expected numbers, got NaN"):
        candidates([0.0, float("nan")], 2)
    with pytest.raises(ValueError, match="sampled: expected int64"):
        verify_tree(torch.zeros(1).int(), pack_trees(*packed([([0], [-1])])), backend=backend)
