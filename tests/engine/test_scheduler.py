"""What the scheduler promises: who decodes, who is admitted, who pays when pages run out, who shares what."""

from __future__ import annotations

import random
import time

import pytest

from tests.engine.leak import VOCAB, FakeEngine
from tlt_engine.scheduler.sequence import Sequence, Status

PAGE_SIZES = (1, 4, 16)


def chain_nodes(count: int):
    return lambda seq: count


def pages_for(slots: int, page_size: int) -> int:
    return -(-slots // page_size)


# ---- one sequence ----


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_prompt_in_chunks_then_decodes(page_size, prompt_len):
    engine = FakeEngine(64, page_size, max_num_batched_tokens=7)
    (seq,) = engine.add([1] * prompt_len, new=5)
    left, steps = prompt_len - 1, 0
    while left:
        batch = engine.step()
        engine.verify()
        assert [c.count for c in batch.chunks] == [min(7, left)] and not batch.decodes
        left -= min(7, left)
        steps += 1
    assert engine.scheduler.stats.prefill_tokens == prompt_len - 1
    batch = engine.scheduler.schedule(chain_nodes(9))
    assert [(d.seq, d.max_nodes) for d in batch.decodes] == [(seq, 9)]
    assert len(seq.pages) == pages_for(prompt_len - 1 + 9, page_size), "every node's slot is owned"


def test_one_token_prompt_and_fully_cached_prompt_decode_at_once():
    engine = FakeEngine(64, 4)
    (one,) = engine.add([1], new=3)
    assert [d.seq for d in engine.step().decodes] == [one]
    engine.add([1] * 9, new=1)
    engine.drain()
    (again,) = engine.add([1] * 9, new=1)
    batch = engine.step()
    assert [d.seq for d in batch.decodes] == [again] and not batch.chunks
    assert engine.scheduler.stats.prefix_hit_tokens == 8


def test_prefix_hit_leaves_the_root_and_the_partial_page():
    engine = FakeEngine(64, 4)
    engine.add([1] * 12, new=1)
    engine.drain()
    engine.add([1] * 12, new=1)
    engine.step()
    engine.verify()
    assert engine.scheduler.stats.prefix_hit_tokens == 8, "token 12 is the root: 11 keys, 2 full pages"


def test_prompt_logits_compute_everything():
    engine = FakeEngine(64, 4)
    engine.add([1] * 12, new=2, n=2)
    engine.drain()
    before = engine.scheduler.stats.prefill_tokens
    engine.add([1] * 12, new=2, prompt_logits=True, n=2)
    engine.drain()
    assert engine.scheduler.stats.prefill_tokens - before == 22


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_look_ahead_goes_back_after_each_commit(page_size):
    engine = FakeEngine(64, page_size)
    (seq,) = engine.add([1] * 6, new=40)
    while engine.alive:
        engine.step()
        if seq.status is Status.RUNNING:
            assert len(seq.pages) == engine.pool.used <= pages_for(seq.kv_len + 1, page_size)


# ---- samples of one prompt ----


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 8, 9, 10, 17, 30])
def test_a_prompt_is_prefilled_once_for_its_samples(page_size, prefix, prompt_len):
    engine = FakeEngine(256, page_size, prefix=prefix, max_num_batched_tokens=10)
    prompt = [i % VOCAB for i in range(prompt_len)]
    seqs = engine.add(prompt, new=20, n=8)
    for _ in range(pages_for(prompt_len - 1, 10)):
        assert not engine.step().decodes
    batch = engine.step()
    engine.verify()
    assert [d.seq for d in batch.decodes] == seqs, "forks decode in the step that admits them"
    assert engine.scheduler.stats.prefill_tokens == prompt_len - 1
    assert len(batch.copies) == (7 if (prompt_len - 1) % page_size else 0)
    shared = (prompt_len - 1) // page_size
    assert all(seq.pages[:shared] == seqs[0].pages[:shared] for seq in seqs)
    engine.drain()
    assert len({tuple(seq.token_ids) for seq in seqs}) > 1 and engine.leaked() == 0


def test_a_late_sample_forks_from_one_that_has_gone_on():
    engine = FakeEngine(64, 4, prefix=False)
    engine.add([0, 1, 2, 0, 1, 2], new=30)
    for _ in range(4):
        engine.step()
    (late,) = engine.add([0, 1, 2, 0, 1, 2], new=30)
    assert late in [d.seq for d in engine.step().decodes]
    engine.verify()
    assert engine.scheduler.stats.forks == 1 and engine.scheduler.stats.prefill_tokens == 5
    engine.drain()


