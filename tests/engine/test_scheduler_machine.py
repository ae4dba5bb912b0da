"""Any order of events: no page leaks, and every sequence's logical KV is that of its own tokens. Then the same checks
against schedulers broken on purpose."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.leak import VOCAB, FakeEngine, run_engine, run_events
from tests.engine.test_scheduler import test_a_page_of_mixed_weights_is_never_found as mixed_weights
from tlt_engine.kvcache.pages import PagePool
from tlt_engine.kvcache.prefix import PrefixCache
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.scheduler.sequence import Chunk, Status


class SchedulerMachine(RuleBasedStateMachine):
    """The ledger is FakeEngine.verify()."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]), slots=st.sampled_from([48, 64, 96]), prefix=st.booleans(),
        seats=st.integers(1, 5), tokens=st.sampled_from([1, 7, 64]), nodes=st.sampled_from([1, 5, 40]),
        stop_chance=st.sampled_from([0.0, 0.1]),
    )
    def build(self, page_size, slots, prefix, seats, tokens, nodes, stop_chance):
        self.engine = FakeEngine(
            slots // page_size, page_size, prefix=prefix, max_num_seqs=seats, max_num_batched_tokens=tokens,
            max_model_len=48, max_nodes=nodes, stop_chance=stop_chance,
        )

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), new=st.integers(1, 24),
        n=st.integers(1, 4), prompt_logits=st.booleans(),
    )
    def add(self, prompt, new, n, prompt_logits):
        self.engine.add(prompt, new, n, prompt_logits)

    @precondition(lambda self: self.engine.alive)
    @rule(pick=st.integers(0, 99), new=st.integers(1, 20))
    def add_what_another_has(self, pick, new):
        """A resent partial output, or a sibling that comes late."""
        ids = self.engine.alive[pick % len(self.engine.alive)].token_ids[:28]
        self.engine.add(ids, new)

    @precondition(lambda self: self.engine.alive)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        self.engine.abort(self.engine.alive[pick % len(self.engine.alive)])

    @rule(seed=st.integers(0, 999), count=st.integers(1, 6))
    def steps(self, seed, count):
        self.engine.rng = random.Random(seed)
        for _ in range(count):
            self.engine.step()
            self.engine.verify()

    @precondition(lambda self: self.engine.alive)
    @rule(seed=st.integers(0, 999), pick=st.integers(0, 99))
    def step_with_abort_in_flight(self, seed, pick):
        self.engine.rng = random.Random(seed)
        victim = self.engine.alive[pick % len(self.engine.alive)]
        self.engine.step(lambda batch: self.engine.abort(victim))

    @rule(up=st.integers(0, 1), recompute=st.booleans())
    def new_weights(self, up, recompute):
        self.engine.set_version(self.engine.scheduler.version + up, recompute)

    @rule(count=st.integers(1, 99))
    def evict(self, count):
        self.engine.pool.evict(count)

    @invariant()
    def balances(self):
        if hasattr(self, "engine"):
            self.engine.verify()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.verify()
            assert self.engine.leaked() == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_ten_thousand_events_leak_nothing():
    assert run_events(10_000, seed=0) == 0


def test_the_events_reach_every_corner():
    """Else the test above proves less than it says."""
    for page_size in (1, 4, 16):
        engine = run_engine(2000, 1, page_size)
        stats = dataclasses.asdict(engine.scheduler.stats)
        if page_size == 1:  # every prefix is whole pages: the cache serves all of it
            del stats["forks"], stats["forked_tokens"]
        assert all(stats.values()) and len(engine.finished) > 100, f"page size {page_size}: {stats}"
        assert any(seq.room for seq in engine.finished), "ends by a stop"


# ---- broken on purpose ----


def skip_a_release(patch):
    whole, calls = PagePool.release, iter(range(10**9))
    patch.setattr(PagePool, "release", lambda self, page: next(calls) % 50 == 49 or whole(self, page))


def release_twice(patch):
    whole = Scheduler._let_go

    def let_go(self, seq):
        pages = seq.pages[-1:]
        whole(self, seq)
        if pages and not self.pool.kept(pages[0]):
            self.pool._free.append(pages[0])

    patch.setattr(Scheduler, "_let_go", let_go)


def forget_the_tail_copy(patch):
    patch.setattr(FakeEngine, "copy", lambda self, batch: None)


