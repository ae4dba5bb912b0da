"""The learned drafter's forward passes in serving: entries of committed tokens, and levels of a draft tree.

Shape legend: R rows, B requests, M nodes of a level a request, N nodes of the levels above it, H hidden, Hq / Hkv
heads, D head dimension, Vd draft vocabulary. Knows neither requests nor noise. The arithmetic is EagleModel's
(models/eagle.py), with the kernels' ops over the same tensors; tests hold the two together. Nothing here waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tlt_kernels.attention import tree_attention
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv
from torch import Tensor

from tlt_engine.models.eagle import EagleModel
from tlt_engine.models.rope import rope_tables
from tlt_engine.speculation.lanes import Lanes
from tlt_engine.types import MAX_NODES


@dataclass(frozen=True)
class Entries:
    """Entries of committed tokens, those of a request together and ascending.

    ring int64 [R]: rows of Lanes.ring.flatten(0, 1). tokens int64 [R]: the token behind each entry's position.
    positions, slots int64 [R]: absolute positions, and flat slots of the K/V. last int64 [B]: each request's last row.
    logical int32 [B]: slot of that one as attention counts. table int32 [B, P].
    """

    ring: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    logical: Tensor
    table: Tensor


@dataclass(frozen=True)
class Output:
    """logits [rows, Vd or V]. hidden [rows, H], before the final norm: what the next level takes."""

    logits: Tensor
    hidden: Tensor


class Beam:
    """The nodes whose children have been drawn, level by level, behind the last entries of B requests. Node i of a
    request has its K/V in the slot i + 1 behind its last entry's. At most MAX_NODES a request."""

    def __init__(self, entries: Entries) -> None:
        batch, device = len(entries.last), entries.table.device
        self.table, self.root = entries.table, entries.logical.long()
        self.prefix = entries.logical + 1  # int32 [B], as attention counts
        self.slots: Tensor | None = None  # [B, MAX_NODES], flat, of all nodes there can be
        self.position = entries.positions[entries.last]
        self.depth = 0
        self.queries: Tensor | None = None  # [B, N, Hq, D]
        self.bits = torch.zeros(batch, 0, 2, dtype=torch.int64, device=device)
        self.logical = torch.zeros(batch, 0, dtype=torch.int64, device=device)  # root + depth, as the window counts

    @property
    def nodes(self) -> int:
        return self.bits.shape[1]