def test_followers_wait_for_their_leader_and_are_passed():
    engine = FakeEngine(64, 4, max_num_batched_tokens=10)
    a, b = engine.add([1] * 12, new=4, n=2)
    (c,) = engine.add([2] * 4, new=4)
    engine.step()
    assert a.kv_len == 10 and b.status is c.status is Status.WAITING, "no tokens left for c"
    engine.step()
    assert b.status is Status.WAITING and c.status is Status.RUNNING and a.status is Status.RUNNING
    assert engine.scheduler.waiting == [b]
    engine.step()
    assert b.status is Status.RUNNING
    engine.verify()


def test_the_next_sample_takes_over_when_the_leader_is_aborted():
    engine = FakeEngine(64, 4, max_num_batched_tokens=5)
    leader, second, third = engine.add([1] * 12, new=4, n=3)
    engine.step()
    engine.abort(leader)
    engine.step()
    assert second.status is Status.PREFILL and third.status is Status.WAITING
    engine.drain()
    assert len(engine.finished) == 2 and engine.leaked() == 0


def test_prompt_logits_lead_but_never_follow():
    engine = FakeEngine(64, 4, prefix=False)
    lead, follow = engine.add([1] * 8, new=4, prompt_logits=True) + engine.add([1] * 8, new=4)
    engine.step()
    assert lead.status is Status.RUNNING and follow.status is Status.WAITING
    (own,) = engine.add([1] * 8, new=4, prompt_logits=True)
    batch = engine.step()
    assert [c.seq for c in batch.chunks] == [own] and engine.scheduler.stats.forks == 1
    engine.drain()


# ---- pages run out ----


def crowd(engine: FakeEngine, count: int, prompt_len: int, new: int) -> list[Sequence]:
    """Different prompts, so that nothing is shared."""
    return [
        seq for i in range(count) for seq in engine.add([(i >> b) % 2 for b in range(prompt_len)], new=new)
    ]


def test_the_youngest_pays_goes_to_the_front_and_keeps_its_full_pages_findable():
    engine = FakeEngine(8, 4, max_num_seqs=2, max_nodes=1)
    old, young, third = crowd(engine, 3, 5, 20)
    preempted: list[Sequence] = []
    while not preempted:
        preempted = engine.step().preempted
    assert preempted == [young] and young.preemptions == 1 and old.status is Status.RUNNING
    assert engine.scheduler.waiting == [young, third] and not young.pages and young.kv_len == 0
    assert engine.prefix is not None and engine.pool.idle >= 2
    engine.verify()
    engine.drain()
    assert [seq.output_len for seq in (old, young, third)] == [20, 20, 20] and engine.leaked() == 0
    assert engine.scheduler.stats.prefix_hit_tokens > 0


def test_all_of_several_victims_return_in_their_order():
    engine = FakeEngine(12, 4, max_nodes=1, prefix=False)
    seqs = crowd(engine, 3, 5, 24)
    engine.step()
    engine.step()
    assert all(seq.status is Status.RUNNING for seq in seqs)
    engine.scheduler.recompute_all()
    engine.expected.clear()
    assert engine.scheduler.waiting == seqs and engine.pool.used == 0 and engine.scheduler.stats.recomputed == 3
    engine.drain()
    assert engine.leaked() == 0


def test_look_ahead_preempts_nobody_and_shrinks_to_the_root():
    engine = FakeEngine(8, 4, max_num_seqs=2, prefix=False)
    crowd(engine, 2, 5, 20)
    engine.step()
    for wish in (1, 12, 100):
        batch = engine.scheduler.schedule(chain_nodes(wish))
        assert not batch.preempted and len(batch.decodes) == 2
        assert batch.decodes[0].max_nodes == min(wish, 6 * 4 - 4) and batch.decodes[1].max_nodes >= 1
        for decode in batch.decodes:
            engine.scheduler.commit(decode, 0)
        engine.scheduler.check_integrity()
    assert engine.pool.used == 4


def test_an_admission_beats_look_ahead():
    engine = FakeEngine(10, 4, prefix=False)
    engine.add([1] * 5, new=20)
    engine.step()
    (second,) = engine.add([2] * 9, new=20)
    batch = engine.scheduler.schedule(chain_nodes(128))
    assert [c.seq for c in batch.chunks] == [second] and len(second.pages) == 3
    assert [d.max_nodes for d in batch.decodes] == [7 * 4 - 4], "the rest"


