"""The learned drafter between two verifications on the GPU, without the host: from a walk to the inputs of the next.

Shape legend: B requests of a bucket, R rows of its verifications. Knows frames, addresses and graphs; what is drafted
is speculation/static_draft.py's. The host says once who sits where (`seat`), and again when that changes; afterwards
`step` is launches alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from tlt_kernels import PackedTrees, Walk, cuda
from tlt_kernels.params import GREEDY_BELOW
from torch import Tensor

from tlt_engine.engine.layout import Layout
from tlt_engine.engine.sample import Sample, stop_ids
from tlt_engine.engine.staging import Sections, Upload
from tlt_engine.graphs.buckets import Buckets, DraftKey, ExtendKey, GraphKey
from tlt_engine.graphs.cache import Graph, GraphCache
from tlt_engine.graphs.capture import CapturedGraph, Capturer
from tlt_engine.speculation.lanes import Lane
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.static_draft import Seats, Verified

MAX_STOPS = 16  # ids of a request, EOS among them, that get no children; requests with more are drafted for by the host
I64, I32, F32 = torch.int64, torch.int32, torch.float32


def seat_sections(batch: int) -> Sections:
    """Those of static_draft.Seats."""
    ids = ("lane", "origin", "end", "keys", "samples", "segments")
    return {
        "live": ((1,), I32), **dict.fromkeys(ids, ((batch,), I64)), "temperature": ((batch,), F32),
        "sharpness": ((batch,), F32), "stops": ((batch, MAX_STOPS), I64),
    }


class DeviceDrafting:
    """buckets: of the target's graphs; drafts are for those that hold trees of a whole profile. page_size, pad_slot: of
    the target's KV."""

    def __init__(
        self, drafter: EagleDrafter, buckets: Buckets, device: torch.device, *, page_size: int, pad_slot: int
    ) -> None:
        self.drafter = drafter
        profile = drafter.config.profile
        self.columns, self.verify = profile.depth + 1, profile.verify
        self._buckets, self._page_size, self._pad_slot = buckets, page_size, pad_slot
        self._chosen: dict[int, GraphKey | None] = {}
        requests = range(1, max(key.batch for key in buckets.keys) + 1)
        batch = max((key.batch for n in requests if (key := self.key(n)) is not None), default=1)
        self._static = drafter.static(batch)
        self._upload = Upload(seat_sections(requests[-1]), device)  # plain steps store for more than are drafted for
        seats = self._upload.frame.device
        self._seats = Seats(**seats)
        self._seated: object = None  # what `seat` has last sent; None: nobody
        self._committed = torch.zeros(batch, dtype=I32, device=device)
        self._indptr = torch.zeros(batch + 1, dtype=I32, device=device)
        self._roots = torch.zeros(batch, dtype=I64, device=device)
        self._deepest = torch.zeros(batch, dtype=I32, device=device)
        self._rows = torch.arange(buckets.keys[0].rows, dtype=I32, device=device)
        self.steps = 0
        self.refused: dict[str, int] = {}
        self._unseat()

    @property
    def bytes(self) -> int:
        own = (self._committed, self._indptr, self._roots, self._deepest, self._rows)
        return self._static.bytes + self._upload.bytes + sum(t.nbytes for t in own)

    def report(self) -> dict[str, Any]:
        """steps: verifications of trees that the device drafted. refused: by reason, those that could have been but for
        it; others come from EagleDrafter.propose."""
        return {"steps": self.steps, "refused": dict(self.refused)}

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def key(self, requests: int) -> GraphKey | None:
        """The target's graph for trees of all nodes of the profile, of the smallest batch that will do: what is drafted
        is padded to it, and 96 rows fit 96 x 1 as well as 4 x 32."""
        if requests not in self._chosen:
            fits = [k for k in self._buckets.keys if k.batch >= requests and k.rows >= requests * self.verify]
            self._chosen[requests] = min(fits, key=lambda k: (k.batch, k.rows), default=None)
        return self._chosen[requests]

    # ---------------------------------------------------------------- who is drafted for

    def seat(self, samples: Seq[Sample], eos_ids: frozenset[int]) -> str | None:
        """Before a step for these samples; None, or why they cannot be drafted for here. Each stands at its root, and
        all entries before that are in its lane."""
        lanes = [self.drafter.whole_lane(s.seq.seq_id, s.seq.kv_len) for s in samples]
        return "catch-up" if None in lanes else self._seat_in(samples, lanes, eos_ids)

    def seat_to_store(self, samples: Seq[Sample], eos_ids: frozenset[int]) -> bool:
        """Before `store`. Samples that are never drafted for have nobody's lane."""
        lanes = [self.drafter.known_lane(s.seq.seq_id, s.seq.kv_len) for s in samples]
        if any(lane is None and s.seq.speculate for s, lane in zip(samples, lanes)):
            return False
        return self._seat_in(samples, lanes, eos_ids) is None

    def _seat_in(
        self, samples: Seq[Sample], owned: Seq[Lane | None], eos_ids: frozenset[int]
    ) -> str | None:
        drafter, nobody = self.drafter, Lane(self._static.lanes.nobody, 0, 0, 0)
        lanes = [nobody if lane is None else lane for lane in owned]
        sharpness = [drafter.sharpness_of(s.request.params.temperature < GREEDY_BELOW) for s in samples]
        wanted = [
            (s.seq.seq_id, lane.index, lane.origin, s.end, s.seq.segment, sharp)
            for s, lane, sharp in zip(samples, lanes, sharpness)
        ]
        if wanted == self._seated:
            return None
        stops = [sorted(stop_ids(s.request.params, eos_ids)) for s in samples]
        if max(map(len, stops)) > MAX_STOPS:
            return f"more than {MAX_STOPS} stop ids"
        self._seat(samples, lanes, sharpness, stops)
        self._seated = wanted
        return None

    def _seat(
        self, samples: Seq[Sample], lanes: Seq[Lane], sharpness: Seq[float], stops: Seq[list[int]]
    ) -> None:
        host, n = self._blank(), len(samples)
        host["live"][:] = n
        columns: dict[str, Seq[Any]] = {
            "lane": [lane.index for lane in lanes], "origin": [lane.origin for lane in lanes],
            "end": [s.end for s in samples], "keys": [s.seq.key for s in samples],
            "samples": [s.seq.sample for s in samples], "segments": [s.seq.segment for s in samples],
            "temperature": [s.request.params.temperature for s in samples], "sharpness": sharpness,
        }
        for name, values in columns.items():
            host[name][:n] = values
        for row, ids in zip(host["stops"], stops):
            row[: len(ids)] = ids
        self._upload.send()

    def _blank(self) -> dict[str, Any]:
        """All seats empty, on the host."""
        self._upload.begin()
        host = self._upload.frame.host
        for values in host.values():
            values[...] = 0
        host["lane"][:] = self._static.lanes.nobody
        host["stops"][...] = -2
        return host

    def _unseat(self) -> None:
        self._blank()
        self._upload.send()
        self._seated = None

    # ---------------------------------------------------------------- graphs

    def keys(self, key: GraphKey) -> tuple[ExtendKey, DraftKey]:
        """Of the graphs that a step for the target's graph `key` replays."""
        return ExtendKey(key.batch, self.columns), DraftKey(key.batch, self.columns - 1, self._static.k)

    def all_keys(self) -> list[GraphKey]:
        """Of the batches whose trees a graph of the target holds, the largest first."""
        batches = {key.batch for key in self._chosen.values() if key is not None}
        return [k for b in sorted(batches, reverse=True) for k in (
            ExtendKey(b, self.columns), DraftKey(b, self.columns - 1, self._static.k)
        )]

    def graphs(self, cache: GraphCache, key: GraphKey, requests: int) -> tuple[Graph | None, Graph | None]:
        """Captured if need be; None: there is no memory for it, and its kernels are launched one by one."""
        keys = self.keys(key)
        found = [cache.get(k, requests * k.nodes) for k in keys]
        # The budget may be so small that the second has thrown out the first.
        extend, draft = (graph if cache.holds(k) else None for graph, k in zip(found, keys))
        return extend, draft

    def capture(self, key: GraphKey, capturer: Capturer, walk: Walk, hidden: dict[int, Tensor]) -> CapturedGraph:
        """On empty seats: whatever the walk says, only dummies are written."""
        self._unseat()
        if isinstance(key, ExtendKey):
            return capturer.capture(lambda: self._extend(key.batch, walk, hidden))
        return capturer.capture(lambda: self._draft(key.batch))

    def _extend(self, batch: int, walk: Walk, hidden: dict[int, Tensor]) -> None:
        self._static.extend(self._seats.first(batch), Verified(
            walk.accept_lens, walk.paths, walk.tokens, self._indptr[: batch + 1], self._committed[:batch],
            [hidden[i] for i in self.drafter.hidden_layers],
        ))

    def _draft(self, batch: int) -> None:
        self._static.draft(self._seats.first(batch), self._committed[:batch], self._roots[:batch])

    # ---------------------------------------------------------------- a step

    def store(self, committed: Tensor, hidden: dict[int, Tensor]) -> None:
        """Between two plain steps: hidden states of the roots of all samples seated, in the order of `committed`."""
        layers = [hidden[i] for i in self.drafter.hidden_layers]
        self._static.store(self._seats.first(len(committed)), committed, layers)

    def step(
        self, graphs: tuple[Graph | None, Graph | None], key: GraphKey, layout: Layout, walk: Walk,
        hidden: dict[int, Tensor],
    ) -> None:
        """From a walk over the trees in `layout`, whose keys are committed and whose results are on their way to the
        host, to the next trees in `layout`. walk: of the bucket's B requests, accept_lens 0 for padding."""
        batch, d = key.batch, layout.frame.device
        cuda.advance(walk, d["prefix_lens"], self._roots[:batch])
        self._committed[:batch].copy_(d["prefix_lens"])
        self._indptr[: batch + 1].copy_(d["node_indptr"])
        extend, draft = graphs
        if extend is not None:
            extend.replay()
        else:
            self._extend(batch, walk, hidden)
        if draft is not None:
            draft.replay()
        else:
            self._draft(batch)
        self._pack(key, layout)
        self.steps += 1

    def _pack(self, key: GraphKey, layout: Layout) -> None:
        batch, rows, d, static = key.batch, key.rows, layout.frame.device, self._static
        trees = PackedTrees(d["token_ids"], d["parents"], d["depths"], d["ancestors"], d["node_indptr"])
        total = batch * static.candidates
        cuda.tree_from_candidates(
            static.tokens[:total], static.parents[:total], static.scores[:total], static.cand_indptr[: batch + 1],
            static.budgets[:batch], rows=rows, widest=static.candidates, out=trees,
        )
        # Rows behind the last tree get the last request's noise; nobody walks over them.
        row = self._rows[:rows]
        owner = torch.searchsorted(trees.node_indptr[1:], row, right=True).clamp_max(batch - 1)
        for name in ("keys", "samples", "segments", "temperature"):
            torch.index_select(getattr(self._seats, name), 0, owner, out=d[name])
        depths = torch.where(row < trees.node_indptr[-1], trees.depths, 0)
        self._deepest[:batch].zero_().scatter_reduce_(0, owner, depths, "amax")
        cuda.step_inputs(
            trees.node_indptr, trees.depths, d["prefix_lens"], d["page_table"], page=self._page_size,
            pad_slot=self._pad_slot, positions=d["positions"], draws=d["draws"], slots=d["slots"],
        )

    def tell(self, batch: int, layout: Layout, results: dict[str, Tensor]) -> None:
        """Into the results of the verification of `step`'s trees: what the host does not know of them."""
        results["indptr"].copy_(layout.frame.device["node_indptr"])
        results["deepest"].copy_(self._deepest[:batch])
        results["expected"].copy_(self._static.expected[:batch])
