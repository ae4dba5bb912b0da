"""The learned drafter's step on static tensors: from what a verification left on the device to the next candidates.

Shape legend: B requests, S columns of a walk, D depth, K branching, M expanded nodes a level, C candidates a request
(the root among them), H drafter hidden. Knows neither streams nor graphs nor the target's inputs. Shapes depend on B
and the profile alone, nothing waits for the device, and what the host must say lies in `Seats`: so both halves can be
captured in CUDA graphs, `extend` for (B, S) and `draft` for (B, D, K). The trees are those that EagleDrafter.propose
would draw; tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from tlt_kernels.draft import noisy_top_k
from tlt_kernels.params import DraftTop, RowParams
from torch import Tensor

from tlt_engine.config import SpeculationConfig
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.lanes import Lanes
from tlt_engine.speculation.learned_pass import EaglePass, Entries, Output
from tlt_engine.speculation.static_levels import FusedLevels, FusedPass, Levels, Rows, TorchLevels
from tlt_engine.speculation.static_ranking import FusedRanking, Ranked, Ranking, TorchRanking


@dataclass(frozen=True)
class Seats:
    """Who is drafted for, a row each; the host writes it when the batch changes. lane, origin int64 [B]: as Lanes has
    them; lane = Lanes.nobody: a row of padding. end int64 [B]: tokens that the sample can have at most. keys, samples,
    segments int64 [B]: whose noise. temperature, sharpness fp32 [B]. stops int64 [B, stops]: tokens without children,
    padded with -2. live int32 [1]: rows that are not padding; they come first."""

    lane: Tensor
    origin: Tensor
    end: Tensor
    keys: Tensor
    samples: Tensor
    segments: Tensor
    temperature: Tensor
    sharpness: Tensor
    stops: Tensor
    live: Tensor

    def first(self, batch: int) -> Seats:
        rows = {f.name: getattr(self, f.name)[:batch] for f in fields(self) if f.name != "live"}
        return Seats(**rows, live=self.live)


@dataclass(frozen=True)
class Verified:
    """A walk whose keys are committed. accept_lens int32 [B], paths int32 [B, S], tokens int64 [B, S]: as in Walk.
    node_indptr int32 [B + 1]: of the trees that were walked. committed int32 [B]: keys, those of the walk included.
    hidden: the drafter's hidden states of all rows, [R, Ht] each, in the order of its aux_layers."""

    accept_lens: Tensor
    paths: Tensor
    tokens: Tensor
    node_indptr: Tensor
    committed: Tensor
    hidden: Sequence[Tensor]