def test_admission_leaves_headroom_but_a_lone_sequence_needs_none():
    engine = FakeEngine(8, 4, prefix=False)
    lone, second = engine.add([1] * 29, new=4) + engine.add([2] * 4, new=4)
    engine.step()
    assert lone.status is Status.PREFILL and len(lone.pages) == 8 and second.status is Status.WAITING
    engine.drain()
    engine = FakeEngine(11, 4, prefix=False)
    first, second, third = (engine.add([i] * 8, new=16)[0] for i in range(3))
    engine.step()
    assert first.pages and second.pages and not third.pages, "11 - 4 - 2 pages < 3 sequences of 2"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("prefix", [True, False])
def test_pool_for_one_and_a_half_requests_serves_four(page_size, prefix):  # G06
    prompt, new = 12, 28
    engine = FakeEngine(pages_for(60, page_size), page_size, prefix=prefix, max_nodes=8)
    seqs = crowd(engine, 4, prompt, new)
    while engine.alive:
        engine.step()
        engine.verify()
    assert [seq.output_len for seq in seqs] == [new] * 4 and engine.leaked() == 0
    assert engine.scheduler.stats.preemptions >= 1


def test_what_can_never_fit_is_refused_alone():  # G06
    engine = FakeEngine(4, 4, max_model_len=40)
    assert engine.scheduler.can_ever_fit(17) and not engine.scheduler.can_ever_fit(18)
    (good,) = engine.add([1] * 4, new=13)
    with pytest.raises(ValueError, match=r"max_len: expected at most max_model_len = 40 and 16 KV slots \+ 1, got 18"):
        engine.add([1] * 4, new=14)
    with pytest.raises(ValueError, match="token_ids: expected at least one token"):
        engine.add([], new=3)
    with pytest.raises(ValueError, match="max_len: expected more than its 2 tokens"):
        engine.add([1, 1], new=0)
    engine.drain()
    assert good.output_len == 13 and engine.leaked() == 0
    assert not FakeEngine(64, 4, max_model_len=40).scheduler.can_ever_fit(41)


def test_nobody_starves():
    """A long prompt among a stream of short ones, in a pool that cannot hold all: everyone ends in bounded time."""
    engine = FakeEngine(16, 4, max_num_seqs=4, max_num_batched_tokens=8, seed=3)
    rng = random.Random(5)
    engine.add([1] * 6, new=10)
    (long,) = engine.add([2] * 40, new=12)
    steps = 0
    while long.status is not Status.FINISHED:
        if len(engine.alive) < 8:
            engine.add([rng.randrange(VOCAB) for _ in range(5)], new=6)
        engine.step()
        engine.verify()
        steps += 1
        assert steps < 60, f"{long.status.value} with {long.output_len} tokens"


# ---- the end ----


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_200_short_requests_leave_nothing(page_size):  # G05
    engine = FakeEngine(
        pages_for(200, page_size), page_size, max_num_batched_tokens=32, stop_chance=0.1, seed=page_size,
    )
    rng = random.Random(page_size)
    for i in range(200):
        engine.add([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], new=rng.randint(1, 12))
        if i % 3 == 0:
            engine.step()
        if i % 17 == 0 and engine.alive:
            engine.abort(rng.choice(engine.alive))
    engine.drain()
    engine.verify()
    lengths = [seq.room for seq in engine.finished]
    assert 0 in lengths and max(lengths) > 0, "both ends by length and by stop"
    assert engine.leaked() == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_at_each_step_and_reuse_of_the_id(page_size, at, in_flight):  # G08
    engine = FakeEngine(pages_for(96, page_size), page_size, max_num_batched_tokens=12, max_nodes=4)
    seqs = engine.add([1, 2, 0, 1, 1], new=24, n=2) + engine.add([2] * 9, new=24, n=2)
    for _ in range(at):
        engine.step()
    victim = seqs[at % 4]
    if in_flight:
        engine.step(lambda batch: engine.abort(victim))
    else:
        engine.abort(victim)
    engine.abort(victim)  # once more does nothing
    assert victim.status is Status.FINISHED and not victim.pages
    engine.next_id = victim.seq_id
    engine.add([0, 0, 1], new=5)
    while engine.alive:
        engine.step()
        engine.verify()
    assert len(engine.finished) == 4 and engine.leaked() == 0


