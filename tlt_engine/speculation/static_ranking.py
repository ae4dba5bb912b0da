"""Candidates of a draft tree on static tensors: ranked level by level, all kept at fixed places, dead ones at -inf.

Shape legend: B requests, M expanded nodes a request, K children of each, W nodes expanded next, C candidates a request
with the root. Two ways to the same numbers: `TorchRanking` is Candidates, the specification; `FusedRanking` is one
Triton kernel a level, where Candidates takes some forty launches. Knows neither the drafter's layer nor whose noise it
was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from tlt_kernels.params import GREEDY_BELOW, DraftTop
from torch import Tensor

from tlt_engine.speculation.candidates import UNSEEN_NOISE, Candidates, log_chances


@dataclass(frozen=True)
class Expanded:
    """The nodes to expand, best first, all [B, W]: up int64: which of the level's M nodes is the parent; indices int64:
    among the candidates; tokens int64, 0 where there is none; above fp32: scores, -inf where there is none."""

    up: Tensor
    indices: Tensor
    tokens: Tensor
    above: Tensor


@dataclass(frozen=True)
class Ranked:
    """How the candidates of some requests are ranked. limits int64 [B]: depth of each tree. stops int64 [B, S]: tokens
    without children. temperature fp32 [B]. sharpness fp32 [B]; None: by q alone. min_chance: candidates below it are
    none. roots int64 [B]. tokens int64, parents int32, scores fp32 [B * C]: where the candidates go."""

    limits: Tensor
    stops: Tensor
    temperature: Tensor
    sharpness: Tensor | None
    min_chance: float
    roots: Tensor
    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @property
    def batch(self) -> int:
        return len(self.roots)


class Ranking(Protocol):
    """Of the levels of one draft, in order."""

    def add(self, top: DraftTop, above: Tensor, indices: Tensor) -> None:
        """Children, top [B * M, K], of the nodes [B, M] with scores `above` and candidate indices `indices`."""

    def expand(self, width: int) -> Expanded:
        """The best `width` of the newest level."""

    def finish(self) -> None:
        """All candidates stand at their places."""


class DenseCandidates(Candidates):
    def dense(self, roots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int64, parents int32, scores fp32, all [B, C], dead ones included at -inf. roots int64 [B]."""
        tokens, parents, scores = (torch.cat(level, 1) for level in zip(*self._levels))
        one = roots[:, None]
        return (
            torch.cat((one, tokens), 1), torch.cat((torch.full_like(one, -1), parents), 1).int(),
            torch.cat((torch.zeros_like(scores[:, :1]), scores), 1),
        )


class TorchRanking:
    def __init__(self, ranked: Ranked) -> None:
        self._ranked, self._k = ranked, 1
        self._levels = DenseCandidates(ranked.limits, ranked.stops, ranked.min_chance)

    def add(self, top: DraftTop, above: Tensor, indices: Tensor) -> None:
        ranked, (batch, nodes) = self._ranked, above.shape
        self._k = top.tokens.shape[1]
        greedy = (ranked.temperature < GREEDY_BELOW).repeat_interleave(nodes)
        sharpness = None if ranked.sharpness is None else ranked.sharpness.repeat_interleave(nodes)
        chances = log_chances(top, greedy, sharpness)
        self._levels.add(top.tokens.view(batch, -1), chances.view(batch, -1), above, indices)

    def expand(self, width: int) -> Expanded:
        places, indices, tokens, above = self._levels.best(width)
        return Expanded(places // self._k, indices, tokens, above)

    def finish(self) -> None:
        ranked = self._ranked
        dense = self._levels.dense(ranked.roots)
        for place, values in zip((ranked.tokens, ranked.parents, ranked.scores), dense):
            place.copy_(values.flatten())


class FusedRanking:
    """width: of every `expand`, where a level has so many."""

    def __init__(self, ranked: Ranked, width: int) -> None:
        self._ranked, self._width = ranked, width
        self._depth, self._first = 0, 1
        self._expanded: Expanded | None = None

    def add(self, top: DraftTop, above: Tensor, indices: Tensor) -> None:
        from tlt_kernels.triton.children import rank_children  # Triton is an optional extra

        r, children = self._ranked, above.shape[1] * top.tokens.shape[1]
        self._depth += 1
        self._expanded = Expanded(*rank_children(
            top, above, indices, r.limits, r.stops, r.temperature, r.sharpness, r.roots,
            (r.tokens, r.parents, r.scores), depth=self._depth, first=self._first,
            candidates=len(r.tokens) // r.batch, width=min(self._width, children),
            least=math.log(r.min_chance) if r.min_chance > 0 else -math.inf, unseen=UNSEEN_NOISE,
        ))
        self._first += children

    def expand(self, width: int) -> Expanded:
        assert width == self._width and self._expanded is not None, "expand: another width than was ranked for"
        return self._expanded

    def finish(self) -> None:
        """Each level has written its own."""
