"""The forward passes of a draft on static tensors: from one level's expanded nodes to their logits and noise.

Shape legend: B requests, M expanded nodes a level, N of all levels, H drafter hidden. Two ways to the same numbers:
`TorchLevels` is EaglePass, the specification, for every drafter; `FusedPass` is EAGLE-3's on a GPU, one kernel for what
a level's rows are made of and one for their attention. Knows neither candidates nor their ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tlt_kernels.params import NoiseIds
from torch import Tensor

from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.learned_pass import Beam, EaglePass, Entries, Output
from tlt_engine.speculation.static_ranking import Expanded
from tlt_engine.types import MAX_NODES

if TYPE_CHECKING:
    from tlt_engine.speculation.static_draft import Seats, Verified


@dataclass(frozen=True)
class Rows:
    """Whose children are drawn: ids, all [rows], of the children; temperature fp32 [rows]."""

    ids: NoiseIds
    temperature: Tensor


class Levels(Protocol):
    """Of one draft: `roots` first, then `next` for each level."""

    limits: Tensor  # int64 [B], depth of each request's tree

    def roots(self) -> Rows:
        """Of the last committed tokens, a row a request."""

    def next(self, nodes: Expanded, hidden: Tensor) -> tuple[Output, Rows]:
        """hidden [B * M above, H]: the outputs of the level above, or of the last entries."""


def spread(values: Tensor, nodes: int) -> Tensor:
    """values [B] -> [B * nodes], contiguous."""
    return values if nodes == 1 else values[:, None].expand(-1, nodes).reshape(-1).contiguous()


class TorchLevels:
    """last: the requests' last entries, of which only `last`, `positions`, `logical` and `table` are looked at. depth:
    of the profile."""

    def __init__(self, passes: EaglePass, seats: Seats, committed: Tensor, last: Entries, depth: int) -> None:
        self._pass, self._seats, self._beam = passes, seats, Beam(last)
        self._first = -1  # index in the beam of the level above's first
        self._length = committed.long() + 1  # tokens; a child of a node at depth d is drawn at position length + d
        # The bonus token takes a place, and the deepest node's parent must stand where the drafter has positions.
        self.limits = ((seats.end - 1).clamp_max(passes.length + 2) - self._length).clamp_max(depth)

    def roots(self) -> Rows:
        return self._rows(1)

    def next(self, nodes: Expanded, hidden: Tensor) -> tuple[Output, Rows]:
        batch, width = nodes.tokens.shape
        wide = nodes.up[..., None].expand(-1, -1, hidden.shape[-1])
        parents, self._first = nodes.up + self._first, self._beam.nodes
        out = self._pass.level(
            self._beam, nodes.tokens, hidden.unflatten(0, (batch, -1)).gather(1, wide), parents
        )
        return out, self._rows(width)

    def _rows(self, nodes: int) -> Rows:
        seats = self._seats
        names = (seats.keys, self._length + self._beam.depth, seats.samples, seats.segments)
        return Rows(NoiseIds(*(spread(values, nodes) for values in names)), spread(seats.temperature, nodes))


class FusedPass:
    """For at most `batch` requests, and levels of widths[i] expanded nodes each."""

    def __init__(self, model: EagleModel, passes: EaglePass, batch: int, widths: list[int]) -> None:
        from tlt_kernels.triton import draft_attention, draft_rows  # Triton is an optional extra

        self.model, self.passes = model, passes
        self._rows, self._attention = draft_rows, draft_attention
        c, lanes, device = model.config, passes.lanes, model.device
        self._places = draft_rows.Places(lanes.window, lanes.slots_each, lanes.nobody, lanes.dummy_slot)
        self._window = c.window or lanes.window + MAX_NODES
        nodes = max(sum(widths), 1)
        self.bits = torch.zeros(batch, nodes, 2, dtype=torch.int64, device=device)
        depths = [depth for depth, width in enumerate(widths, 1) for _ in range(width)]
        self._depths = torch.tensor(depths or [0], dtype=torch.int32, device=device)
        group = c.num_heads // c.num_kv_heads
        teams = max(draft_attention.teams(width, group, model.dtype) for width in (1, *widths))
        self._arrivals = torch.zeros(batch * teams * c.num_kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def serves(model: EagleModel) -> bool:
        from tlt_kernels.triton.draft_rows import MAX_LAYERS

        c = model.config
        return c.kind == "eagle3" and len(c.aux_layers) <= MAX_LAYERS

    @property
    def bytes(self) -> int:
        return self.bits.nbytes + self._depths.nbytes + self._arrivals.nbytes

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        model = self.model
        assert model.input_norm is not None and model.hidden_norm is not None, "an EAGLE-1 drafter"
        return model.input_norm, model.hidden_norm

    def extend(self, seats: Seats, walked: Verified, out: Output) -> None:
        """As StaticDraft.extend."""
        model, passes, eps = self.model, self.passes, self.model.config.rms_norm_eps
        entries = self._rows.walk_rows(
            walked.accept_lens, walked.paths, walked.tokens, walked.node_indptr, walked.committed, seats.lane,
            seats.origin, walked.hidden, model.embedding, self.scales[0], passes.lanes.ring_flat, self._places, eps,
        )
        residual = self._rows.fused_rows(passes.fuse(entries.aux), entries, self.scales[1], eps)
        q = passes.write(entries.inputs, entries.positions, entries.slots)
        passes.finish(self._attend(q, seats, walked.committed, last=entries.last), residual, out)

    def _attend(self, q: Tensor, seats: Seats, committed: Tensor, **rows: Any) -> Tensor:
        k_cache, v_cache = self.passes.lanes.kv.layer(0)
        return self._attention.attend_drafts(
            q, k_cache, v_cache, committed, seats.lane, seats.origin, self._arrivals, self._places,
            scale=self.model.config.head_dim**-0.5, window=self._window, **rows,
        )


class FusedLevels:
    def __init__(self, fused: FusedPass, seats: Seats, committed: Tensor, depth: int) -> None:
        self._fused, self._seats, self._committed = fused, seats, committed
        self._depth = self._nodes = 0
        self.limits, self._draws = fused._rows.begin(
            committed, seats.end, most=fused.passes.length + 2, depth=depth
        )

    def roots(self) -> Rows:
        seats = self._seats
        return Rows(NoiseIds(seats.keys, self._draws, seats.samples, seats.segments), seats.temperature)

    def next(self, nodes: Expanded, hidden: Tensor) -> tuple[Output, Rows]:
        fused, seats, model = self._fused, self._seats, self._fused.model
        batch, width = nodes.tokens.shape
        self._depth += 1
        rows = fused._rows.level_rows(
            nodes.tokens, nodes.up, hidden, model.embedding, fused.scales, self._committed, seats.lane, seats.origin,
            (seats.keys, seats.samples, seats.segments, seats.temperature), fused.bits, fused._places,
            model.config.rms_norm_eps, depth=self._depth, above=self._nodes, parents=len(hidden) // batch,
            length=fused.passes.length,
        )
        self._nodes += width
        q = fused.passes.write(rows.inputs, rows.positions, rows.slots)
        attended = fused._attend(
            q, seats, self._committed, bits=fused.bits, depths=fused._depths, nodes=self._nodes, depth=self._depth
        )
        out = fused.passes.finish(attended, rows.residual)
        return out, Rows(NoiseIds(rows.keys, rows.draws, rows.samples, rows.segments), rows.temperature)
