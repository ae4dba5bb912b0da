"""Draft trees as packed tensors: ancestor words, reranking under a node budget, the equality walk.

Knows neither drafters nor the noise: scores and sampled tokens are numbers that come from elsewhere.
Shape legend: R packed nodes of B trees, N candidates.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tlt_kernels import cuda
from tlt_kernels.backend import BackendName, choose, extension
from tlt_kernels.checks import check
from tlt_kernels.params import PackedTrees, Walk
from tlt_kernels.reference import tree as reference

MAX_NODES = reference.MAX_NODES


def _check_packed(tokens: Tensor, parents: Tensor, indptr: Tensor, name: str) -> int:
    check("tokens", tokens, torch.int64, {"R": None})
    check("parents", parents, torch.int32, {"R": len(tokens)}, tokens.device)
    check(name, indptr, torch.int32, {"B + 1": None}, tokens.device)
    if len(indptr) == 0:
        raise ValueError(f"{name}: expected B + 1 entries from 0 to {len(tokens)}, got none; start it with 0")
    return len(indptr) - 1


def pack_trees(
    tokens: Tensor, parents: Tensor, node_indptr: Tensor, *, backend: BackendName | None = None
) -> PackedTrees:
    """Depths and ancestor words of B trees. tokens int64 [R]; parents int32 [R], local, -1 for each tree's node 0,
    else smaller than the node; node_indptr int32 [B + 1]. The three go into the result without a copy.

    Raises ValueError for empty trees, more than 128 nodes in one, or a parent that does not stand before its child.
    """
    batch = _check_packed(tokens, parents, node_indptr, "node_indptr")
    picked = choose("pack_trees", backend, tokens.device, cuda=("reference", "cuda"))
    if picked == "cuda":  # values unchecked: looking at them would wait for the device
        return cuda.pack_trees(tokens, parents, node_indptr)
    if picked == "reference":
        _refuse_bad_trees(parents, node_indptr, "node_indptr", MAX_NODES)
        return reference.pack_trees(tokens, parents, node_indptr)
    depths = torch.empty_like(parents)
    ancestors = torch.empty(len(tokens), 2, dtype=torch.int64)
    extension().pack_trees(
        parents.data_ptr(), node_indptr.data_ptr(), batch, len(tokens), depths.data_ptr(), ancestors.data_ptr()
    )
    return PackedTrees(tokens, parents, depths, ancestors, node_indptr)


def _refuse_bad_trees(parents: Tensor, indptr: Tensor, name: str, most: int | None) -> None:
    """The shape of a forest, for the reference; the C++ ops make the same checks as they read."""
    bounds = indptr.tolist()
    if bounds[0] != 0 or bounds[-1] != len(parents):
        raise ValueError(f"{name}: expected to run from 0 to {len(parents)}, got {bounds}; give each tree's bounds")
    for b, (start, end) in enumerate(pairwise(bounds)):
        if end - start < 1 or (most is not None and end - start > most):
            limit = f"1 to {most}" if most is not None else "at least 1"
            raise ValueError(f"{name}: expected {limit} nodes a tree, got {end - start} in tree {b}; verify fewer")
        for i, parent in enumerate(parents[start:end].tolist()):
            if not (parent == -1 if i == 0 else 0 <= parent < i):
                raise ValueError(
                    f"parents: expected -1 for node 0, an earlier node for others, got {parent} for node {i} of tree "
                    f"{b}; order parents first"
                )


def tree_from_candidates(
    tokens: Tensor, parents: Tensor, scores: Tensor, cand_indptr: Tensor, budgets: Tensor, *,
    backend: BackendName | None = None,
) -> PackedTrees:
    """Keeps the best nodes of each candidate tree (the reranking of EAGLE-2, arXiv 2406.16858).

    tokens int64 [N], parents int32 [N] (local, -1 for each first candidate, the root; else an earlier candidate),
    scores fp32 [N], cand_indptr int32 [B + 1], budgets int32 [B]: nodes to keep, root included.
    Siblings with one token are merged first: the earlier stands for both, with the better score and all children.
    The root is kept whatever its score; then, until the budget is full, the best candidate whose parent is kept,
    ties to the lower index. Kept nodes stay in candidate order.

    Raises ValueError for budgets outside 1..128, NaN scores, empty trees or parents that do not stand first.
    """
    batch = _check_packed(tokens, parents, cand_indptr, "cand_indptr")
    check("scores", scores, torch.float32, {"N": len(tokens)}, tokens.device)
    check("budgets", budgets, torch.int32, {"B": batch}, tokens.device)
    if bool(scores.isnan().any()):
        raise ValueError("scores: expected numbers, got NaN; fail the request whose logits hold it before drafting")
    if batch and (int(budgets.min()) < 1 or int(budgets.max()) > MAX_NODES):
        raise ValueError(f"budgets: expected 1 to {MAX_NODES} nodes with the root, got {budgets.tolist()}; lower them")
    picked = choose("tree_from_candidates", backend, tokens.device, cuda=("reference", "cuda"))
    if picked == "cuda":  # sizes its result here, so it waits for the device; cuda.tree_from_candidates does not
        widest, rows = int(cand_indptr.diff().max()) if batch else 1, int(budgets.sum())
        out = cuda.tree_from_candidates(tokens, parents, scores, cand_indptr, budgets, rows=rows, widest=widest)
        n = int(out.node_indptr[-1])
        return PackedTrees(out.tokens[:n], out.parents[:n], out.depths[:n], out.ancestors[:n], out.node_indptr)
    if picked == "reference":
        _refuse_bad_trees(parents, cand_indptr, "cand_indptr", None)
        return reference.tree_from_candidates(tokens, parents, scores, cand_indptr, budgets)
    kept = torch.empty(int(budgets.sum()), dtype=torch.int64)
    kept_parents = torch.empty(len(kept), dtype=torch.int32)
    indptr = torch.empty(batch + 1, dtype=torch.int32)
    count = extension().tree_from_candidates(
        tokens.data_ptr(), parents.data_ptr(), scores.data_ptr(), cand_indptr.data_ptr(), budgets.data_ptr(), batch,
        len(tokens), kept.data_ptr(), kept_parents.data_ptr(), indptr.data_ptr(),
    )
    return pack_trees(kept[:count], kept_parents[:count], indptr, backend=picked)


def verify_tree(sampled: Tensor, trees: PackedTrees, *, backend: BackendName | None = None) -> Walk:
    """The equality walk (docs/guarantees.md): from each root, while a child carries the token that the target drew at
    the current node, go there; every drawn token on the way is emitted, the last one being the bonus token.

    sampled int64 [R]: the target's own token at each node; -1 (no valid token) matches no child. trees: as pack_trees
    gives them. Raises ValueError for wrong shapes and types.
    """
    batch = _check_packed(trees.tokens, trees.parents, trees.node_indptr, "trees.node_indptr")
    check("sampled", sampled, torch.int64, {"R": len(trees.tokens)}, trees.tokens.device)
    picked = choose("verify_tree", backend, sampled.device, cuda=("cuda", "reference"))
    if picked == "reference":
        return reference.verify_tree(sampled, trees)
    if picked == "cuda":  # the deepest node is known on the device only: as many columns as any tree can need
        return cuda.verify_tree(sampled, trees, steps=min(len(sampled), MAX_NODES))
    steps = int(trees.depths.max()) + 1 if len(trees.depths) else 0
    accept_lens = torch.empty(batch, dtype=torch.int32)
    paths = torch.empty(batch, steps, dtype=torch.int32)
    tokens = torch.empty(batch, steps, dtype=torch.int64)
    extension().verify_tree(
        sampled.data_ptr(), trees.tokens.data_ptr(), trees.parents.data_ptr(), trees.node_indptr.data_ptr(), batch,
        len(sampled), steps, accept_lens.data_ptr(), paths.data_ptr(), tokens.data_ptr(),
    )
    return Walk(accept_lens, paths, tokens)
