"""One sample of one prompt, and the work of one step. Lengths are derived, never stored twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tlt_engine.config import SamplingParams


class Status(Enum):
    WAITING = "waiting"  # holds no pages
    PREFILL = "prefill"  # pages held, KV of token_ids[:-1] not complete
    RUNNING = "running"  # KV of token_ids[:-1] complete: the last token is the root of the next tree
    FINISHED = "finished"  # holds no pages


@dataclass(eq=False)
class Sequence:
    """token_ids: prompt, then output (prior output of an earlier call counts as output). max_len: token_ids never grows
    beyond it. key, sample, segment: noise identity. kv_len: committed keys; pages holds them and the look-ahead slots.
    prompt_logits: logits of the prompt's rows are wanted, so its KV is computed and not taken from the prefix cache.
    speculate: False keeps its trees to the root (audits, and requests with SpeculationConfig off).

    The scheduler's own notes: kv_version, the weight version its KV belongs to; page_keys, its prefix cache keys under
    that version; start_len and start_key, length and identity of token_ids[:-1] when it was added.
    """

    seq_id: int
    group: str
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int
    key: int
    sample: int
    segment: int = 0
    prompt_logits: bool = False
    speculate: bool = True
    status: Status = Status.WAITING
    kv_len: int = 0
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    kv_version: int | None = None
    page_keys: list[bytes] = field(default_factory=list)
    start_len: int = 0
    start_key: bytes = b""

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_left(self) -> int:
        """Tokens whose KV must still be computed before the root can run."""
        return len(self.token_ids) - 1 - self.kv_len

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """Prefill token_ids[seq.kv_len : seq.kv_len + count] of `seq`."""

    seq: Sequence
    count: int


@dataclass(frozen=True)
class Decode:
    """Run a tree of at most `max_nodes` nodes (>= 1) from the root of `seq`; pages for all of them are owned."""

    seq: Sequence
    max_nodes: int


@dataclass(frozen=True)
class Fork:
    """`seq` was admitted with the first seq.kv_len keys of `donor`."""

    donor: Sequence
    seq: Sequence


@dataclass(frozen=True)
class Batch:
    """One step's work. copies: (source page, destination page), to be done in order before the pass."""

    decodes: list[Decode]
    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    preempted: list[Sequence]
    forks: list[Fork] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)
