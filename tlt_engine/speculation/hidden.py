"""Hidden states of committed tokens, as the engine hands them out after each pass. Knows neither who computes them nor
what becomes of them.

Shape legend: R packed rows of a pass, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class HiddenRun:
    """Consecutive positions of one sample: position first + i is row rows[i]. Only tokens that stay are among them:
    nothing off the accepted path and nothing behind a stop. A decode that keeps k tokens gives the k positions from its
    root on; the last kept token has no hidden state yet. drafts: the sample decodes with speculation."""

    seq_id: int
    first: int
    rows: Sequence[int]
    drafts: bool = True


@dataclass(frozen=True)
class HiddenRows:
    """hidden: {index: [R, Ht]}, numbered as StepOutputs.hidden, in the model's dtype and on its device; valid until the
    next pass. runs: of samples that a caller sees; those of `score` and audits are left out."""

    hidden: dict[int, Tensor]
    runs: list[HiddenRun]


class HiddenConsumer(Protocol):
    """Called by the engine from the thread that steps it, one call at a time."""

    hidden_layers: tuple[int, ...]

    def take(self, rows: HiddenRows) -> None:
        """After each pass, before any output of it is sealed. A sample's runs follow each other without a gap, save
        that positions found in the prefix cache never come, and that those of a preempted sample come again."""


class HiddenDrafter(HiddenConsumer, Protocol):
    """A Drafter that drafts from hidden states."""

    def fork(self, source: int, seq_id: int, length: int) -> None:
        """The sample seq_id shares the first `length` positions of `source`, whose runs have been taken."""

    def target_changed(self, recomputed: bool) -> None:
        """The target has new weights. recomputed: live samples are computed again from their first token, so what was
        taken of them is another policy's and will come anew."""


class HiddenRecorder(HiddenConsumer, Protocol):
    """Who keeps hidden states beyond their sample: training.buffer.HiddenStateBuffer."""

    def fork(self, source: int, seq_id: int, length: int) -> None:
        """As HiddenDrafter.fork."""

    def finish(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The sample has ended or paused; its prompt and output."""

    def discard(self, seq_id: int) -> None:
        """The sample was aborted or failed."""

    def new_policy(self, label: str) -> None:
        """The target has new weights, of this version."""
