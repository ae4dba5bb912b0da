"""From a pass to the hidden states of its committed tokens. Knows rows and positions, not what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from tlt_engine.engine.sample import Sample
from tlt_engine.scheduler.sequence import Chunk, Fork
from tlt_engine.speculation.drafter import Drafter
from tlt_engine.speculation.hidden import HiddenDrafter, HiddenRecorder, HiddenRows, HiddenRun


@dataclass(frozen=True)
class PassHidden:
    """hidden: {index: [R, Ht]} of all packed rows. paths[i]: local nodes of decode i's accepted path, root first."""

    hidden: dict[int, Tensor]
    paths: list[list[int]]


@dataclass(frozen=True)
class Kept:
    """What a pass added to one decoding sample: `count` tokens behind the root at position `root`. rows: of its
    tree."""

    sample: Sample
    rows: int
    root: int
    count: int


def hidden_rows(
    passed: PassHidden, decodes: Seq[Kept], chunks: Iterable[tuple[Chunk, int, Sample]]
) -> HiddenRows:
    """decodes and chunks in the order of the packed rows, decodes first; chunks with the position they began at. The
    hidden state of the last kept token comes with the next pass, whose root it is."""
    runs: list[HiddenRun] = []
    start = 0
    for kept, path in zip(decodes, passed.paths):
        if kept.count and not kept.sample.internal:
            rows = [start + node for node in path[: kept.count]]
            runs.append(HiddenRun(kept.sample.seq.seq_id, kept.root, rows, kept.sample.seq.speculate))
        start += kept.rows
    for chunk, first, sample in chunks:
        if not sample.internal:
            rows_of = range(start, start + chunk.count)
            runs.append(HiddenRun(chunk.seq.seq_id, first, rows_of, chunk.seq.speculate))
        start += chunk.count
    return HiddenRows(passed.hidden, runs)


class HiddenConsumers:
    """Who takes hidden states from the engine's passes: the drafter, where it drafts from them, and recorders."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafters = [cast(HiddenDrafter, drafter)] if hasattr(drafter, "hidden_layers") else []
        self._recorders: list[HiddenRecorder] = []

    @property
    def _all(self) -> Seq[HiddenDrafter | HiddenRecorder]:
        return [*self._drafters, *self._recorders]

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices that a pass must capture."""
        return tuple(sorted({layer for consumer in self._all for layer in consumer.hidden_layers}))

    @property
    def recorded(self) -> bool:
        return bool(self._recorders)

    def add(self, recorder: HiddenRecorder) -> None:
        if recorder not in self._recorders:
            self._recorders.append(recorder)

    def remove(self, recorder: HiddenRecorder) -> None:
        if recorder in self._recorders:
            self._recorders.remove(recorder)

    def take(self, rows: HiddenRows, stored: bool) -> None:
        """stored: the device has given the drafter its own already."""
        if rows.runs:
            for consumer in self._recorders if stored else self._all:
                consumer.take(rows)

    def fork(self, forks: Iterable[Fork], samples: Mapping[int, Sample]) -> None:
        """samples: by seq_id. Recorders are not told of internal ones."""
        for fork in forks:
            internal = samples[fork.seq.seq_id].internal
            told: Seq[HiddenDrafter | HiddenRecorder] = self._drafters if internal else self._all
            for consumer in told:
                consumer.fork(fork.donor.seq_id, fork.seq.seq_id, fork.seq.kv_len)

    def ended(self, sample: Sample) -> None:
        """Its output is sealed."""
        if sample.internal:
            return
        for recorder in self._recorders:
            if sample.output.finish_reason in ("abort", "error"):
                recorder.discard(sample.seq.seq_id)
            else:
                recorder.finish(sample.seq.seq_id, sample.seq.token_ids)

    def target_changed(self, version: str, recomputed: bool) -> None:
        for drafter in self._drafters:
            drafter.target_changed(recomputed)
        for recorder in self._recorders:
            recorder.new_policy(version)
