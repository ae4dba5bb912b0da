"""When to train: decides from accept lengths and step numbers alone. Knows neither trainers nor engines."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_engine.config import refuse

MODES = ("decline", "interval", "always")


@dataclass(frozen=True)
class GateConfig:
    """mode: "decline" trains once the accept length has fallen by `decline` (a share) from its running best, until half
    of the fall is made good; "interval" every `every` RL steps; "always".

    patience: RL steps of training after which the best so far is given up for the present accept length, as a target
    that has become harder to predict never brings it back. Frozen drafters have held for tens of RL steps (marin#9114:
    2.53 to 2.56 over 36), so training all the time mostly wastes it."""

    mode: str = "decline"
    decline: float = 0.05
    every: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise refuse("GateConfig.mode", f"one of {', '.join(MODES)}", self.mode, "pick one")
        if not 0 < self.decline < 1:
            raise refuse("GateConfig.decline", "a share in (0, 1)", self.decline, "0.05 is a fall by 5 %")
        if self.every < 1 or self.patience < 1:
            raise refuse("GateConfig", "every and patience >= 1", (self.every, self.patience), "raise them")


class TrainingGate:
    """Ask once an RL step."""

    def __init__(self, config: GateConfig | None = None) -> None:
        self.config = config or GateConfig()
        self.best = 0.0
        self.training = False
        self._asked = 0
        self._trained = 0  # steps in a row

    def decide(self, accept_length: float | None) -> bool:
        """Train now? accept_length: measured in the last RL step, the bonus token included; None when nothing was
        drafted, which is no decline."""
        self._asked += 1
        if self.config.mode == "always":
            return True
        if self.config.mode == "interval":
            return self._asked % self.config.every == 0
        if accept_length is not None:
            self._judge(accept_length)
        return self.training

    def _judge(self, accept_length: float) -> None:
        self.best = max(self.best, accept_length)
        # A half-way line for stopping: at one line for both, noise around it would toggle the training every step.
        line = self.config.decline / 2 if self.training else self.config.decline
        self.training = accept_length < (1 - line) * self.best
        self._trained = self._trained + 1 if self.training else 0
        if self._trained > self.config.patience:
            self.best, self.training, self._trained = accept_length, False, 0
