"""Where the learned drafter keeps what it knows of each sample: a ring of hidden states and a circle of K/V slots.

Shape legend: L lanes, W window, k aux layers, Ht target hidden. Knows neither the drafter's layer nor trees.

A sample owns one lane. Its ring holds the target's hidden states of the last W committed positions, whether or not it
is being drafted for. The K and V of an entry depend on its hidden states and its next token alone, so they are computed
from the ring when they are needed, and again when the drafter changes. Entry t lies in slot (t - origin) % C of the
lane's C slots, C >= W + the slots of a tree: what is overwritten is older than the window, which hides it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.speculation.hidden import HiddenRows
from tlt_engine.types import MAX_NODES

# Turns of the circle in a page table: the window begins within the first, and it and a tree behind it fill at most one.
TURNS = 2


@dataclass
class Lane:
    """Positions [max(origin, end - W), end) are in the ring; entries [.., kv_end) that the window can reach have their
    K and V. Entries start at origin: 0, or the end of a prefix that came from the cache."""

    index: int
    origin: int
    end: int
    kv_end: int


@dataclass(frozen=True)
class Span:
    """Entries [start, stop) of a lane are to be extended by; stop - 1 is the last, `logical` its slot as attention
    counts them: from a position that lies whole turns of the circle behind the origin, so that numbers stay small."""

    lane: Lane
    start: int
    stop: int
    logical: int


class Lanes:
    """width: k * Ht. window None: all of max_len. tree_slots: of the largest tree that is drafted. Samples beyond
    `count` take the lane of the one that was looked at least recently.

    Behind the last lane stands `nobody`'s, a row of padding's (speculation/static_draft.py): its K and V, and what
    belongs to no row, go to dummy_slot, hidden states to dummy_ring.
    """

    def __init__(
        self, count: int, *, window: int | None, max_len: int, tree_slots: int, width: int, kv_heads: int,
        head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.window = max_len if window is None else min(window, max_len)
        self.pages_each = -(-(self.window + min(tree_slots, MAX_NODES)) // page_size)
        self.slots_each = self.pages_each * page_size
        self.nobody, self.dummy_slot, self.dummy_ring = count, count * self.slots_each, count * self.window
        self.kv = KVStorage(1, count * self.pages_each + 1, page_size, kv_heads, head_dim, dtype, device)
        self.ring_flat = torch.zeros(count * self.window + 1, width, dtype=dtype, device=device)
        self.ring = self.ring_flat[:-1].view(count, self.window, width)
        turn = torch.arange(count * self.pages_each, dtype=torch.int32, device=device).view(count, -1)
        dummy = torch.full_like(turn[:1], count * self.pages_each)
        self.table = torch.cat((turn, dummy)).repeat(1, TURNS)
        self._free = list(range(count))[::-1]
        self._lanes: OrderedDict[int, Lane] = OrderedDict()  # by seq_id, the least recently used first

    @property
    def bytes(self) -> int:
        return self.kv.bytes + self.ring_flat.nbytes + self.table.nbytes

    @property
    def held(self) -> int:
        return len(self._lanes)

    # ---------------------------------------------------------------- hidden states

    def take(self, rows: HiddenRows, layers: tuple[int, ...]) -> None:
        """Keep what `rows` has of samples that are drafted for."""
        sources: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for run in rows.runs:
            if run.drafts:
                lane, skip = self._advance(run.seq_id, run.first, len(run.rows))
                sources.append(np.asarray(run.rows[skip:], dtype=np.int64))
                positions = np.arange(run.first + skip, run.first + len(run.rows))
                places.append(lane.index * self.window + positions % self.window)
        if not sources:
            return
        source, place = (torch.from_numpy(np.concatenate(a)).to(self.ring.device) for a in (sources, places))
        if len(source):
            aux = torch.cat([rows.hidden[i].index_select(0, source) for i in layers], -1)
            self.ring.flatten(0, 1).index_copy_(0, place, aux)

    def _advance(self, seq_id: int, first: int, count: int) -> tuple[Lane, int]:
        """The lane that positions [first, first + count) belong to, and how many of them to pass over: those it has (a
        preempted sample is computed again), and those that the rest would overwrite."""
        lane = self._lanes.get(seq_id)
        if lane is None:
            lane = self._open(seq_id, first)
        elif first > lane.end:  # from the prefix cache in between
            lane.origin = lane.end = lane.kv_end = first
        self._lanes.move_to_end(seq_id)
        skip = min(max(lane.end - first, count - self.window, 0), count)
        lane.end = max(lane.end, first + count)
        return lane, skip

    def _open(self, seq_id: int, origin: int) -> Lane:
        if not self._free:
            self.drop(next(iter(self._lanes)))
        lane = self._lanes[seq_id] = Lane(self._free.pop(), origin, origin, origin)
        return lane

    def fork(self, source: int, seq_id: int, length: int) -> None:
        """The first `length` positions of `source`, as far as its ring still has them."""
        donor, own = self._lanes.get(source), self._lanes.get(seq_id)
        if donor is None or (own is not None and own.end >= length):
            return
        first, end = max(donor.origin, donor.end - self.window), min(donor.end, length)
        if first >= end:
            return
        self.drop(seq_id)
        self._lanes.move_to_end(source)
        lane = self._open(seq_id, first)
        lane.end = end
        self.ring[lane.index].copy_(self.ring[donor.index])  # the very same, should it have taken the donor's lane

    def drop(self, seq_id: int) -> None:
        lane = self._lanes.pop(seq_id, None)
        if lane is not None:
            self._free.append(lane.index)

    def clear(self) -> None:
        for seq_id in list(self._lanes):
            self.drop(seq_id)

    def forget_kv(self) -> None:
        """K and V are another drafter's; the hidden states stay."""
        for lane in self._lanes.values():
            lane.kv_end = lane.origin

    # ---------------------------------------------------------------- entries

    def whole(self, seq_id: int, stop: int) -> Lane | None:
        """Its lane, if all entries before `stop` that a window reaches have their K and V, and none behind."""
        lane = self._lanes.get(seq_id)
        return lane if lane is not None and lane.end == lane.kv_end == stop else None

    def known(self, seq_id: int, stop: int) -> Lane | None:
        """Its lane, if it has the hidden states of all positions before `stop` that a window reaches."""
        lane = self._lanes.get(seq_id)
        return lane if lane is not None and lane.end == stop else None

    def stored(self, seq_id: int, stop: int) -> None:
        """The device has written hidden states of the positions before `stop`."""
        self._lanes[seq_id].end = stop

    def extended(self, seq_id: int, stop: int) -> None:
        """The device has written hidden states, K and V of the entries before `stop`."""
        lane = self._lanes[seq_id]
        lane.end = lane.kv_end = stop

    def extend(self, seq_id: int, tokens: int) -> Span | None:
        """The entries to compute for a sample of so many tokens, whose last entry is tokens - 2: those without K and V
        that the last one's window reaches, and always the last. They count as computed. None where its hidden states
        are not all there."""
        lane = self._lanes.get(seq_id)
        stop = tokens - 1
        if lane is None or lane.end != stop or lane.origin >= stop:
            return None
        self._lanes.move_to_end(seq_id)
        oldest = max(lane.origin, stop - self.window)
        start = min(max(lane.kv_end, oldest), stop - 1)
        lane.kv_end = stop
        base = lane.origin + (oldest - lane.origin) // self.slots_each * self.slots_each
        return Span(lane, start, stop, stop - 1 - base)

    def slots(self, lane: Lane, positions: np.ndarray) -> np.ndarray:
        """Flat slots of the entries at these positions."""
        return lane.index * self.slots_each + (positions - lane.origin) % self.slots_each

    def ring_rows(self, lane: Lane, positions: np.ndarray) -> np.ndarray:
        """Rows of ring.flatten(0, 1)."""
        return lane.index * self.window + positions % self.window
