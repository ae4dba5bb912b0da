"""What the hidden-state buffer is given, what it keeps of one sequence, and which of them a draw takes. Knows neither
devices nor models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Run(Protocol):
    """speculation.hidden.HiddenRun: consecutive positions of one sequence."""

    @property
    def seq_id(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> Sequence[int]: ...


class Rows(Protocol):
    """speculation.hidden.HiddenRows: what one pass computed of committed tokens."""

    @property
    def hidden(self) -> Mapping[int, Tensor]: ...
    @property
    def runs(self) -> Sequence[Run]: ...


Part = tuple[int, int, Sequence[int]]  # seq_id, first position, rows of the pass


@dataclass(eq=False)
class Record:
    """Hidden states of consecutive positions `first .. first + rows - 1` of one sequence. Row i lies in
    pages[i // page_rows]; the last `staged` rows are still on the device.

    context: how many leading rows are another record's too (a fork's prompt): they are there to be attended to, and
    are trained in that other record. policy: number of the policy that computed them. tokens: int64 [rows] on the host
    once closed, one a row. readers: draws that are copying from it; its pages stay while there are any.
    """

    uid: int
    seq_id: int
    first: int
    policy: int
    rows: int = 0
    context: int = 0
    staged: int = 0
    pages: list[int] = field(default_factory=list)
    tokens: Tensor | None = None
    readers: int = 0
    dead: bool = False

    @property
    def end(self) -> int:
        """The position that its next row would have."""
        return self.first + self.rows

    @property
    def pairs(self) -> int:
        """Training pairs of its own: the row of each needs the next row for its teacher."""
        return max(self.rows - max(self.context, 1), 0)


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of a closed record, on loan from the buffer until `release`."""

    record: Record
    start: int
    rows: int

    @property
    def tokens(self) -> Tensor:
        """int64 [rows], on the host."""
        assert self.record.tokens is not None
        return self.record.tokens[self.start : self.start + self.rows]

    @property
    def first(self) -> int:
        """Absolute position of its first row."""
        return self.record.first + self.start

    @property
    def trained_from(self) -> int:
        """Its first row that is an entry to train; those before are context."""
        return max(self.record.context - 1 - self.start, 0)


@dataclass(frozen=True)
class DrawPolicy:
    """Which sequences a draw takes.

    max_age: oldest policy, in updates before the current one; 1 is one-step-off, None is any.
    long_share: share of the rows reserved for long sequences. While a step is under way only its short responses have
        ended, so a drafter trained on what is there would forget long ones: TLT (arXiv 2511.16665) keeps those of the
        step before for that. long_rows: what counts as long; None: the longest tenth of the previous policy's records,
        or of all when it left none.
    max_rows: longer sequences give a window of that many rows, at a random place.
    """

    max_age: int | None = 1
    long_share: float = 0.25
    long_rows: int | None = None
    max_rows: int = 4096


def long_threshold(records: Sequence[Record], policy: DrawPolicy, current: int) -> int:
    """Rows from which a record counts as long."""
    if policy.long_rows is not None:
        return policy.long_rows
    lengths = sorted(r.rows for r in records if r.policy < current) or sorted(r.rows for r in records)
    return lengths[min(-(-9 * len(lengths) // 10), len(lengths) - 1)] if lengths else 0


def groups(runs: list[Part], most: int) -> Iterator[tuple[list[Part], int]]:
    """Groups of at most `most` rows, longer runs cut in pieces; with the rows of each."""
    group: list[Part] = []
    count = 0
    for seq_id, first, rows in runs:
        at = 0
        while at < len(rows):
            if count == most:
                yield group, count
                group, count = [], 0
            piece = rows[at : at + most - count] if at or len(rows) > most - count else rows
            group.append((seq_id, first + at, piece))
            count += len(piece)
            at += len(piece)
    if group:
        yield group, count


def fill_up(pieces: list[Piece], records: list[Record], rows: int, most: int, rng: random.Random) -> list[Piece]:
    """`pieces` and more of them from `records` (in random order), `rows` rows together at most, two at least each."""
    left = rows - sum(piece.rows for piece in pieces)
    out = list(pieces)
    for i in range(len(records)):
        if left < 2:
            break
        other = rng.randrange(i, len(records))  # a shuffle that goes no further than it has to
        records[i], records[other] = records[other], records[i]
        record = records[i]
        size = min(record.rows, left, most)
        least = max(record.context + 1 - size, 0)  # a window of context alone would teach nothing
        out.append(Piece(record, rng.randint(least, record.rows - size), size))
        left -= size
    return out