class StaticDraft:
    """batch: the most requests. width: nodes expanded a level. Static results of `draft`, for the selection of the
    trees (tlt_kernels.cuda.tree_from_candidates): tokens, parents, scores [batch * C]; cand_indptr int32 [batch + 1];
    budgets int32 [batch]; expected fp32 [batch], the sum of the chances of the nodes that will be kept. fused: ranking
    is one kernel a level."""

    def __init__(
        self, model: EagleModel, lanes: Lanes, passes: EaglePass, config: SpeculationConfig, *, batch: int, width: int,
        vocab_limit: int | None,
    ) -> None:
        self.model, self.lanes, self.config = model, lanes, config
        self.depth, self.k, self.width, self.batch = config.profile.depth, config.profile.top_k, width, batch
        self._pass, self._vocab_limit = passes, vocab_limit
        device = model.device
        self.logits = torch.zeros(batch, len(model.head_weight), dtype=model.head_weight.dtype, device=device)
        self.hidden = torch.zeros(batch, model.config.hidden_size, dtype=model.dtype, device=device)
        self.candidates = 1 + sum(self._level_sizes())
        total = batch * self.candidates
        self.tokens = torch.zeros(total, dtype=torch.int64, device=device)
        self.parents = torch.zeros(total, dtype=torch.int32, device=device)
        self.scores = torch.zeros(total, device=device)
        self.cand_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.budgets = torch.ones(batch, dtype=torch.int32, device=device)
        self.expected = torch.zeros(batch, device=device)
        self._count = torch.arange(max(batch, self.depth) + 1, device=device)
        self._roots = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._root_scores = torch.zeros(batch, 1, device=device)
        self.fused = False
        self._passes: FusedPass | None = None
        if device.type == "cuda":
            self.fuse()

    def fuse(self) -> None:
        """Take the fused kernels, where they serve the drafter."""
        self.fused = True
        if FusedPass.serves(self.model):
            widths = [children // self.k for children in self._level_sizes()[1:]]
            self._passes = FusedPass(self.model, self._pass, self.batch, widths)

    def _level_sizes(self) -> list[int]:
        """Candidates of each level."""
        sizes = [self.k]
        for _ in range(1, self.depth):
            sizes.append(min(self.width, sizes[-1]) * self.k)
        return sizes

    @property
    def bytes(self) -> int:
        own = sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))
        return own + (0 if self._passes is None else self._passes.bytes)

    # ---------------------------------------------------------------- the last pass's tokens

    def store(self, seats: Seats, committed: Tensor, hidden: Sequence[Tensor]) -> None:
        """After a plain step: the roots' hidden states, row b of each [R, Ht], to the rings. committed int32 [B]: keys,
        the root's included."""
        lanes, batch = self.lanes, len(committed)
        places = seats.lane * lanes.window + (committed.long() - 1) % lanes.window
        rows = torch.where(seats.lane < lanes.nobody, places, lanes.dummy_ring)
        lanes.ring_flat.index_copy_(0, rows, torch.cat([states[:batch] for states in hidden], -1))

    def extend(self, seats: Seats, walked: Verified) -> None:
        """The accepted positions' hidden states go to the rings, their entries' K and V to the lanes; `logits` and
        `hidden` of each request's last entry. Padding, and what lies behind a walk's end, goes to places that nobody
        reads. Harmless to repeat."""
        batch = len(walked.accept_lens)
        if self._passes is not None:
            self._passes.extend(seats, walked, Output(self.logits[:batch], self.hidden[:batch]))
            return
        out = self._pass.extend(self._entries(seats, walked))
        self.logits[:batch].copy_(out.logits)
        self.hidden[:batch].copy_(out.hidden)

    def _entries(self, seats: Seats, walked: Verified) -> Entries:
        lanes, window = self.lanes, self.lanes.window
        batch, steps = walked.paths.shape
        depth = self._count[:steps]
        accepted, stop = walked.accept_lens.long(), walked.committed.long()
        positions = (stop - accepted)[:, None] + depth
        # Of a walk longer than the window only its end has room in the ring, and can be seen from the last entry.
        wanted = (depth < accepted[:, None]) & (positions >= (stop - window)[:, None])
        wanted &= (seats.lane < lanes.nobody)[:, None]
        lane, origin = seats.lane[:, None], seats.origin[:, None]
        ring = torch.where(wanted, lane * window + positions % window, lanes.dummy_ring).flatten()
        slots = lane * lanes.slots_each + (positions - origin) % lanes.slots_each
        # Padding's walk may be anything, when graphs are captured.
        rows = torch.where(wanted, walked.node_indptr[:-1, None] + walked.paths, 0).flatten()
        aux = torch.cat([states.index_select(0, rows) for states in walked.hidden], -1)
        lanes.ring_flat.index_copy_(0, ring, aux)
        return Entries(
            ring=ring, tokens=torch.where(wanted, walked.tokens, 0).clamp_min(0).flatten(),
            positions=torch.where(wanted, positions, 0).flatten(),
            slots=torch.where(wanted, slots, lanes.dummy_slot).flatten(),
            last=self._count[:batch] * steps + (accepted - 1).clamp(0, steps - 1),
            logical=self._logical(seats, stop), table=self._table(seats),
        )

    def _logical(self, seats: Seats, stop: Tensor) -> Tensor:
        """int32 [B]: slot of the last entry as attention counts (Lanes.extend)."""
        each = self.lanes.slots_each
        oldest = torch.maximum(seats.origin, stop - self.lanes.window)
        base = seats.origin + (oldest - seats.origin) // each * each
        return (stop - 1 - base).clamp_min(0).int()

    def _table(self, seats: Seats) -> Tensor:
        return self.lanes.table.index_select(0, seats.lane)

    # ---------------------------------------------------------------- candidates

    def draft(self, seats: Seats, committed: Tensor, roots: Tensor) -> None:
        """Candidates from the last entries on. committed int32 [B], roots int64 [B]: the last tokens. Harmless to
        repeat."""
        batch, hidden = len(committed), self.hidden[: len(committed)]
        levels = self._levels(seats, committed)
        ranking = self._ranking(seats, levels.limits, roots)
        ranking.add(self._top(levels.roots(), self.logits[:batch]), self._root_scores[:batch], self._roots[:batch])
        for _ in range(1, self.depth):
            nodes = ranking.expand(self.width)
            out, rows = levels.next(nodes, hidden)
            hidden = out.hidden
            ranking.add(self._top(rows, out.logits), nodes.above, nodes.indices)
        ranking.finish()
        self._keep(seats)

    def _levels(self, seats: Seats, committed: Tensor) -> Levels:
        if self._passes is not None:
            return FusedLevels(self._passes, seats, committed, self.depth)
        stop = committed.long()
        none = torch.zeros_like(stop)
        last = Entries(
            ring=none, tokens=none, positions=(stop - 1).clamp_min(0), slots=none, last=self._count[: len(stop)],
            logical=self._logical(seats, stop), table=self._table(seats),
        )
        return TorchLevels(self._pass, seats, committed, last, self.depth)

    def _ranking(self, seats: Seats, limits: Tensor, roots: Tensor) -> Ranking:
        config, total = self.config, len(roots) * self.candidates
        blind = config.ranking == "q" or not config.shared_noise
        ranked = Ranked(
            limits, seats.stops, seats.temperature, None if blind else seats.sharpness, config.min_chance, roots,
            self.tokens[:total], self.parents[:total], self.scores[:total],
        )
        return FusedRanking(ranked, self.width) if self.fused else TorchRanking(ranked)

    def _top(self, rows: Rows, logits: Tensor) -> DraftTop:
        """The k best children of each of the nodes whose logits they are."""
        reduced = self.model.head is not None
        return noisy_top_k(
            logits, rows.ids, RowParams(rows.temperature), self.k, d2t=self.model.d2t if reduced else None,
            target_vocab=self.model.config.vocab_size if reduced else None, vocab_limit=self._vocab_limit,
            noise=self.config.shared_noise,
        )

    def _keep(self, seats: Seats) -> None:
        batch, verify = len(seats.lane), self.config.profile.verify
        if self.fused:
            from tlt_kernels.triton.draft_step import keep  # Triton is an optional extra

            keep(
                self.scores[: batch * self.candidates], seats.live, self.cand_indptr[: batch + 1],
                self.budgets[:batch], self.expected[:batch], candidates=self.candidates, verify=verify,
            )
            return
        scores = self.scores[: batch * self.candidates].view(batch, -1)
        # Padding has no candidates, and so no tree. A dead candidate would be taken when no live one is left.
        self.cand_indptr[: batch + 1].copy_(torch.minimum(self._count[: batch + 1], seats.live) * self.candidates)
        self.budgets[:batch].copy_((scores > -math.inf).sum(1).clamp_max(verify))
        best = scores[:, 1:].topk(min(verify - 1, scores.shape[1] - 1), 1).values
        self.expected[:batch].copy_(best.exp().sum(1))
