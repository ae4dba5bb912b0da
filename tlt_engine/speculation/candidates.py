"""The candidates of a learned draft tree: how they are ranked, which are expanded, which are kept.

Shape legend: B requests, M expanded nodes a request, k children of each, C candidates so far. Knows neither the
drafter's layer nor whose noise it was. Beam and reranking are EAGLE-2's (arXiv 2406.16858); what is new is the score:
an estimate of the chance that the target picks a node given the noise that both look at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from tlt_kernels import tree_from_candidates
from tlt_kernels.params import DraftTop
from torch import Tensor

from tlt_engine.speculation.tree import DraftTree

UNSEEN_NOISE = 0.58  # mean of Gumbel noise: what the best of many small candidates has, beside log(their mass)


def log_chances(top: DraftTop, greedy: Tensor, sharpness: Tensor | None) -> Tensor:
    """[rows, k], log of each child's estimated chance to be the target's choice. greedy bool [rows].

    sharpness fp32 [rows]: of the race softmax(sharpness * (log q + g)), which all ids outside the k best run as one, of
    score log(their mass), plus UNSEEN_NOISE where there is noise, but at most the k-th's. None: log q, which is what is
    known without looking at the noise.
    """
    if sharpness is None:
        return top.logprobs
    rest = (1 - top.logprobs.exp().sum(1)).clamp_min(1e-9).log() + UNSEEN_NOISE * ~greedy
    race = torch.cat((top.scores, torch.minimum(rest, top.scores[:, -1])[:, None]), 1) * sharpness[:, None]
    return torch.log_softmax(race, 1)[:, :-1].masked_fill(top.tokens < 0, -math.inf)


class Candidates:
    """Level by level. Candidate 0 is the root. max_depth int64 [B]: of each request's tree. stops int64 [B, S]: tokens
    that get no children. min_chance: candidates below it are none."""

    def __init__(self, max_depth: Tensor, stops: Tensor, min_chance: float) -> None:
        self._max_depth, self._stops = max_depth, stops
        self._least = math.log(min_chance) if min_chance > 0 else -math.inf
        self._depth = 0
        self._first = 1  # index of the newest level's first candidate
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, scores: [B, candidates of the level]

    def add(self, tokens: Tensor, log_chance: Tensor, above: Tensor, parents: Tensor) -> None:
        """Children [B, M * k] of the expanded nodes [B, M] whose scores are `above` and candidate indices `parents`."""
        self._depth += 1
        if self._levels:
            self._first += self._levels[-1][0].shape[1]
        each = tokens.shape[1] // above.shape[1]
        scores = above.repeat_interleave(each, 1) + log_chance
        dead = (tokens < 0) | (self._depth > self._max_depth)[:, None] | (scores < self._least) | scores.isnan()
        self._levels.append((tokens, parents.repeat_interleave(each, 1), scores.masked_fill(dead, -math.inf)))

    def best(self, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The nodes of the newest level to expand: their places in it, candidate indices, tokens and scores, all
        [B, width], best first; -inf where there is none."""
        tokens, _, scores = self._levels[-1]
        stopped = (tokens[..., None] == self._stops[:, None]).any(-1)
        top = scores.masked_fill(stopped, -math.inf).topk(min(width, scores.shape[1]), 1)
        return top.indices, self._first + top.indices, tokens.gather(1, top.indices).clamp_min(0), top.values

    def trees(
        self, roots: Sequence[int], budgets: Sequence[int], others: Sequence[tuple[DraftTree, Sequence[float]]] | None
    ) -> tuple[list[DraftTree], list[float]]:
        """The best `budgets` nodes (root included) of each request, and the sum of their chances: the drafts that are
        expected to be accepted. others: trees of another drafter and the chances of their nodes, which compete for the
        same places; siblings with one token become one, and count twice in the sum. Waits for the device."""
        tokens, parents, scores = (torch.cat(level, 1).cpu().numpy() for level in zip(*self._levels))
        parts_of: list[list[np.ndarray]] = []  # tokens, parents and scores of each request's candidates
        for b, root in enumerate(roots):
            alive = scores[b] > -math.inf
            place = np.concatenate(([0], np.cumsum(alive)))  # a live candidate's parents are alive
            own = [np.array([root]), np.array([-1]), np.array([0.0])]
            learned = [tokens[b][alive], place[parents[b][alive]], scores[b][alive]]
            parts = [np.concatenate(pair) for pair in zip(own, learned)]
            if others is not None:
                parts = _joined(parts, *others[b])
            parts_of.append(parts)
        counts = [len(parts[0]) for parts in parts_of]
        ids, ups, ranks = (np.concatenate(arrays) for arrays in zip(*parts_of))
        packed = tree_from_candidates(
            torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(ups.astype(np.int32)),
            torch.from_numpy(ranks.astype(np.float32)),
            torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)),
            torch.tensor([min(pair) for pair in zip(budgets, counts)], dtype=torch.int32),
        )
        bounds, kept, kept_parents = packed.node_indptr.tolist(), packed.tokens.tolist(), packed.parents.tolist()
        trees = [DraftTree(tuple(kept[a:b]), tuple(kept_parents[a:b])) for a, b in pairwise(bounds)]
        best = [np.sort(parts[2][1:])[::-1][: len(tree) - 1] for parts, tree in zip(parts_of, trees)]
        return trees, [float(np.exp(scores_of).sum()) for scores_of in best]


def _joined(parts: list[np.ndarray], tree: DraftTree, chances: Sequence[float]) -> list[np.ndarray]:
    """The candidates and those of another tree from the same root."""
    shift = len(parts[0]) - 1
    more = (
        np.array(tree.tokens[1:], np.int64), np.array([p + shift if p else 0 for p in tree.parents[1:]], np.int64),
        np.log(np.maximum(np.array(chances[1:], np.float64), 1e-30)),
    )
    return [np.concatenate(pair) for pair in zip(parts, more)]
