"""What runs next, on whose pages. Pure bookkeeping: no tensors, no model, no clock; the engine runs what a Batch says
and reports back with advance_prefill() and commit() before the next schedule().

A sequence waits, is admitted (oldest first), prefills the KV of all its tokens but the last, then decodes a tree a
step. When pages run out, the one admitted last gives its pages back and is recomputed later; the one admitted first
therefore always gets on, and everyone behind it in turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tlt_engine.config import refuse
from tlt_engine.kvcache.pages import PagePool
from tlt_engine.kvcache.prefix import PrefixCache, tokens_key
from tlt_engine.scheduler.sequence import Batch, Chunk, Decode, Fork, Sequence, Status

# Tokens that every live sequence can still write, without a preemption, after one more has been admitted: 1 page each
# at page size 16. A sequence admitted into a full pool is thrown out by its elders within a few steps, and all of its
# prefill is paid twice.
HEADROOM = 8


@dataclass
class SchedulerStats:
    """Counts since the scheduler was built. prefill_tokens: KV computed by chunks. prefix_hit_tokens: KV taken from the
    prefix cache instead; forked_tokens: from a live sibling, in `forks` admissions. preemptions: for want of pages;
    recomputed: by recompute_all()."""

    admitted: int = 0
    prefill_tokens: int = 0
    prefix_hit_tokens: int = 0
    forks: int = 0
    forked_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0


@dataclass(frozen=True)
class _Start:
    """Where an admission begins: these pages are shared, `kv_len` keys are there, and the last `kv_len % page_size` of
    them are copied from page `tail`. donor: the sibling whose they are; None: the prefix cache's."""

    pages: list[int]
    kv_len: int
    tail: int | None = None
    donor: Sequence | None = None


