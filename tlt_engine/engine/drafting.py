"""The learned drafter between two verifications on the GPU, without the host: from a walk to the inputs of the next.

Shape legend: B requests of a bucket, R rows of its verifications. Knows frames, addresses and graphs; what is drafted
is speculation/static_draft.py's. The host says once who sits where (`seat`), and again when that changes; afterwards
`step` is launches alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from tlt_kernels import PackedTrees, Walk, cuda
from tlt_kernels.params import GREEDY_BELOW
from torch import Tensor

from tlt_engine.engine.sample import Sample, stop_ids
from tlt_engine.engine.staging import Sections, Upload
from tlt_engine.graphs.buckets import Buckets, DraftKey, ExtendKey, GraphKey
from tlt_engine.graphs.cache import Graph
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


@dataclass(frozen=True)
class Ground:
    """The static tensors of verifications by one graph of the target, `key`: their inputs (layout.frame_sections), the
    results (device.result_sections), of which `walk` is a part, and where the graph leaves hidden states, by layer."""

    key: GraphKey
    frame: dict[str, Tensor]
    results: dict[str, Tensor]
    walk: Walk
    hidden: dict[int, Tensor]


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
        self._roots = torch.zeros(batch, dtype=I64, device=device)
        self.steps = 0
        self.refused: dict[str, int] = {}
        self._unseat()

    @property
    def bytes(self) -> int:
        return self._static.bytes + self._upload.bytes + self._roots.nbytes

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
            fits = [k for k in self._buckets.keys if k.holds(requests, requests * self.verify)]
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
        levels = self.columns - 1
        return ExtendKey(key.batch, self.columns, key), DraftKey(key.batch, levels, self._static.k, key)

    def all_keys(self) -> list[GraphKey]:
        """Of the batches whose trees a graph of the target holds, the largest first."""
        targets = {key for key in self._chosen.values() if key is not None}
        return [k for key in sorted(targets, key=lambda t: (-t.rows, -t.batch)) for k in self.keys(key)]

    def capture(self, key: ExtendKey | DraftKey, capturer: Capturer, ground: Ground) -> CapturedGraph:
        """On empty seats, and walks of nothing behind no keys: only dummies are written, and the frame, which must be
        nobody's at that time."""
        self._unseat()
        ground.walk.accept_lens.zero_()
        ground.frame["prefix_lens"].zero_()
        return capturer.capture(lambda: (self._extend if isinstance(key, ExtendKey) else self._draft)(ground))

    # ---------------------------------------------------------------- a step

    def store(self, committed: Tensor, hidden: dict[int, Tensor]) -> None:
        """Between two plain steps: hidden states of the roots of all samples seated, in the order of `committed`."""
        layers = [hidden[i] for i in self.drafter.hidden_layers]
        self._static.store(self._seats.first(len(committed)), committed, layers)

    def step(self, graphs: tuple[Graph | None, Graph | None], ground: Ground) -> None:
        """From a walk over the trees in the frame, whose keys are committed and whose results are on their way to the
        host, to the next trees in the frame; of them the host gets indptr, deepest and expected with its next results.
        None: a graph that there is no memory for; its kernels are launched one by one."""
        for graph, run in zip(graphs, (self._extend, self._draft)):
            if graph is not None:
                graph.replay()
            else:
                run(ground)
        self.steps += 1

    def _extend(self, ground: Ground) -> None:
        batch, d, walk = ground.key.batch, ground.frame, ground.walk
        cuda.advance(walk, d["prefix_lens"], self._roots[:batch])
        self._static.extend(self._seats.first(batch), Verified(
            walk.accept_lens, walk.paths, walk.tokens, d["node_indptr"], d["prefix_lens"],
            [ground.hidden[i] for i in self.drafter.hidden_layers],
        ))

    def _draft(self, ground: Ground) -> None:
        batch, d, static = ground.key.batch, ground.frame, self._static
        static.draft(self._seats.first(batch), d["prefix_lens"], self._roots[:batch])
        total = batch * static.candidates
        cuda.tree_from_candidates(
            static.tokens[:total], static.parents[:total], static.scores[:total], static.cand_indptr[: batch + 1],
            static.budgets[:batch], rows=ground.key.rows, widest=static.candidates,
            out=PackedTrees(d["token_ids"], d["parents"], d["depths"], d["ancestors"], d["node_indptr"]),
        )
        ground.results["expected"].copy_(static.expected[:batch])
        (self._pack if static.fused else self._pack_by_torch)(ground)

    def _pack(self, ground: Ground) -> None:
        from tlt_kernels.triton.draft_step import Packed, pack  # Triton is an optional extra

        d, results, seats = ground.frame, ground.results, self._seats
        names = ("positions", "draws", "slots", "keys", "samples", "segments", "temperature")
        pack(
            d["node_indptr"], d["depths"], d["prefix_lens"], d["page_table"],
            (seats.keys, seats.samples, seats.segments, seats.temperature),
            Packed(**{name: d[name] for name in names}, deepest=results["deepest"], indptr=results["indptr"]),
            page=self._page_size, pad_slot=self._pad_slot,
        )

    def _pack_by_torch(self, ground: Ground) -> None:
        """What `pack` computes, in a dozen launches: for where there is no Triton."""
        d, rows = ground.frame, ground.key.rows
        # Rows behind the last tree get the last request's noise; nobody walks over them.
        row = torch.arange(rows, dtype=I32, device=d["depths"].device)
        owner = torch.searchsorted(d["node_indptr"][1:], row, right=True).clamp_max(ground.key.batch - 1)
        for name in ("keys", "samples", "segments", "temperature"):
            torch.index_select(getattr(self._seats, name), 0, owner, out=d[name])
        depths = torch.where(row < d["node_indptr"][-1], d["depths"], 0)
        ground.results["deepest"].zero_().scatter_reduce_(0, owner, depths, "amax")
        ground.results["indptr"].copy_(d["node_indptr"])
        cuda.step_inputs(
            d["node_indptr"], d["depths"], d["prefix_lens"], d["page_table"], page=self._page_size,
            pad_slot=self._pad_slot, positions=d["positions"], draws=d["draws"], slots=d["slots"],
        )
