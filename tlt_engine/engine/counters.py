"""The engine's counters and what stats() makes of them. Every figure is a count of something that happened."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tlt_engine.outputs import SpecCounts

KEPT_STEPS = 8192  # an engine runs for weeks: the curve must not grow with it; copying so many takes stats() 30 us
ACCEPT_LENGTH = "accept_length = emitted tokens / decode passes: committed tokens a target pass, bonus token included"


@dataclass
class Counters:
    """A pass is one request in one target forward; a step is one forward of the packed batch.

    running_per_step: samples that decoded or prefilled in each of the last KEPT_STEPS steps: the tail's curve.
    audit_checked, audit_differing: samples re-decoded without speculation, and those whose tokens differed.
    """

    steps: int = 0
    prefill_passes: int = 0
    prefill_tokens: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)
    finished: dict[str, int] = field(default_factory=dict)
    running_per_step: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    audit_checked: int = 0
    audit_differing: int = 0

    def as_dict(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "steps": self.steps,
            "passes": spec.passes + self.prefill_passes,
            "decode_passes": spec.passes,
            "prefill_passes": self.prefill_passes,
            "rows": spec.rows + self.prefill_tokens,
            "decode_rows": spec.rows,
            "prefill_tokens": self.prefill_tokens,
            "emitted_tokens": spec.emitted,
            "drafted_tokens": spec.drafted,
            "accepted_tokens": spec.accepted,
            "drafted_per_position": list(spec.drafted_per_position),
            "accepted_per_position": list(spec.accepted_per_position),
            "accept_length": spec.accept_length,
            "accept_length_without_bonus": spec.accepted / spec.passes if spec.passes else 0.0,
            "accept_length_definition": ACCEPT_LENGTH,
            "finished": dict(self.finished),
            "running_per_step": list(self.running_per_step),
            "audit": {"checked": self.audit_checked, "differing": self.audit_differing},
        }