class Scheduler:
    """Sequences added with equal token_ids[:-1] are a family: n samples of one prompt. One of them computes that KV
    while the others wait (those behind them pass); then each forks: it shares the full pages and copies the partial
    one. A member that was preempted with output of its own still forks the common part.

    pool: not shared with another scheduler. prefix: None turns prefix caching off, forks stay.
    max_num_seqs: live sequences. max_num_batched_tokens: prefill tokens a step; decodes are on top.
    max_model_len: tokens of a sequence.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache | None,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        limits = {
            "page_size": page_size, "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value < 1:
                raise refuse(name, "at least 1", value, "raise it")
        if prefix is not None and prefix.page_size != page_size:
            raise refuse("page_size", f"that of the prefix cache, {prefix.page_size}", page_size, "use one page size")
        self.pool, self.prefix = pool, prefix
        self.page_size, self.max_num_seqs = page_size, max_num_seqs
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.version = 0
        self.stats = SchedulerStats()
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._live: dict[Sequence, None] = {}  # PREFILL and RUNNING, in order of admission
        self._families: dict[bytes, dict[Sequence, None]] = {}  # the live ones by start_key
        self._forks: list[Fork] = []  # of this schedule()

    # ---- the queue ----

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens can run to its end with the whole pool to itself. The last token's KV
        is never computed."""
        return tokens <= self.max_model_len and self._pages_for(tokens - 1) <= self.pool.total

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. ValueError if it could never run to its max_len."""
        if not seq.token_ids:
            raise refuse("token_ids", "at least one token", [], "give the prompt a BOS token")
        if seq.max_len <= len(seq.token_ids):
            raise refuse("max_len", f"more than its {len(seq.token_ids)} tokens", seq.max_len, "shorten the prompt")
        if not self.can_ever_fit(seq.max_len):
            slots = self.pool.total * self.page_size
            raise refuse(
                "max_len", f"at most max_model_len = {self.max_model_len} and {slots} KV slots + 1", seq.max_len,
                "lower max_tokens, or raise max_model_len or num_pages",
            )
        assert seq.status is Status.WAITING and seq not in self._waiting, f"sequence {seq.seq_id}: added twice"
        seq.start_len = len(seq.token_ids) - 1
        seq.start_key = tokens_key(b"", seq.token_ids[:-1])
        self._waiting[seq] = None

    def abort(self, seq: Sequence) -> None:
        """End it in whatever state; nothing happens if it has ended. Its pages go back, the full ones stay findable in
        the prefix cache; work in flight for it is ignored when reported."""
        if seq.status is Status.WAITING:
            self._waiting.pop(seq, None)
        elif seq.status is not Status.FINISHED:
            self._let_go(seq)
        seq.status = Status.FINISHED

    @property
    def running(self) -> list[Sequence]:
        """Oldest admission first."""
        return [seq for seq in self._live if seq.status is Status.RUNNING]

    @property
    def prefilling(self) -> list[Sequence]:
        return [seq for seq in self._live if seq.status is Status.PREFILL]

    @property
    def waiting(self) -> list[Sequence]:
        """Next one first."""
        return list(self._waiting)

    def set_version(self, version: int) -> None:
        """The target's weights changed; `version` is the engine's own count of changes (a caller's label may repeat).
        KV cached under other versions is gone. Live sequences keep theirs, but their pages no longer reach the prefix
        cache and nobody forks from them; recompute_all() gives them new KV."""
        if version != self.version:
            self.version = version
            if self.prefix is not None:
                self.prefix.reset()

    def recompute_all(self) -> None:
        """Send every live sequence back to the front of the queue, in order, its KV dropped."""
        for seq in reversed(list(self._live)):
            self._requeue(seq)
            self.stats.recomputed += 1

    # ---- one step ----

    def schedule(self, max_nodes: Callable[[Sequence], int]) -> Batch:
        """The next step's work; not empty while anything runs or waits.

        Every running sequence decodes, forks and fully cached admissions of this call included; a sequence whose last
        chunk is in this batch decodes from the next call on. max_nodes(seq): nodes wanted for its tree; it gets fewer,
        down to the root, rather than anybody's pages. Look-ahead is served last: a root beats an admission, an
        admission beats speculation.

        Copies: no destination page is a source or a destination of another copy, so any order gives the same result.
        """
        preempted = self._secure_roots()
        chunks = self._continue_prefills()
        # What was just preempted would take its pages straight back.
        copies = [] if preempted else self._admit(chunks)
        forks, self._forks = self._forks, []
        return Batch(self._decodes(max_nodes), chunks, copies, preempted, forks)

    def advance_prefill(self, chunk: Chunk) -> None:
        """The chunk's KV is in its slots."""
        seq = chunk.seq
        if seq.status is not Status.PREFILL:
            return
        before = seq.kv_len
        seq.kv_len += chunk.count
        self.stats.prefill_tokens += chunk.count
        assert seq.prefill_left >= 0, f"sequence {seq.seq_id}: kv_len {seq.kv_len} of {len(seq.token_ids)} tokens"
        if not seq.prefill_left:
            seq.status = Status.RUNNING
        self._cache(seq, before)

    def commit(self, decode: Decode, new_kv: int, *, flying: bool = False) -> None:
        """The pass appended `new_kv` tokens to token_ids (those kept after stops), and the KV of the root and of all of
        them but the last is in the slots from kv_len on. Look-ahead pages go back, as settle() says."""
        seq = decode.seq
        if seq.status is not Status.RUNNING:
            return
        seq.kv_len += new_kv
        assert 0 <= new_kv <= decode.max_nodes and seq.kv_len < len(seq.token_ids), (
            f"sequence {seq.seq_id}: {new_kv} keys of {decode.max_nodes} nodes committed, kv_len {seq.kv_len} for "
            f"{len(seq.token_ids)} tokens"
        )
        self.settle(seq, new_kv, flying=flying)

    def extend(self, decodes: Iterable[Decode], tokens: Iterable[list[int]]) -> None:
        """The first half of commit(), for running sequences whose next pass is to be launched at once: their new
        tokens, and the keys that came with them. Pages stay as they are until settle()."""
        for decode, new in zip(decodes, tokens):
            seq = decode.seq
            seq.token_ids += new
            seq.kv_len += len(new)

    def settle(self, seq: Sequence, new_kv: int, *, flying: bool = False) -> None:
        """The second half: full pages become findable, look-ahead pages go back unless a pass that is `flying` writes
        to them."""
        self._cache(seq, seq.kv_len - new_kv)
        needed = self._pages_for(seq.kv_len + 1)
        if not flying and len(seq.pages) > needed:
            self.pool.release_all(seq.pages[needed:])
            del seq.pages[needed:]

    def look_ahead(self, wanted: Iterable[tuple[Sequence, int]]) -> bool:
        """Slots behind the committed keys of running sequences, so many for each, for a step that schedule() does not
        see. Takes nobody's pages: False when the pool has too few left."""
        for seq, slots in wanted:
            missing = self._pages_for(seq.kv_len + slots) - len(seq.pages)
            if missing > 0:
                pages = self.pool.allocate(missing)
                if pages is None:
                    return False
                seq.pages += pages
        return True

    # ---- how ----

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.page_size)

    def _secure_roots(self) -> list[Sequence]:
        """One slot for the root of every running sequence, oldest first, at the cost of the youngest."""
        preempted: list[Sequence] = []
        for seq in list(self._live):
            while seq.status is Status.RUNNING and seq.kv_len >= len(seq.pages) * self.page_size:
                page = self.pool.allocate(1)
                if page is not None:
                    seq.pages += page
                    continue
                victim = next(reversed(self._live))
                assert len(self._live) > 1, (
                    f"sequence {seq.seq_id}: alone with {len(seq.pages)} pages, pool {self.pool.total}"
                )
                self._requeue(victim)
                victim.preemptions += 1
                self.stats.preemptions += 1
                preempted.append(victim)
        return preempted

    def _continue_prefills(self) -> list[Chunk]:
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        for seq in self._live:
            if seq.status is Status.PREFILL and budget:
                chunks.append(Chunk(seq, min(seq.prefill_left, budget)))
                budget -= chunks[-1].count
        return chunks

    def _admit(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """Admit in order while seats, pages and prefill tokens last. Appends to `chunks`; returns page copies.

        Only a sequence that waits for its leader is passed by others. One that lacks pages or tokens is not: else a
        stream of short prompts could hold up a long one for ever.
        """
        budget = self.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        copies: list[tuple[int, int]] = []
        admitted: list[Sequence] = []
        led: set[bytes] = set()  # with 8191 followers of one leader in the queue, a step costs 17 ms without it
        for seq in self._waiting:
            if len(self._live) >= self.max_num_seqs or not self.pool.available:
                break
            if seq.start_key in led and seq.prefill_left == seq.start_len and not seq.prompt_logits:
                continue
            start = self._start(seq)
            if start is None:
                led.add(seq.start_key)
                continue
            left = len(seq.token_ids) - 1 - start.kv_len
            if (left and not budget) or not self._fits(seq, start):
                break
            copies += self._seat(seq, start)
            admitted.append(seq)
            if left:
                chunks.append(Chunk(seq, min(left, budget)))
                budget -= chunks[-1].count
        for seq in admitted:
            del self._waiting[seq]
        return copies

    def _start(self, seq: Sequence) -> _Start | None:
        """What KV it can begin with; None while a sibling is computing it."""
        if seq.kv_version != self.version:
            seq.kv_version = self.version
            seq.page_keys.clear()
        if seq.prompt_logits:
            return _Start([], 0)
        donor, leader = self._siblings(seq)
        limit = len(seq.token_ids) - 1
        if limit == seq.start_len and (donor is not None or leader):
            return None if donor is None else self._fork(seq, donor)
        cached = [] if self.prefix is None else self.prefix.peek(seq.token_ids, self.version, limit, seq.page_keys)
        if len(cached) * self.page_size < seq.start_len and (donor is not None or leader):
            return None if donor is None else self._fork(seq, donor)
        return _Start(cached, len(cached) * self.page_size)

    def _fork(self, seq: Sequence, donor: Sequence) -> _Start:
        full, partial = divmod(seq.start_len, self.page_size)
        if not seq.page_keys:
            seq.page_keys = donor.page_keys[:full]  # hashing an 8k prompt again for each sample costs 1 ms
        return _Start(donor.pages[:full], seq.start_len, donor.pages[full] if partial else None, donor)

    def _siblings(self, seq: Sequence) -> tuple[Sequence | None, bool]:
        """A live member of its family that holds the common KV; else whether one is computing it."""
        leader = False
        for other in self._families.get(seq.start_key, ()):
            if other.kv_version == self.version:
                if other.kv_len >= seq.start_len:
                    return other, False
                leader = True
        return None, leader

    def _fits(self, seq: Sequence, start: _Start) -> bool:
        """Whether its pages, root included, leave every live sequence its headroom. One alone needs none."""
        new = self._pages_for(len(seq.token_ids)) - len(start.pages)
        revived = 0 if start.donor is not None else sum(1 for page in start.pages if not self.pool.holders(page))
        watermark = (len(self._live) + 1) * self._pages_for(HEADROOM) if self._live else 0
        return self.pool.available - revived - new >= watermark

    def _seat(self, seq: Sequence, start: _Start) -> list[tuple[int, int]]:
        """Make it live with all the pages of its tokens; returns the copy of the partial page, if any."""
        for page in start.pages:
            self.pool.share(page)
        new = self.pool.allocate(self._pages_for(len(seq.token_ids)) - len(start.pages))
        assert new, f"sequence {seq.seq_id}: admitted without pages"
        seq.pages = start.pages + new
        seq.kv_len = start.kv_len
        seq.status = Status.PREFILL if seq.prefill_left else Status.RUNNING
        self._live[seq] = None
        self._families.setdefault(seq.start_key, {})[seq] = None
        self.stats.admitted += 1
        if start.donor is not None:
            self._forks.append(Fork(start.donor, seq))
            self.stats.forks += 1
            self.stats.forked_tokens += start.kv_len
        else:
            self.stats.prefix_hit_tokens += start.kv_len
        return [] if start.tail is None else [(start.tail, new[0])]

    def _decodes(self, max_nodes: Callable[[Sequence], int]) -> list[Decode]:
        decodes: list[Decode] = []
        for seq in self._live:
            if seq.status is not Status.RUNNING:
                continue
            nodes = max(max_nodes(seq), 1)
            owned = len(seq.pages) * self.page_size - seq.kv_len
            if nodes > owned:
                extra = min(self._pages_for(nodes - owned), self.pool.available)
                if extra:
                    seq.pages += self.pool.allocate(extra) or ()
                    owned += extra * self.page_size
            decodes.append(Decode(seq, min(nodes, owned)))
        return decodes

    def _cache(self, seq: Sequence, before: int) -> None:
        """Register the pages that became full since kv_len was `before`."""
        if self.prefix is not None and seq.kv_version == self.version:
            self.prefix.insert(seq.token_ids, seq.pages, seq.kv_len, self.version, before, seq.page_keys)

    def _requeue(self, seq: Sequence) -> None:
        self._let_go(seq)
        seq.status = Status.WAITING
        self._waiting[seq] = None
        self._waiting.move_to_end(seq, last=False)

    def _let_go(self, seq: Sequence) -> None:
        """Take it off the live ones. Last page first: the prefix cache must lose leaves before their parents."""
        self.pool.release_all(reversed(seq.pages))
        seq.pages = []
        seq.kv_len = 0
        del self._live[seq]
        family = self._families[seq.start_key]
        del family[seq]
        if not family:
            del self._families[seq.start_key]

    # ---- integrity ----

    def check_integrity(self) -> None:
        """Raise AssertionError with both sides of what does not balance. O(pages): for tests and for idle moments."""
        self.pool.check()
        if self.prefix is not None:
            self.prefix.check()
        owners = Counter(page for seq in self._live for page in seq.pages)
        for page in range(self.pool.total):
            assert self.pool.holders(page) == owners[page], (
                f"page {page}: {self.pool.holders(page)} holders in the pool, {owners[page]} live sequences hold it"
            )
        for seq in self._live:
            self._check_live(seq)
        for seq in self._waiting:
            assert seq.status is Status.WAITING and not seq.pages and not seq.kv_len, (
                f"sequence {seq.seq_id}: in the queue, but {seq.status.value} with {len(seq.pages)} pages, "
                f"kv_len {seq.kv_len}"
            )
        members = {seq for family in self._families.values() for seq in family}
        assert members == set(self._live), f"families: {len(members)} members, {len(self._live)} live sequences"
        assert len(self._live) <= self.max_num_seqs, f"live: {len(self._live)}, max_num_seqs {self.max_num_seqs}"

    def _check_live(self, seq: Sequence) -> None:
        name, slots = f"sequence {seq.seq_id}", len(seq.pages) * self.page_size
        assert len(set(seq.pages)) == len(seq.pages), f"{name}: a page twice in {seq.pages}"
        assert seq.kv_len <= slots, f"{name}: kv_len {seq.kv_len}, {slots} slots in {len(seq.pages)} pages"
        want = Status.PREFILL if seq.prefill_left else Status.RUNNING
        assert seq.status is want and seq.prefill_left >= 0, (
            f"{name}: {seq.status.value}, expected {want.value} at kv_len {seq.kv_len} of {len(seq.token_ids)} tokens"
        )
        for page in seq.pages[seq.kv_len // self.page_size :]:
            shared, cached = self.pool.holders(page), self.pool.kept(page)
            assert shared == 1 and not cached, (
                f"{name}: will write page {page}, which has {shared} holders and kept = {cached}; expected 1 and False"
            )
