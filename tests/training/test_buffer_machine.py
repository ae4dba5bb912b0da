"""Any order of passes, stops, preemptions, updates and draws: no page leaks, no row is unaccounted for, and every kept
row is the last one computed for its token. Then buffers broken on purpose."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.training.rows import misaligned, one_pass, owner_of, script_tokens, small_buffer
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.records import DrawPolicy


class BufferMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(1, 30), page_rows=st.integers(1, 5), stage_rows=st.integers(1, 20),
        capture=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def build(self, pages: int, page_rows: int, stage_rows: int, capture: float) -> None:
        self.buffer = small_buffer(pages=pages, page_rows=page_rows, stage_rows=stage_rows, capture=capture)
        self.ends: dict[int, int] = {}  # running sequences: rows computed
        self.owners: dict[int, list[int]] = {}  # whose pass computed each position, which sequence kept
        self.policy = self.next_id = 0

    @rule(chunk=st.integers(1, 9), hit=st.sampled_from([0, 0, 4]))
    def start(self, chunk: int, hit: int) -> None:
        self.next_id += 1
        self.buffer.take(one_pass([(self.next_id, hit, chunk)], self.policy))
        self.ends[self.next_id] = hit + chunk

    @precondition(lambda self: self.ends)
    @rule(pick=st.integers(0, 99), less=st.integers(0, 5), more=st.integers(0, 4))
    def fork(self, pick: int, less: int, more: int) -> None:
        """A sibling that shares what another has, or most of it."""
        donor = sorted(self.ends)[pick % len(self.ends)]
        length = max(self.ends[donor] - less, 1)
        self.next_id += 1
        self.buffer.fork(donor, self.next_id, length)
        self.owners[self.next_id] = [owner_of(donor, i, self.owners) for i in range(length)]
        self.buffer.take(one_pass([(self.next_id, length, more)], self.policy))
        self.ends[self.next_id] = length + more

    @precondition(lambda self: self.ends)
    @rule(seed=st.integers(0, 2**16))
    def decode(self, seed: int) -> None:
        rng = random.Random(seed)
        runs = [(s, end, rng.randint(0, 4)) for s, end in self.ends.items() if rng.random() < 0.8]
        self.buffer.take(one_pass(runs, self.policy))
        self.ends.update({s: first + count for s, first, count in runs})

    @precondition(lambda self: self.ends)
    @rule(pick=st.integers(0, 99), back=st.integers(1, 9), more=st.integers(1, 6))
    def preempt(self, pick: int, back: int, more: int) -> None:
        """The sequence is computed again from an earlier position, perhaps with a jump over a cached prefix."""
        seq_id = sorted(self.ends)[pick % len(self.ends)]
        first = max(self.ends[seq_id] - back, 0)
        self.owners[seq_id] = self.owners.get(seq_id, [])[:first]
        self.buffer.take(one_pass([(seq_id, first, more)], self.policy))
        self.ends[seq_id] = first + more

    @precondition(lambda self: self.ends)
    @rule(pick=st.integers(0, 99), cut=st.integers(-1, 3))
    def stop(self, pick: int, cut: int) -> None:
        seq_id = sorted(self.ends)[pick % len(self.ends)]
        end = self.ends.pop(seq_id)
        self.buffer.finish(seq_id, script_tokens(seq_id, max(end - cut, 0), self.owners))

    @precondition(lambda self: self.ends)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        seq_id = sorted(self.ends)[pick % len(self.ends)]
        del self.ends[seq_id]
        self.buffer.discard(seq_id)

    @rule()
    def update(self) -> None:
        self.policy += 1
        self.buffer.new_policy(self.policy)

    @rule(rows=st.integers(2, 60), seed=st.integers(0, 99), reject=st.booleans(), busy=st.booleans())
    def draw(self, rows: int, seed: int, reject: bool, busy: bool) -> None:
        with self.buffer.draw(rows, str(seed), DrawPolicy(max_age=None, max_rows=9)) as pieces:
            if busy and self.ends:
                self.decode(seed)
            assert sum(p.rows for p in pieces) <= rows
            assert [c for p in pieces for c in misaligned(self.buffer, p, self.owners)] == []
            if reject and pieces:
                self.buffer.reject(pieces[0])

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.check_integrity()
            stats = self.buffer.stats()
            assert stats["bytes"] <= self.buffer._arena.total_pages * self.buffer._arena.page_bytes

    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for seq_id, end in self.ends.items():
            self.buffer.finish(seq_id, script_tokens(seq_id, end, self.owners))
        with self.buffer.draw(10_000, "end", DrawPolicy(max_age=None)) as pieces:
            assert [c for p in pieces for c in misaligned(self.buffer, p, self.owners)] == []
        self.buffer.check_integrity()
        assert self.buffer.stats()["open_sequences"] == 0


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def run_random(seed: int) -> None:
    """The machine's rules in a random order, without hypothesis' search: for the sabotages."""
    rng = random.Random(seed)
    machine = BufferMachine()
    machine.build(rng.randint(3, 10), rng.randint(1, 5), rng.randint(1, 20), 1.0)
    for _ in range(60):
        kind = rng.choice(["start", "fork", "decode", "decode", "preempt", "stop", "abort", "update", "draw"])
        if kind == "start" or not machine.ends:
            machine.start(rng.randint(1, 9), rng.choice([0, 0, 4]))
        elif kind == "fork":
            machine.fork(rng.randrange(100), rng.randint(0, 5), rng.randint(0, 4))
        elif kind == "decode":
            machine.decode(rng.randrange(2**16))
        elif kind == "preempt":
            machine.preempt(rng.randrange(100), rng.randint(1, 9), rng.randint(1, 6))
        elif kind == "stop":
            machine.stop(rng.randrange(100), rng.randint(-1, 3))
        elif kind == "abort":
            machine.abort(rng.randrange(100))
        elif kind == "update":
            machine.update()
        else:
            machine.draw(rng.randint(2, 60), rng.randrange(100), rng.random() < 0.3, rng.random() < 0.5)
        machine.balanced()
    machine.teardown()


def test_random_orders_pass() -> None:
    for seed in range(20):
        run_random(seed)


def no_shortening(self: HiddenStateBuffer, record: object, rows: int) -> None:
    """Rows that are computed again are appended behind the old ones."""


def no_return(self: HiddenStateBuffer, record: object) -> None:
    record.pages, record.rows, record.staged = [], 0, 0  # type: ignore[attr-defined]


def forgotten_staged(self: HiddenStateBuffer) -> None:
    self._staged, self._staged_rows = [], 0


@pytest.mark.parametrize(
    ("method", "broken"), [("_shorten", no_shortening), ("_free", no_return), ("_flush", forgotten_staged),
                           ("_own_last_page", lambda self, record: True)]
)
def test_sabotage_is_seen(monkeypatch: pytest.MonkeyPatch, method: str, broken: object) -> None:
    monkeypatch.setattr(HiddenStateBuffer, method, broken)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(20):
            run_random(seed)
