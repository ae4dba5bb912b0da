"""Draft trees: packing, reranking and the equality walk, node by node. Knows neither speed nor argument checks.

Shape legend: R packed nodes of B trees, N candidates.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tlt_kernels.params import PackedTrees, Walk

MAX_NODES = 128


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def pack_trees(tokens: Tensor, parents: Tensor, node_indptr: Tensor) -> PackedTrees:
    depths: list[int] = []
    words: list[list[int]] = []
    bounds = node_indptr.tolist()
    for start, end in pairwise(bounds):
        masks: list[int] = []
        levels: list[int] = []
        for i, parent in enumerate(parents[start:end].tolist()):
            levels.append(0 if parent < 0 else levels[parent] + 1)
            masks.append(1 << i | (0 if parent < 0 else masks[parent]))
        depths += levels
        words += [[_signed(mask % 2**64), _signed(mask >> 64)] for mask in masks]
    return PackedTrees(
        tokens, parents, torch.tensor(depths, dtype=torch.int32, device=tokens.device),
        torch.tensor(words, dtype=torch.int64, device=tokens.device).reshape(-1, 2), node_indptr,
    )


def _merge_siblings(tokens: list[int], parents: list[int], scores: list[float]) -> list[int]:
    """For each candidate the one that stands for it: the first sibling with its token, whose score in `scores`
    becomes the best of them. Parents in `parents` are replaced by their own stand-ins."""
    stands: list[int] = []
    first: dict[tuple[int, int], int] = {}
    for i, (token, parent) in enumerate(zip(tokens, parents)):
        parents[i] = parent if parent < 0 else stands[parent]
        stands.append(first.setdefault((parents[i], token), i))
        scores[stands[i]] = max(scores[stands[i]], scores[i])
    return stands


def _choose(tokens: list[int], parents: list[int], scores: list[float], budget: int) -> list[int]:
    """Indices of the kept candidates, ascending."""
    stands = _merge_siblings(tokens, parents, scores)
    kept = [0]
    waiting = [i for i in range(1, len(tokens)) if stands[i] == i]
    while len(kept) < budget:
        open_nodes = [i for i in waiting if parents[i] in kept]
        if not open_nodes:
            break
        best = max(open_nodes, key=lambda i: (scores[i], -i))
        kept.append(best)
        waiting.remove(best)
    return sorted(kept)


def tree_from_candidates(
    tokens: Tensor, parents: Tensor, scores: Tensor, cand_indptr: Tensor, budgets: Tensor
) -> PackedTrees:
    out_tokens: list[int] = []
    out_parents: list[int] = []
    out_indptr = [0]
    bounds = cand_indptr.tolist()
    for start, end, budget in zip(bounds, bounds[1:], budgets.tolist()):
        tree_tokens, tree_parents = tokens[start:end].tolist(), parents[start:end].tolist()
        kept = _choose(tree_tokens, tree_parents, scores[start:end].tolist(), budget)
        place = {node: i for i, node in enumerate(kept)}
        out_tokens += [tree_tokens[i] for i in kept]
        out_parents += [place.get(tree_parents[i], -1) for i in kept]
        out_indptr.append(len(out_tokens))
    return pack_trees(
        torch.tensor(out_tokens, dtype=torch.int64, device=tokens.device),
        torch.tensor(out_parents, dtype=torch.int32, device=tokens.device),
        torch.tensor(out_indptr, dtype=torch.int32, device=tokens.device),
    )


def verify_tree(sampled: Tensor, trees: PackedTrees) -> Walk:
    """The equality walk (docs/guarantees.md): while a child carries the token that the target drew, go there."""
    bounds = trees.node_indptr.tolist()
    steps = int(trees.depths.max()) + 1 if len(trees.depths) else 0
    accept_lens = torch.zeros(len(bounds) - 1, dtype=torch.int32, device=sampled.device)
    paths = torch.full((len(bounds) - 1, steps), -1, dtype=torch.int32, device=sampled.device)
    emitted = torch.full((len(bounds) - 1, steps), -1, dtype=torch.int64, device=sampled.device)
    for b, (start, end) in enumerate(pairwise(bounds)):
        tokens, parents = trees.tokens[start:end].tolist(), trees.parents[start:end].tolist()
        drawn = sampled[start:end].tolist()
        node: int | None = 0
        depth = 0
        while node is not None:
            paths[b, depth], emitted[b, depth] = node, drawn[node]
            depth += 1
            wanted = (node, drawn[node])
            node = next((i for i in range(1, len(tokens)) if (parents[i], tokens[i]) == wanted), None)
        accept_lens[b] = depth
    return Walk(accept_lens, paths, emitted)