def test_only_kept_tokens_are_found_again():  # A18
    """A follow-up prompt = prompt + output hits at most what was kept, and what it hits is right."""
    engine = FakeEngine(64, 1, stop_chance=0.3, seed=1)
    for _ in range(20):
        (seq,) = engine.add([engine.rng.randrange(VOCAB) for _ in range(6)], new=40)
        engine.drain()
        before = engine.scheduler.stats.prefix_hit_tokens
        (after,) = engine.add([*seq.token_ids, 0, 1], new=2)
        engine.step()
        engine.verify()
        assert engine.scheduler.stats.prefix_hit_tokens - before <= len(seq.token_ids)
        assert len(after.token_ids) > len(seq.token_ids)
        engine.drain()


# ---- weight updates ----


def test_old_versions_never_match():  # H06
    engine = FakeEngine(64, 4)
    engine.add([1] * 12, new=2)
    engine.drain()
    assert engine.pool.idle
    engine.set_version(1, recompute=True)
    assert engine.pool.idle == 0, "stale pages are free at once"
    engine.add([1] * 12, new=2)
    engine.step()
    engine.verify()
    assert engine.scheduler.stats.prefix_hit_tokens == 0 and engine.scheduler.stats.prefill_tokens == 22
    engine.drain()


@pytest.mark.parametrize("prefix", [True, False])
def test_kept_kv_of_old_weights_is_neither_cached_nor_forked(prefix):  # H06, H07
    engine = FakeEngine(64, 4, prefix=prefix)
    engine.add([1] * 12, new=60)
    for _ in range(3):
        engine.step()
    engine.set_version(1, recompute=False)
    for _ in range(3):
        engine.step()
    (new,) = engine.add([1] * 12, new=60)
    batch = engine.step()
    assert [c.seq for c in batch.chunks] == [new], "its sibling's KV is of other weights"
    engine.verify()
    engine.drain()
    assert engine.scheduler.stats.forks == engine.scheduler.stats.prefix_hit_tokens == 0


def test_a_page_of_mixed_weights_is_never_found():  # H07
    """Its neighbours get cached under the new weights by someone else; it must not complete their chain."""
    engine = FakeEngine(64, 4, max_nodes=1)
    (kept,) = engine.add([1] * 7, new=60)
    engine.step()
    assert kept.kv_len == 6, "page 1 holds two keys of version 0"
    engine.set_version(1, recompute=False)
    while kept.kv_len < 8:
        engine.step()
    ids = [*kept.token_ids[:8], 0, 0]
    for _ in range(2):
        engine.add(ids, new=1)
        for _ in range(4):
            engine.step()
            engine.verify()
    assert engine.scheduler.stats.prefix_hit_tokens == 8, "the second finds what the first computed"


@pytest.mark.parametrize("prefix", [True, False])
def test_recomputed_samples_still_share_their_prompt(prefix):
    engine = FakeEngine(128, 4, prefix=prefix, max_num_batched_tokens=64, max_nodes=4)
    seqs = engine.add([i % VOCAB for i in range(31)], new=60, n=4)
    for _ in range(4):
        engine.step()
    outputs = sum(seq.output_len for seq in seqs)
    before = engine.scheduler.stats.prefill_tokens
    engine.set_version(1, recompute=True)
    while not all(seq.status is Status.RUNNING for seq in seqs):
        engine.step()
        engine.verify()
    assert engine.scheduler.stats.prefill_tokens - before <= 30 + outputs + 8
    engine.drain()


# ---- speed ----


@pytest.mark.parametrize("nodes", [1, 12])
def test_256_running_sequences_schedule_quickly(nodes):
    """Under 1 ms on an idle core; the bound leaves room for a loaded machine."""
    engine = FakeEngine(256 * 16, 16, max_num_seqs=256, max_num_batched_tokens=4096)
    engine.add([1] * 100, new=100, n=256)
    while len(engine.scheduler.running) < 256:
        engine.step()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        batch = engine.scheduler.schedule(chain_nodes(nodes))
        times.append(time.perf_counter() - start)
        for decode in batch.decodes:
            decode.seq.token_ids.append(0)
            engine.scheduler.commit(decode, 1)
    assert min(times) < 3e-3, f"{min(times) * 1e3:.2f} ms"
