"""Whether to speculate at the present load. A simple policy, until speculation is chosen by measured speed.

Knows a number of samples and nothing else.
"""

from __future__ import annotations

HOLD = 4  # steps


class Elastic:
    """On while at most `below` samples run or wait (None: always). It switches, either way, only after HOLD steps in a
    row on the other side, so that a load around the threshold does not make every step another kind. The first step
    decides at once."""

    def __init__(self, below: int | None) -> None:
        self.below = below
        self.switches = 0
        self._on: bool | None = None if below is not None else True
        self._against = 0  # steps in a row that spoke for the other side

    @property
    def on(self) -> bool:
        return self._on is not False

    def step(self, load: int) -> bool:
        """Called once a step, with the samples that run or wait. Whether to speculate in it."""
        if self.below is None:
            return True
        wanted = load <= self.below
        if self._on is None:
            self._on = wanted
        self._against = self._against + 1 if wanted != self._on else 0
        if self._against == HOLD:
            self._on = wanted
            self._against = 0
            self.switches += 1
        return self._on