class EaglePass:
    """model: bound to its target. length: positions that entries can take, those of drafts included."""

    def __init__(self, model: EagleModel, lanes: Lanes, length: int) -> None:
        self.model, self.lanes = model, lanes
        c = model.config
        self.length = min(length, c.max_position_embeddings)
        self.cos, self.sin = rope_tables(c.rope, self.length, model.device)
        self._window = c.window or 0
        self._scale = c.head_dim**-0.5
        self._nodes = nodes = torch.arange(MAX_NODES, device=model.device)
        self._even: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # node_indptr and causal of such passes
        bit = torch.ones_like(nodes) << (nodes % 64)
        self._own_bits = torch.stack((bit * (nodes < 64), bit * (nodes >= 64)), 1)  # [MAX_NODES, 2]

    @property
    def bytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes + self._own_bits.nbytes

    def extend(self, entries: Entries) -> Output:
        """Writes the K/V of all entries; the output [B] of each request's last one. The others' attention, MLP and
        head would go nowhere: an entry's K and V do not depend on what the layer makes of earlier ones."""
        aux = self.lanes.ring_flat.index_select(0, entries.ring)
        embeds = F.embedding(entries.tokens, self.model.embedding)
        inputs, residual = self._enter(embeds, self.fuse(aux))
        q = self.write(inputs, entries.positions, entries.slots)
        batch = len(entries.last)
        if len(q) != batch:
            q, residual = q.index_select(0, entries.last), residual.index_select(0, entries.last)
        bits = self._own_bits[:1].expand(batch, 2).contiguous()
        attended = self._attend(q, entries.table, entries.logical, 1, bits, entries.logical.long())
        return self.finish(attended, residual)

    def level(self, beam: Beam, tokens: Tensor, hidden: Tensor, parents: Tensor) -> Output:
        """One more level: tokens int64 [B, M] under parents int64 [B, M] (index among the beam's nodes, -1 for a child
        of the root), whose outputs are hidden [B, M, H]. The output's rows [B * M] are in the same order."""
        batch, width = tokens.shape
        above = beam.nodes
        beam.depth += 1
        if beam.slots is None:
            beam.slots = self._slots(beam)
        slots = beam.slots[:, above : above + width].contiguous()  # flattened, one column would stay a view
        # Beyond the end only nodes stand whose requests draft no deeper: their outputs are thrown away.
        positions = (beam.position + beam.depth).clamp_max(self.length - 1).repeat_interleave(width)
        embeds = F.embedding(tokens.flatten(), self.model.embedding)
        inputs, residual = self._enter(embeds, hidden.flatten(0, 1))
        q = self.write(inputs, positions, slots.flatten()).unflatten(0, (batch, width))

        self._grow(beam, q, parents)
        assert beam.queries is not None
        rows = beam.nodes
        # The rows above come along as keys' owners only: their outputs are thrown away. At 8 nodes a level and 8 levels
        # that is 4.5 times the needed queries of an attention over a window, of one layer.
        attended = self._attend(
            beam.queries.flatten(0, 1), beam.table, beam.prefix, rows, beam.bits.flatten(0, 1),
            beam.logical.flatten(),
        )
        return self.finish(attended.unflatten(0, (batch, rows))[:, above:].flatten(0, 1), residual)

    def _slots(self, beam: Beam) -> Tensor:
        """Once a draft: ten small launches that each level would repeat. A tree has fewer nodes than this counts; what
        would lie behind the table is not used."""
        page = self.lanes.kv.page_size
        logical = (beam.root[:, None] + 1 + self._nodes).clamp_max(beam.table.shape[1] * page - 1)
        return beam.table.gather(1, logical // page).long() * page + logical % page

    def _grow(self, beam: Beam, q: Tensor, parents: Tensor) -> None:
        batch, width = parents.shape
        above = beam.nodes
        own = self._own_bits[above : above + width].expand(batch, width, 2)
        if above:
            inherited = beam.bits.gather(1, parents.clamp_min(0)[..., None].expand(batch, width, 2))
            own = own | inherited * (parents >= 0)[..., None]
        beam.bits = torch.cat((beam.bits, own), 1)
        beam.logical = torch.cat((beam.logical, (beam.root + beam.depth)[:, None].expand(batch, width)), 1)
        beam.queries = q if beam.queries is None else torch.cat((beam.queries, q), 1)

    # ---------------------------------------------------------------- the layer

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, checked=False)[0]

    def fuse(self, aux: Tensor) -> Tensor:
        """As EagleModel.fuse."""
        model = self.model
        if model.config.kind == "eagle1":
            target = model.target
            return self._norm(aux, target.weights.norm, target.config.rms_norm_eps)
        return linear(aux, model.fc, checked=False)

    def _enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        model, eps = self.model, self.model.config.rms_norm_eps
        if model.input_norm is None or model.hidden_norm is None:
            x = linear(torch.cat((embeds, hidden), -1), model.fc, checked=False)
            return x, x
        normed = (self._norm(embeds, model.input_norm, eps), self._norm(hidden, model.hidden_norm, eps))
        return torch.cat(normed, -1), hidden

    def write(self, inputs: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Rotated queries [R, Hq, D]; K and V go to their slots."""
        qkv = linear(inputs, self.model.qkv, checked=False)
        k_cache, v_cache = self.lanes.kv.layer(0)
        return rope_write_kv(qkv, self.cos, self.sin, positions, slots, k_cache, v_cache, checked=False)

    def _attend(
        self, q: Tensor, table: Tensor, prefix_lens: Tensor, each: int, bits: Tensor, positions: Tensor
    ) -> Tensor:
        """[R, Hq, D], `each` rows a request."""
        batch = len(prefix_lens)
        if (batch, each) not in self._even:
            indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * each
            self._even[batch, each] = indptr, torch.zeros(batch, dtype=torch.uint8, device=q.device)
        indptr, causal = self._even[batch, each]
        k_cache, v_cache = self.lanes.kv.layer(0)
        return tree_attention(
            q, k_cache, v_cache, table, prefix_lens, indptr, bits, causal, positions, scale=self._scale,
            window=self._window,
        )

    def finish(self, attended: Tensor, residual: Tensor, out: Output | None = None) -> Output:
        """Behind the attention. out: where the results go, where given."""
        model, eps = self.model, self.model.config.rms_norm_eps
        x = linear(attended.reshape(len(residual), -1), model.o, base=residual, checked=False)
        gated = linear(self._norm(x, model.post_norm, eps), model.gate_up, silu_mul=True, checked=False)
        hidden = linear(gated, model.down, base=x, out=None if out is None else out.hidden, checked=False)
        normed = hidden if model.norm is None else self._norm(hidden, model.norm, eps)
        head, logits = model.head_weight, None if out is None else out.logits
        return Output(linear(normed.to(head.dtype), head, out=logits, checked=False), hidden)