def share_the_tail_page(patch):
    whole = Scheduler._seat

    def seat(self, seq, start):
        copies = whole(self, seq, start)
        for source, destination in copies:
            self.pool.release(destination)
            self.pool.share(source)
            seq.pages[seq.pages.index(destination)] = source
        return []

    patch.setattr(Scheduler, "_seat", seat)


def match_a_stale_version(patch):
    patch.setattr(PrefixCache, "reset", lambda self: None)
    key = PrefixCache._key
    patch.setattr(PrefixCache, "_key", lambda self, i, ids, version, keys: key(self, i, ids, 0, keys))


def fork_across_versions(patch):
    patch.setattr(
        Scheduler, "_siblings",
        lambda self, seq: (
            next((s for s in self._families.get(seq.start_key, ()) if s.kv_len >= seq.start_len), None), False
        ),
    )


def cache_kv_of_mixed_versions(patch):
    def cache(self, seq, before):
        if self.prefix is not None:
            self.prefix.insert(seq.token_ids, seq.pages, seq.kv_len, self.version, before, [])

    patch.setattr(Scheduler, "_cache", cache)


def cache_a_page_too_early(patch):
    whole = PrefixCache.insert

    def insert(self, ids, pages, kv_len, version, start=0, keys=None):
        whole(self, ids, pages, min(kv_len + 1, len(pages) * self.page_size), version, start, keys)

    patch.setattr(PrefixCache, "insert", insert)


def hash_without_parent(patch):
    def key(self, i, ids, version, keys):
        return (version, i, tuple(ids[i * self.page_size : (i + 1) * self.page_size]))

    patch.setattr(PrefixCache, "_key", key)


def keep_look_ahead(patch):
    whole = Scheduler._pages_for
    patch.setattr(Scheduler, "_pages_for", lambda self, slots: whole(self, slots + self.page_size))


def one_slot_too_few(patch):
    whole = Scheduler._decodes

    def decodes(self, max_nodes):
        return [dataclasses.replace(d, max_nodes=d.max_nodes + 1) for d in whole(self, max_nodes)]

    patch.setattr(Scheduler, "_decodes", decodes)


def count_a_chunk_twice(patch):
    whole = Scheduler.advance_prefill

    def advance(self, chunk):
        whole(self, Chunk(chunk.seq, min(chunk.count * 2, chunk.seq.prefill_left)))

    patch.setattr(Scheduler, "advance_prefill", advance)


def forget_the_family(patch):
    whole = Scheduler._seat

    def seat(self, seq, start):
        copies = whole(self, seq, start)
        if seq.seq_id % 5 == 4:
            self._families[seq.start_key].pop(seq)
        return copies

    patch.setattr(Scheduler, "_seat", seat)


def stay_running_when_preempted(patch):
    whole = Scheduler._requeue

    def requeue(self, seq):
        whole(self, seq)
        seq.status = Status.RUNNING

    patch.setattr(Scheduler, "_requeue", requeue)


SABOTAGE = [
    (skip_a_release, "holders in the pool"),
    (release_twice, r"free \d+ \+ cached idle \d+ \+ used \d+ = 27, total 24"),
    (forget_the_tail_copy, "KV differs from its tokens' at position"),
    (share_the_tail_page, "will write page .* which has 4 holders"),
    (match_a_stale_version, "KV differs"),
    (fork_across_versions, "KV differs"),
    (cache_kv_of_mixed_versions, "KV differs"),
    (cache_a_page_too_early, "will write page .* kept = True"),
    (hash_without_parent, "KV differs"),
    (keep_look_ahead, "look-ahead: 9 pages after commit, expected 8"),
    (one_slot_too_few, "list index out of range"),
    (count_a_chunk_twice, "KV differs"),
    (forget_the_family, "families: 1 members, 2 live sequences"),
    (stay_running_when_preempted, "0 live sequences hold it|in the queue, but running"),
]


@pytest.mark.parametrize("sabotage, message", SABOTAGE, ids=[s.__name__ for s, _ in SABOTAGE])
def test_sabotage_is_caught(sabotage, message, monkeypatch):
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, IndexError), match=message):
        for page_size in (4, 1, 16):
            leaked = run_engine(700, 2, page_size).leaked()
            assert not leaked, f"{leaked} pages leaked"
        mixed_weights()
