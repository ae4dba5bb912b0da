"""A scripted engine around the real scheduler, whose KV is a list of numbers: does every page come back, and does every
sequence read its own KV and nobody else's?

The KV of a position is a hash of (weight version, KV of the position before, token), read through the page table as
attention would. So one wrong page, slot, copy or version anywhere spoils everything behind it. `verify()` compares with
the same chain computed from token_ids alone.

run_events(n, seed) is the entry for benchmarks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tlt_engine.config import SamplingParams
from tlt_engine.kvcache.pages import PagePool
from tlt_engine.kvcache.prefix import PrefixCache
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.scheduler.sequence import Batch, Sequence, Status

PARAMS = SamplingParams()
VOCAB = 3  # few tokens: different prompts share prefixes, and different samples share pages


def chain(version: int, before: int, token: int) -> int:
    return hash((version, before, token))


class FakeEngine:
    """schedule, copy, pass, commit. `stop_chance`: of each kept token to be the last one."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        *,
        prefix: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 256,
        max_nodes: int = 12,
        stop_chance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(self.pool, page_size) if prefix else None
        self.scheduler = Scheduler(
            self.pool, self.prefix, page_size=page_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        )
        self.page_size, self.max_nodes, self.stop_chance = page_size, max_nodes, stop_chance
        self.kv = [-1] * (num_pages * page_size)
        self.rng = random.Random(seed)
        self.expected: dict[Sequence, list[int]] = {}  # of live sequences
        self.alive: list[Sequence] = []  # added, neither finished nor aborted
        self.finished: list[Sequence] = []
        self.next_id = 0

    # ---- events ----

    def add(self, prompt: list[int], new: int, n: int = 1, prompt_logits: bool = False) -> list[Sequence]:
        seqs = []
        for sample in range(n):
            seq = Sequence(
                self.next_id, str(prompt), PARAMS, list(prompt), len(prompt), len(prompt) + new, 0, sample,
                prompt_logits=prompt_logits,
            )
            self.next_id += 1
            self.scheduler.add(seq)
            seqs.append(seq)
        self.alive += seqs
        return seqs

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
        self._gone(seq)

    def set_version(self, version: int, recompute: bool) -> None:
        self.scheduler.set_version(version)
        if recompute:
            self.scheduler.recompute_all()
            self.expected.clear()

    def step(self, in_flight: Callable[[Batch], None] | None = None) -> Batch:
        """One step; `in_flight` is called between the pass and its commit."""
        busy = bool(self.alive)
        batch = self.scheduler.schedule(lambda seq: self.rng.randint(1, self.max_nodes))
        assert bool(batch) == busy, f"batch: {len(batch.decodes)} decodes, {len(batch.chunks)} chunks, busy {busy}"
        self.scheduler.check_integrity()
        for seq in batch.preempted:
            del self.expected[seq]
        self._note_admissions(batch)
        self.copy(batch)
        for chunk in batch.chunks:
            for i in range(chunk.seq.kv_len, chunk.seq.kv_len + chunk.count):
                self._write(chunk.seq, i, self._next(chunk.seq, i, i - 1))
        outcomes = [self._tree(d.seq, d.max_nodes) for d in batch.decodes]
        if in_flight is not None:
            in_flight(batch)
        for chunk in batch.chunks:
            if chunk.seq in self.expected:
                self._extend(chunk.seq, chunk.count)
            self.scheduler.advance_prefill(chunk)
        for decode, tokens in zip(batch.decodes, outcomes):
            self._commit(decode, tokens)
        return batch

    def drain(self, limit: int = 100_000) -> int:
        """Steps until nothing is left."""
        for steps in range(limit):
            if not self.alive:
                return steps
            self.step()
        raise AssertionError(f"drain: {len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting")

    def leaked(self) -> int:
        """Pages that an idle engine without a prefix cache does not have back."""
        if self.prefix is not None:
            self.prefix.reset()
        return self.pool.total - self.pool.free

    # ---- the law ----

    def verify(self) -> None:
        """Every live sequence's KV, read through its pages, is that of its own tokens; and the ledger balances."""
        self.scheduler.check_integrity()
        live = self.scheduler.running + self.scheduler.prefilling
        assert set(live) == set(self.expected), f"live: scheduler {len(live)}, harness {len(self.expected)}"
        for seq in live:
            got = [self.kv[self._slot(seq, i)] for i in range(seq.kv_len)]
            want = self.expected[seq]
            assert got == want, (
                f"sequence {seq.seq_id}: KV differs from its tokens' at position "
                f"{next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))}"
            )
            owned = -(-(seq.kv_len + 1) // self.page_size)
            if seq.status is Status.RUNNING:
                assert len(seq.pages) <= owned, f"look-ahead: {len(seq.pages)} pages after commit, expected {owned}"
        holders = Counter(page for seq in self.alive for page in seq.pages)
        assert len(holders) == self.pool.used, f"used pages: ledger {len(holders)}, pool {self.pool.used}"

    # ---- the pass ----

    def copy(self, batch: Batch) -> None:
        sources, destinations = {s for s, _ in batch.copies}, [d for _, d in batch.copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations), (
            f"copies: {batch.copies} depend on their order"
        )
        size = self.page_size
        for source, destination in batch.copies:
            self.kv[destination * size : (destination + 1) * size] = self.kv[source * size : (source + 1) * size]

    def _slot(self, seq: Sequence, i: int) -> int:
        return seq.pages[i // self.page_size] * self.page_size + i % self.page_size

    def _write(self, seq: Sequence, i: int, value: int) -> None:
        page = seq.pages[i // self.page_size]
        assert self.pool.holders(page) == 1 and not self.pool.kept(page), f"sequence {seq.seq_id}: writes shared {page}"
        self.kv[self._slot(seq, i)] = value

    def _next(self, seq: Sequence, i: int, parent: int, token: int | None = None) -> int:
        before = self.kv[self._slot(seq, parent)] if parent >= 0 else 0
        return chain(self.scheduler.version, before, seq.token_ids[i] if token is None else token)

    def _tree(self, seq: Sequence, nodes: int) -> list[int]:
        """Write `nodes` nodes, of which a random path is accepted and compacted. Returns the emitted tokens."""
        accepted = self.rng.randint(1, min(nodes, seq.room))
        path = [0, *sorted(self.rng.sample(range(1, nodes), accepted - 1))]
        emitted = [self.rng.randrange(VOCAB) for _ in range(accepted)]
        base, values = seq.kv_len, {}
        for node in range(nodes):
            value = self.rng.randrange(2**60)  # a rejected node's
            if node in path:
                at = path.index(node)
                parent = base + path[at - 1] if at else base - 1
                value = self._next(seq, base, parent, seq.token_ids[-1] if not at else emitted[at - 1])
                values[at] = value
            self._write(seq, base + node, value)
        for at, value in values.items():
            self._write(seq, base + at, value)
        return emitted

    def _commit(self, decode, emitted: list[int]) -> None:
        seq = decode.seq
        if seq.status is not Status.RUNNING:
            self.scheduler.commit(decode, len(emitted))
            return
        kept = next((i + 1 for i in range(len(emitted)) if self.rng.random() < self.stop_chance), None)
        emitted = emitted[:kept]
        if len(seq.token_ids) % 2:
            seq.token_ids += emitted
            self.scheduler.commit(decode, len(emitted))
        else:  # in two halves, as the engine does when it launches the next pass in between
            self.scheduler.extend([decode], [emitted])
            self.scheduler.settle(seq, len(emitted))
        self._extend(seq, len(emitted))
        if kept is not None or not seq.room:
            self.scheduler.abort(seq)
            self.finished.append(seq)
            self._gone(seq)

    # ---- what should be there ----

    def _note_admissions(self, batch: Batch) -> None:
        for seq in [d.seq for d in batch.decodes] + [c.seq for c in batch.chunks]:
            if seq not in self.expected:
                self.expected[seq] = []
                self._extend(seq, seq.kv_len)

    def _extend(self, seq: Sequence, count: int) -> None:
        values = self.expected[seq]
        for token in seq.token_ids[len(values) : len(values) + count]:
            values.append(chain(self.scheduler.version, values[-1] if values else 0, token))

    def _gone(self, seq: Sequence) -> None:
        self.expected.pop(seq, None)
        if seq in self.alive:
            self.alive.remove(seq)


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]


def random_event(engine: FakeEngine, rng: random.Random, longest: int) -> None:
    """One event; additions and steps keep a few requests in the air."""
    event = rng.random()
    if event < 0.25 and len(engine.alive) < 24:
        prompt = random_prompt(rng, longest // 2)
        engine.add(prompt, rng.randint(1, longest // 2), rng.choice((1, 1, 2, 4)), rng.random() < 0.1)
    elif event < 0.31 and engine.alive:
        engine.abort(rng.choice(engine.alive))
    elif event < 0.35:
        engine.step(lambda batch: engine.alive and engine.abort(rng.choice(engine.alive)))
    elif event < 0.36:
        engine.set_version(engine.scheduler.version + 1, recompute=rng.random() < 0.5)
    elif event < 0.37:
        engine.set_version(engine.scheduler.version, recompute=True)
    else:
        engine.step()


def run_engine(n: int, seed: int, page_size: int, slots: int = 96) -> FakeEngine:
    """`n` random events in a pool of `slots` KV slots, verified after each; then everything is drained."""
    rng = random.Random(f"{seed} {page_size}")
    engine = FakeEngine(
        slots // page_size, page_size, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=slots,
        stop_chance=0.01, seed=seed,
    )
    for _ in range(n):
        random_event(engine, rng, longest=slots - 16)
        engine.verify()
    engine.drain()
    engine.verify()
    return engine


def run_events(n: int, seed: int) -> int:
    """`n` random events (additions, steps, aborts also in flight, weight updates, preemptions for want of pages),
    a third each with page size 1, 4 and 16. Returns the pages leaked."""
    return sum(run_engine(n // 3 + (i < n % 3), seed, size).leaked() for i, size in enumerate((1, 4, 16)))
