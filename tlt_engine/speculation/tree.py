"""Draft trees: what a drafter proposes and one target pass verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tlt_kernels.backend import extension

from tlt_engine.types import MAX_NODES


@dataclass(frozen=True)
class DraftTree:
    """Node 0 is the root: the last committed token, whose KV is not computed yet. Plain decoding is the root alone.

    tokens[i] is node i's token; parents[i] < i the index of its parent, -1 for the root. Siblings carry different
    tokens (a walk that finds the target's token among them must be unambiguous). At most MAX_NODES nodes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "parents", tuple(self.parents))
        n = len(self.tokens)
        if len(self.parents) != n:
            raise ValueError(f"DraftTree.parents: expected {n} entries as in tokens, got {len(self.parents)}")
        if not 1 <= n <= MAX_NODES:
            raise ValueError(f"DraftTree.tokens: expected 1 to {MAX_NODES} nodes with the root, got {n}; verify fewer")
        if self.parents[0] != -1:
            raise ValueError(f"DraftTree.parents[0]: expected -1 (the root), got {self.parents[0]}")
        seen: set[tuple[int, int]] = set()
        for i in range(1, n):
            if not 0 <= self.parents[i] < i:
                got = self.parents[i]
                raise ValueError(f"DraftTree.parents[{i}]: expected a node in [0, {i}), got {got}; order parents first")
            edge = (self.parents[i], self.tokens[i])
            if edge in seen:
                raise ValueError(
                    f"DraftTree.tokens[{i}]: expected siblings with different tokens, got {edge[1]} twice under node "
                    f"{edge[0]}; merge them"
                )
            seen.add(edge)

    @staticmethod
    def trusted(tokens: tuple[int, ...], parents: tuple[int, ...]) -> DraftTree:
        """Past the checks, which take 7 us for 32 nodes while the GPU waits: for makers of trees whose siblings differ
        and whose parents stand first by construction."""
        tree = object.__new__(DraftTree)
        object.__setattr__(tree, "tokens", tokens)
        object.__setattr__(tree, "parents", parents)
        return tree

    @staticmethod
    def root(token: int) -> DraftTree:
        return DraftTree((token,), (-1,))

    @staticmethod
    def chain(root: int, drafts: Sequence[int]) -> DraftTree:
        return DraftTree((root, *drafts), tuple(range(-1, len(drafts))))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def __len__(self) -> int:
        return len(self.tokens)


def clip_trees(trees: Sequence[DraftTree], limits: Sequence[tuple[int, int, int]], vocab_size: int) -> list[DraftTree]:
    """Each tree as clip_tree does it; limits: its (root, max_nodes, max_depth). Whether all are within bounds, as they
    mostly are, is one C++ call: the GPU waits for it."""
    clipped = list(trees)
    for i in extension().unfit_trees(clipped, limits, vocab_size):
        root, max_nodes, max_depth = limits[i]
        clipped[i] = clip_tree(clipped[i], root, max_nodes, max_depth, vocab_size)
    return clipped


def clip_tree(tree: DraftTree, root: int, max_nodes: int, max_depth: int, vocab_size: int) -> DraftTree:
    """The part of a proposed tree that a pass may run: nodes in order while the budget lasts, none deeper than
    max_depth, none with a token the target does not have, no orphans. A tree within bounds is returned as it is."""
    if tree.tokens[0] != root:
        raise ValueError(
            f"DraftTree.tokens[0]: expected the root {root}, the last committed token, got {tree.tokens[0]}; "
            "build the tree from DraftContext.token_ids[-1]"
        )
    known = min(tree.tokens) >= 0 and max(tree.tokens) < vocab_size
    if known and len(tree) <= max_nodes and max(tree.depths) <= max_depth:
        return tree
    new_index = {0: 0}
    tokens, parents, depths = [root], [-1], tree.depths
    for i in range(1, len(tree)):
        fits = depths[i] <= max_depth and 0 <= tree.tokens[i] < vocab_size
        if fits and tree.parents[i] in new_index and len(tokens) < max_nodes:
            new_index[i] = len(tokens)
            tokens.append(tree.tokens[i])
            parents.append(new_index[tree.parents[i]])
    return DraftTree(tuple(tokens), tuple(parents))
