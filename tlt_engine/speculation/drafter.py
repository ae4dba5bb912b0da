"""What the engine asks of a drafter. A drafter never touches the emitted distribution: whatever it proposes, the
equality walk emits what plain decoding would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tlt_engine.config import SamplingParams
from tlt_engine.speculation.tree import DraftTree


@dataclass(slots=True)  # frozen it would take 1.3 us to make instead of 0.3, while the GPU waits
class DraftContext:
    """What a drafter may know of one running sample. Read only.

    seq_id: unique while the engine lives. group: equal for samples of one prompt (RequestOutput.group_id).
    token_ids: prompt and output so far; the last one is the root of the tree to propose. Read only.
    prompt_len: how many of them are the prompt (prior output excluded).
    key, sample, segment: the noise identity; a child of a node at depth d is drawn at position len(token_ids) + d.
    max_nodes: the most nodes, root included, that the tree may hold. max_depth: the deepest useful level: nodes below
    it would be cut by max_tokens or the context end.
    """

    seq_id: int
    group: str
    token_ids: Sequence[int]
    prompt_len: int
    key: int
    sample: int
    segment: int
    params: SamplingParams
    max_nodes: int
    max_depth: int


class Drafter(Protocol):
    """Called by the engine between target passes, from the thread that steps it, one call at a time."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree a context, in order, tokens[0] == context.token_ids[-1]; a root alone where nothing is worth it."""

    def observe(self, context: DraftContext, accepted: int) -> None:
        """After a commit: context.token_ids now holds the new tokens; `accepted` drafts of the last tree were taken."""

    def finish(self, seq_id: int) -> None:
        """The sample has ended, been aborted or paused. May be called for ids never proposed for."""

    def memory_bytes(self) -> int:
        """Host and device bytes the drafter holds."""
