"""Hidden states of committed tokens, from the target's passes to the drafter's trainer.

Knows neither requests nor losses. Rows are gathered on the target's device into a staging tensor, one gather a pass;
when it is full they go, sorted by sequence, to pages of (pinned) host memory on a stream of their own. So a pass costs
one gather, and the copies are as long as a sequence's rows have become meanwhile.

Row i of a sequence's record belongs to position first + i, whose token is tokens[i]. A pair needs two neighbouring
rows: n rows give n - 1 pairs, and no row can be paired with another position's token.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.transformer import Transformer
from tlt_engine.training.arena import Arena
from tlt_engine.training.prefill import prefill
from tlt_engine.training.records import DrawPolicy, Part, Piece, Record, Rows, fill_up, groups, long_threshold


class HiddenStateBuffer:
    """aux_layers: the hidden states that the drafter reads (numbered as StepOutputs.hidden); the target's last one
    (index num_layers) is kept beside them, for the teacher. hidden_size: features of each. dtype, device: the target's.

    byte_budget: host bytes of kept rows. When it is spent the oldest closed sequence is dropped, then the oldest open
    one; a sequence that fills the budget alone loses its own oldest rows. All of it is counted in `stats`.
    capture: share of sequences that are kept, in [0, 1]; which ones depends on seed and seq_id alone. `fill` is not
    subject to it. page_rows: rows a page. stage_rows: rows gathered on the device before they are copied.

    Thread-safe. `take`, `finish` and `new_policy` are the engine's calls, `draw` and `load` the trainer's.
    """

    def __init__(
        self, aux_layers: Sequence[int], num_layers: int, hidden_size: int, *, byte_budget: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", capture: float = 1.0, seed: int = 0,
        page_rows: int = 64, stage_rows: int = 2048,
    ) -> None:
        if not 0 <= capture <= 1:
            raise refuse("capture", "a share of sequences in [0, 1]", capture, "0 is off, 1 is full")
        if page_rows < 1 or stage_rows < 1:
            raise refuse("page_rows, stage_rows", "at least 1 row", (page_rows, stage_rows), "enlarge them")
        self.aux_layers, self.last_layer = tuple(aux_layers), num_layers
        self.hidden_layers = tuple(dict.fromkeys((*aux_layers, num_layers)))
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, torch.device(device)
        self.capture, self.seed = capture, seed
        width = len(self.hidden_layers) * hidden_size
        self._cuda = self.device.type == "cuda"
        self._arena = Arena(byte_budget, page_rows, width, dtype, pinned=self._cuda)
        self._stage_rows = stage_rows
        self._stage: Tensor | None = None
        self._staged: list[tuple[Record, int]] = []  # in the stage's order: whose rows, how many
        self._staged_rows = 0
        self._open: dict[int, Record] = {}  # by seq_id
        self._parts: dict[int, list[Record]] = {}  # earlier records of an open sequence: rows between were never seen
        self._closed: dict[int, Record] = {}  # by uid, oldest first
        self._policies = ["0"]
        self._uid = 0
        self._counts = dict.fromkeys(
            ("taken_rows", "shared_rows", "replaced_rows", "dropped_sequences", "dropped_rows", "trimmed_rows",
             "cut_rows", "unpaired_rows"), 0)
        self._lock = threading.Lock()
        self._copy_stream: Any = torch.cuda.Stream(self.device) if self._cuda else None
        self._source_stream: Any = None
        self._copied: Any = None  # event behind the last copy

    # ---------------------------------------------------------------- the engine's side

    def wants(self, seq_id: int) -> bool:
        """Is this sequence kept? The same answer in every process and at every time."""
        if self.capture in (0, 1):
            return self.capture == 1
        word = blake2b(f"{self.seed}:{seq_id}".encode(), digest_size=8).digest()
        return int.from_bytes(word, "little") < self.capture * 2**64

    def new_policy(self, label: str | int) -> None:
        """The target's weights have changed: rows from now on are of another policy. label: the weight version."""
        with self._lock:
            self._policies.append(str(label))

    @torch.no_grad()
    def take(self, rows: Rows) -> None:
        """Keep the rows of one pass: committed tokens only, tensors valid until the next pass. A run that starts before
        the end of what is kept of its sequence was computed again and replaces it; one that starts behind it leaves
        a gap, and the sequence goes on in a record of its own."""
        wanted = [run for run in rows.runs if self.capture == 1 or self.wants(run.seq_id)]
        runs = [(run.seq_id, run.first, run.rows) for run in wanted if len(run.rows)]
        if runs:
            self._check(rows.hidden, runs)
            with self._lock:
                self._take(rows.hidden, runs)

    def fork(self, source: int, seq_id: int, length: int) -> None:
        """The sequence seq_id shares the first `length` positions of `source`, a running one: the n samples of a prompt
        prefill it once. It holds the same pages, as context of its own rows."""
        with self._lock:
            donor = self._open.get(source)
            if donor is None or seq_id in self._open or not self.wants(seq_id):
                return
            if donor.staged:
                self._flush()
            rows = length - donor.first
            if donor.dead or not 0 < rows <= donor.rows:
                return
            pages = donor.pages[: -(-rows // self._arena.page_rows)]
            self._arena.share(pages)
            self._open[seq_id] = Record(
                self._next_uid(), seq_id, donor.first, donor.policy, rows=rows, context=rows, pages=list(pages)
            )
            self._counts["shared_rows"] += rows

    def finish(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The sequence has ended, or what is known of it so far may be trained on; token_ids: its prompt and output.
        Rows behind them (cut off by a stop string) are forgotten. Unknown sequences are ignored, as most are when only
        a share is kept. A sequence that goes on afterwards continues in a new record."""
        with self._lock:
            record = self._open.pop(seq_id, None)
            for part in (*self._parts.pop(seq_id, []), *([record] if record is not None else [])):
                self._close(part, token_ids)

    def discard(self, seq_id: int) -> None:
        """Forget a sequence that has not ended (aborted requests)."""
        with self._lock:
            record = self._open.pop(seq_id, None)
            for part in (*self._parts.pop(seq_id, []), *([record] if record is not None else [])):
                self._drop(part)

    def flush(self) -> None:
        """Copy what is still staged. `draw` does it by itself."""
        with self._lock:
            self._flush()

    @torch.no_grad()
    def fill(self, source: Transformer | Any, token_lists: Iterable[Sequence[int]], *, max_rows: int = 2048) -> int:
        """Prefill given texts or finished rollouts (prompt and output ids) with the target and keep their hidden
        states: warm-up, or capture after the rollout instead of beside it. source: the target's Transformer, or an
        engine that has it as `model`. max_rows: rows of one pass. Returns the rows kept; a list of n tokens gives n."""
        model = source if isinstance(source, Transformer) else source.model
        kept = 0
        for done in prefill(model, token_lists, self.hidden_layers, max_rows=max_rows):
            runs: list[Part] = [(run.seq_id, run.first, run.rows) for run in done.runs]
            self._check(done.hidden, runs)
            with self._lock:
                self._take(done.hidden, runs)
                for seq_id, token_ids in done.ended:
                    record = self._open.pop(seq_id, None)
                    if record is not None:
                        self._close(record, token_ids)
            kept += sum(len(rows) for _, _, rows in runs)
        return kept

    # ---------------------------------------------------------------- the trainer's side

    @contextmanager
    def draw(self, rows: int, order: str, policy: DrawPolicy | None = None) -> Iterator[list[Piece]]:
        """Pieces of closed sequences with at most `rows` rows together, the last one cut to fit. `order` seeds the
        choice: the same string and the same content give the same pieces. They are on loan within the block."""
        picked = self._pick(rows, order, policy or DrawPolicy())
        try:
            yield picked
        finally:
            with self._lock:
                for piece in picked:
                    piece.record.readers -= 1
                    if piece.record.dead and piece.record.readers == 0:
                        self._free(piece.record)

    @torch.no_grad()
    def load(self, piece: Piece, out: Tensor) -> None:
        """Copies a piece's rows to out [rows, (k + 1) * hidden_size] (k * hidden_size where an aux layer is the last
        one), on any device, asynchronously where that is CUDA. Columns: `aux_columns`, `last_columns`."""
        if self._copied is not None:
            self._copied.synchronize()
        page_rows, done = self._arena.page_rows, 0
        while done < piece.rows:
            at = piece.start + done
            page = self._arena.page(piece.record.pages[at // page_rows])
            count = min(piece.rows - done, page_rows - at % page_rows)
            out[done : done + count].copy_(page[at % page_rows : at % page_rows + count], non_blocking=True)
            done += count

    def reject(self, piece: Piece) -> None:
        """Drop a sequence whose rows turned out to be unusable (not finite)."""
        with self._lock:
            if self._closed.pop(piece.record.uid, None) is not None:
                self._drop(piece.record)

    @property
    def policies(self) -> int:
        """How many there were so far, the present one included."""
        return len(self._policies)

    @property
    def width(self) -> int:
        return self._arena.width

    @property
    def aux_columns(self) -> slice:
        return slice(0, len(self.aux_layers) * self.hidden_size)

    @property
    def last_columns(self) -> slice:
        at = self.hidden_layers.index(self.last_layer) * self.hidden_size
        return slice(at, at + self.hidden_size)

    # ---------------------------------------------------------------- accounting

    def memory_bytes(self) -> int:
        """Host bytes of the pages and device bytes of the stage."""
        stage = 0 if self._stage is None else self._stage.untyped_storage().nbytes()
        return self._arena.bytes + stage

    def stats(self) -> dict[str, Any]:
        """Rows are tokens. taken + shared (of forks, counted for each) = kept + replaced (computed again) + dropped +
        trimmed (own oldest rows of a sequence that fills the budget) + cut (behind a stop) + unpaired (they make no
        pair of their own)."""
        with self._lock:
            kept = [*self._closed.values(), *self._open.values(), *(r for p in self._parts.values() for r in p)]
            return {
                **self._counts, "policy": self._policies[-1], "sequences": len(self._closed),
                "pairs": sum(r.pairs for r in self._closed.values()), "open_sequences": len(self._open),
                "kept_rows": sum(r.rows for r in kept), "staged_rows": self._staged_rows,
                "bytes": self._arena.bytes, "used_bytes": self._arena.used_pages * self._arena.page_bytes,
            }

    def check_integrity(self) -> None:
        """Asserts the balance of pages and rows. For tests, and while no draw is open."""
        stats = self.stats()
        with self._lock:
            records = [*self._closed.values(), *self._open.values(), *(r for p in self._parts.values() for r in p)]
            for r in records:
                stored = r.rows - r.staged
                assert len(r.pages) == -(-stored // self._arena.page_rows), f"{len(r.pages)} pages for {stored} rows"
                assert r.staged == sum(count for owner, count in self._staged if owner is r), "staged rows differ"
                assert r.tokens is None or len(r.tokens) == r.rows, "a row without its token"
            assert self._staged_rows == sum(count for _, count in self._staged), "staged rows differ"
            self._arena.check([page for r in records for page in r.pages])
        lost = ("replaced_rows", "dropped_rows", "trimmed_rows", "cut_rows", "unpaired_rows")
        accounted = stats["kept_rows"] + sum(stats[name] for name in lost)
        taken = stats["taken_rows"] + stats["shared_rows"]
        assert accounted == taken, f"{accounted} rows accounted for, {taken} taken or shared"

    # ---------------------------------------------------------------- within the lock

    def _take(self, hidden: Mapping[int, Tensor], runs: list[Part]) -> None:
        for group, count in groups(runs, self._stage_rows):
            if self._staged_rows + count > self._stage_rows:
                self._flush()
            records = [self._record_for(seq_id, first) for seq_id, first, _ in group]
            self._gather(hidden, [rows for _, _, rows in group], count)
            self._counts["taken_rows"] += count
            self._staged_rows += count
            for record, (_, _, rows) in zip(records, group):
                now = len(rows)
                self._staged.append((record, now))
                if record.dead:  # dropped to make room while its own pass was being taken
                    self._counts["dropped_rows"] += now
                else:
                    record.rows += now
                    record.staged += now

    def _record_for(self, seq_id: int, first: int) -> Record:
        record, policy = self._open.get(seq_id), len(self._policies) - 1
        if record is not None and record.first + record.rows == first and record.policy == policy:
            return record
        if record is not None and first < record.end:
            record = self._replace_from(seq_id, record, first)
            if record is not None and record.policy == policy:
                return record
        if record is not None:  # a gap, or another policy
            self._parts.setdefault(seq_id, []).append(record)
        record = self._open[seq_id] = Record(self._next_uid(), seq_id, first, policy)
        return record

    def _replace_from(self, seq_id: int, record: Record, first: int) -> Record | None:
        """Forget the rows at `first` and behind, which are computed again (preemption, new weights)."""
        if record.staged:
            self._flush()
        parts = self._parts.get(seq_id, [])
        while True:
            gone = min(max(record.end - first, 0), record.rows)
            self._counts["replaced_rows"] += gone
            self._shorten(record, gone)
            if record.rows or not parts:
                break
            record = parts.pop()
        if not parts:
            self._parts.pop(seq_id, None)
        if record.rows:
            self._open[seq_id] = record
            return record
        self._open.pop(seq_id, None)
        return None

    def _shorten(self, record: Record, rows: int) -> None:
        """Without its last rows; none of them staged."""
        record.rows -= rows
        record.context = min(record.context, record.rows)
        keep = -(-record.rows // self._arena.page_rows)
        self._arena.give(record.pages[keep:])
        del record.pages[keep:]

    @property
    def _policy(self) -> int:
        return len(self._policies) - 1

    def _next_uid(self) -> int:
        self._uid += 1
        return self._uid

    def _check(self, hidden: Mapping[int, Tensor], runs: list[Part]) -> None:
        if len({seq_id for seq_id, _, _ in runs}) < len(runs):
            raise refuse("runs", "one run a sequence in a pass", [seq_id for seq_id, _, _ in runs], "join them")
        for layer in self.hidden_layers:
            value = hidden.get(layer)
            if value is None or value.dim() != 2 or value.shape[1] != self.hidden_size or value.dtype != self.dtype:
                got = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
                raise refuse(f"hidden[{layer}]", f"{self.dtype} [R, {self.hidden_size}]", got,
                             "capture the buffer's hidden_layers of the model that it was built for")

    def _gather(self, hidden: Mapping[int, Tensor], rows: list[Sequence[int]], count: int) -> None:
        if self._stage is None:
            with torch.inference_mode(False):
                shape = (len(self.hidden_layers), self._stage_rows, self.hidden_size)
                self._stage = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self._cuda:
            self._source_stream = torch.cuda.current_stream(self.device)
        index = self._to_device(np.fromiter(chain.from_iterable(rows), np.int64, count))
        at = self._staged_rows
        for i, layer in enumerate(self.hidden_layers):
            torch.index_select(hidden[layer], 0, index, out=self._stage[i, at : at + count])

    def _to_device(self, index: np.ndarray) -> Tensor:
        host = torch.from_numpy(index)
        return host.pin_memory().to(self.device, non_blocking=True) if self._cuda else host

    def _flush(self) -> None:
        """Staged rows, sorted by sequence, to their pages."""
        if not self._staged or self._stage is None:
            return
        records = list(dict.fromkeys(record for record, _ in self._staged))
        places = {record: i for i, record in enumerate(records)}
        counts = np.array([count for _, count in self._staged])
        owners = np.repeat(np.array([places[record] for record, _ in self._staged]), counts)
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners).tolist()
        self._staged, self._staged_rows = [], 0
        if not self._cuda:
            self._store(self._sorted(self._to_device(order)), records, sizes)
            return
        with torch.cuda.stream(self._source_stream):
            rows = self._sorted(self._to_device(order))
        self._copy_stream.wait_stream(self._source_stream)
        with torch.cuda.stream(self._copy_stream):
            self._store(rows, records, sizes)
            self._copied = torch.cuda.Event()
            self._copied.record()
        rows.record_stream(self._copy_stream)

    def _sorted(self, order: Tensor) -> Tensor:
        """[rows, width]: staged rows in this order, a row's layers side by side."""
        assert self._stage is not None
        return self._stage.index_select(1, order).transpose(0, 1).reshape(len(order), self.width)

    def _store(self, rows: Tensor, records: list[Record], sizes: list[int]) -> None:
        """rows: those of each record one behind the other, `sizes` of them; those of dropped ones are passed over."""
        page_rows = self._arena.page_rows
        for record, block in zip(records, rows.split(sizes)):
            done = 0
            while done < len(block) and not record.dead:
                offset = (record.rows - record.staged) % page_rows
                if not (self._grow(record) if offset == 0 else self._own_last_page(record)):
                    break
                now = min(len(block) - done, page_rows - offset)
                page = self._arena.page(record.pages[-1])
                page[offset : offset + now].copy_(block[done : done + now], non_blocking=True)
                record.staged -= now
                done += now

    def _own_last_page(self, record: Record) -> bool:
        """A partial page that is shared is copied before it is written to. False as `_grow`."""
        shared = record.pages[-1]
        if not self._arena.shared(shared):
            return True
        if self._copied is not None:
            self._copied.synchronize()
        kept = self._arena.page(shared).clone()  # making room may take the page away
        del record.pages[-1]
        self._arena.give([shared])
        if not self._grow(record):
            return False
        self._arena.page(record.pages[-1]).copy_(kept)
        return True

    def _grow(self, record: Record) -> bool:
        """One more page, for which older sequences go. False when this one had to be dropped itself."""
        while (page := self._arena.take()) is None:
            victim = next((r for r in self._closed.values() if r is not record and not r.readers), None)
            if victim is None:
                waiting = (*(r for parts in self._parts.values() for r in parts), *self._open.values())
                victim = next((r for r in waiting if r is not record and r.pages), None)
            if victim is None and record.pages and not record.readers:
                self._trim(record)
            elif victim is None:
                self._drop(record)
                return False
            else:
                self._drop(victim)
        record.pages.append(page)
        return True

    def _trim(self, record: Record) -> None:
        """Its oldest page goes, to make room for its own next rows."""
        count = self._arena.page_rows
        self._arena.give([record.pages.pop(0)])
        record.first += count
        record.rows -= count
        record.context = max(record.context - count, 0)
        if record.tokens is not None:
            record.tokens = record.tokens[count:].clone()
        self._counts["trimmed_rows"] += count

    def _drop(self, record: Record) -> None:
        self._counts["dropped_sequences"] += 1
        self._counts["dropped_rows"] += record.rows
        self._forget(record)

    def _forget(self, record: Record) -> None:
        record.dead = True
        self._closed.pop(record.uid, None)
        if self._open.get(record.seq_id) is record:
            del self._open[record.seq_id]
        if record in (parts := self._parts.get(record.seq_id, [])):
            parts.remove(record)
            if not parts:
                del self._parts[record.seq_id]
        if record.readers == 0:
            self._free(record)

    def _free(self, record: Record) -> None:
        self._arena.give(record.pages)
        record.pages = []
        record.rows = record.staged = 0

    def _close(self, record: Record, token_ids: Sequence[int]) -> None:
        behind = min(max(record.end - len(token_ids), 0), record.rows)
        if behind:
            if record.staged:
                self._flush()
            if record.dead:
                return
            self._counts["cut_rows"] += behind
            self._shorten(record, behind)
        if record.pairs == 0:
            self._counts["unpaired_rows"] += record.rows
            self._forget(record)
            return
        record.tokens = torch.tensor(token_ids[record.first : record.end], dtype=torch.int64)
        self._closed[record.uid] = record

    def _pick(self, rows: int, order: str, policy: DrawPolicy) -> list[Piece]:
        """Long sequences for their share first, then all others, each group in an order that `order` seeds."""
        rng = random.Random(order)
        with self._lock:
            self._flush()
            oldest = 0 if policy.max_age is None else self._policy - policy.max_age
            pool = [r for r in self._closed.values() if r.policy >= oldest]
            pieces: list[Piece] = []
            if policy.long_share > 0:  # sorting thousands of lengths takes milliseconds
                least = long_threshold(pool, policy, self._policy)
                long = [r for r in pool if r.rows >= least]
                pieces = fill_up(pieces, long, int(policy.long_share * rows), policy.max_rows, rng)
                taken = {piece.record.uid for piece in pieces}
                pool = [r for r in pool if r.uid not in taken]
            pieces = fill_up(pieces, pool, rows, policy.max_rows, rng)
            for piece in pieces:
                piece.record.readers += 1
            return pieces
