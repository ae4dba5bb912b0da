"""The drafter in the loop: it learns from the rollouts' own hidden states, in time that the device would sit idle.

    adaptive = AdaptiveDrafter(engine)
    ... engine.generate(...)             # hidden states of committed tokens go into the buffer
    adaptive.train_drafter(budget_s=5)   # between two phases; or
    with adaptive.on_idle():             # the caller's own work elsewhere: train beside it
        ...

Knows when to train, not how (training/) nor what is drafted (speculation/). TLT's idea (arXiv 2511.16665, section 5): a
drafter that follows the moving policy at no cost, as the tail of a rollout leaves devices idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from tlt_engine.config import refuse
from tlt_engine.engine.engine import RolloutEngine
from tlt_engine.engine.resident import EngineHalted
from tlt_engine.engine.sleep import Storages
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.gate import GateConfig, TrainingGate
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig


@dataclass(frozen=True)
class AdaptiveConfig:
    """buffer_bytes: host memory for hidden states, oldest out. capture: share of samples that are kept.
    gate: whether train_drafter trains at all this time (the default trains always; see GateConfig for "decline").
    publish_every: optimiser steps between two swaps of a longer training; the end of one swaps too.
    slice_ms: how long a piece of training may keep a request waiting that arrives meanwhile.
    while_decoding: train on a device that is rolling out. Off by default: it then waits for the device to be idle.
    decoding_share: of that time, the most that training may take; in between it waits."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    gate: GateConfig = field(default_factory=lambda: GateConfig(mode="always"))
    buffer_bytes: int = 2 * 2**30
    capture: float = 1.0
    publish_every: int = 50
    slice_ms: float = 20.0
    while_decoding: bool = False
    decoding_share: float = 0.02

    def __post_init__(self) -> None:
        if self.publish_every < 1 or self.slice_ms <= 0:
            raise refuse("AdaptiveConfig", "publish_every >= 1 and slice_ms > 0",
                         (self.publish_every, self.slice_ms), "raise them")
        if not 0 < self.decoding_share <= 1:
            raise refuse("decoding_share", "a number in (0, 1]", self.decoding_share, "leave it at 0.02, or lower it")


class AdaptiveDrafter:
    """engine: with SpeculationConfig(method="learned"). What is trained is a copy; it goes live between steps, under a
    version "<engine weight version>.<optimiser steps>". Training is given up within one micro-step when a request
    arrives or weights change, and goes on where it was at the next call. When the engine falls asleep, the copy and the
    optimiser's states go to host memory; they come back when `trainer` or `model` is asked for, or training goes on.

    train_drafter and on_idle may be called from one thread at a time."""

    @torch.inference_mode(False)  # what is made in an inference mode could not be trained
    def __init__(self, engine: RolloutEngine, config: AdaptiveConfig | None = None) -> None:
        self.engine, self.config = engine, config or AdaptiveConfig()
        serving = engine.drafter
        if not isinstance(serving, EagleDrafter):
            raise refuse("engine", "an engine with SpeculationConfig(method='learned')",
                         engine.config.speculation.method, "build it with a drafter")
        target, shape = engine.model, serving.model.config
        self.buffer = HiddenStateBuffer(
            shape.aux_layers, target.config.num_layers, shape.target_hidden_size, byte_budget=self.config.buffer_bytes,
            dtype=target.dtype, device=target.device, capture=self.config.capture,
        )
        model = EagleModel(shape, dtype=target.dtype, device=target.device)
        model.copy_from(serving.model)
        self._trainer = DrafterTrainer(model.bind(target), self.buffer, self.config.trainer)
        self._asleep: Storages | None = None
        self.gate = TrainingGate(self.config.gate)
        self._published = 0  # optimiser steps of the version that serves
        self._wanted = threading.Event()  # somebody waits for the device
        self._slice = threading.RLock()  # held while a piece of training runs
        self._idle_s = self._trained_s = 0.0
        self._phase = (0, 0)  # tokens and passes of the engine when the gate was asked last
        engine.record_hidden(self.buffer)
        engine.before_work(self._give_way, self._fall_asleep)

    @property
    def trainer(self) -> DrafterTrainer:
        with self._slice:
            if self._asleep is not None:
                self._asleep.restore()
                self._asleep = None
            return self._trainer

    @property
    def model(self) -> EagleModel:
        """The copy that is trained."""
        return self.trainer.model

    def close(self) -> None:
        """No more recording; the drafter that serves stays."""
        self._give_way()
        self.engine.stop_recording(self.buffer)
        self.engine.before_work(None)

    # ---------------------------------------------------------------- when to train

    def train_drafter(self, budget_s: float, *, gated: bool = True) -> dict[str, Any]:
        """Train for at most budget_s seconds, or until a request arrives, and let the result go live. gated: ask the
        gate first. Returns plain numbers: trained (did it), optimiser steps, seconds, loss and agreement of the last
        step, version, and what the gate saw. EngineHalted if the engine's weights sleep or are invalid."""
        self._refuse_without_weights("train_drafter")
        length = self._accept_length()
        if gated and not self.gate.decide(length):
            return self._report({}, False, 0.0, length)
        self._wanted.clear()
        began = time.perf_counter()
        last = self._train_until(began + budget_s)
        spent = time.perf_counter() - began
        self._idle_s += spent
        self._publish()
        return self._report(last, bool(last), spent, length)

    @contextmanager
    def on_idle(self) -> Iterator[None]:
        """The caller says that this device is idle within the block: train in a thread until the block ends or a
        request arrives or the engine falls asleep. An error of the training is raised at the end of the block.
        EngineHalted if the engine's weights sleep or are invalid."""
        self._refuse_without_weights("on_idle")
        self._wanted.clear()
        began, failed = time.perf_counter(), []

        def train() -> None:
            try:
                self._train_until(float("inf"))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=train, name="tlt-drafter-training", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._wanted.set()
            thread.join()
            self._idle_s += time.perf_counter() - began
            if not failed:
                self._publish()
        if failed:
            raise failed[0]

    @property
    def idle_share_used(self) -> float:
        """Seconds of training over the seconds that it was offered."""
        return self._trained_s / self._idle_s if self._idle_s else 0.0

    # ---------------------------------------------------------------- inside

    def _train_until(self, deadline: float) -> dict[str, Any]:
        """Pieces of slice_ms; the last one's report. Stops when the buffer has nothing to train on."""
        last: dict[str, Any] = {}
        beside = _Allowance(self.config.decoding_share)
        while not self._wanted.is_set() and (left := deadline - time.perf_counter()) > 0:
            if not self.engine.has_unfinished():
                beside.reset()
            elif not self.config.while_decoding:
                break
            elif (pause := beside.pause(self.config.slice_ms / 1000)) > 0:
                self._wanted.wait(min(pause, left))
                continue
            with self._slice:
                if self._wanted.is_set() or not self.engine.weights_usable:
                    break
                began = time.perf_counter()
                report = self.trainer.step(min(self.config.slice_ms, left * 1000))
                spent = time.perf_counter() - began
            self._trained_s += spent
            beside.spend(spent)
            if not report["micro_steps"]:
                break
            last = report
            if self._trainer.steps - self._published >= self.config.publish_every:
                self._publish()
        return last

    def _give_way(self) -> None:
        """The engine's call before work arrives or weights change: the device is free when it returns."""
        if not self.config.while_decoding:
            self._wanted.set()
        with self._slice:
            pass

    def _fall_asleep(self) -> None:
        """The engine's call behind the one above."""
        with self._slice:
            if self._asleep is None:
                self._trainer.release_scratch()
                asleep = Storages(self._trainer.tensors())
                asleep.offload(keep=True)
                self._asleep = asleep

    def _refuse_without_weights(self, method: str) -> None:
        if not self.engine.weights_usable:
            raise EngineHalted(f"{method}: expected the target's weights on the device and valid, which the drafter "
                               "learns from; call wake_up(), and update_weights if they were discarded")

    def _publish(self) -> None:
        if (steps := self._trainer.steps) > self._published and self.engine.weights_usable:
            with suppress(EngineHalted):  # it has fallen asleep this moment: next time
                self.engine.update_drafter(self.model, version=f"{self.engine.weight_version}.{steps}")
                self._published = steps

    def _accept_length(self) -> float | None:
        """Of the passes since it was asked last; None when nothing was drafted."""
        spec = self.engine.spec_counts
        tokens, passes = spec.emitted - self._phase[0], spec.passes - self._phase[1]
        self._phase = (spec.emitted, spec.passes)
        return tokens / passes if passes and spec.drafted else None

    def _report(self, last: dict[str, Any], trained: bool, spent: float, length: float | None) -> dict[str, Any]:
        serving = self.engine.drafter
        assert isinstance(serving, EagleDrafter)
        return {
            "trained": trained, "steps": self._trainer.steps, "seconds": spent, "accept_length": length,
            "version": serving.version, "idle_share_used": self.idle_share_used,
            "loss": last.get("loss"), "agreement": last.get("agreement"),
        }


class _Allowance:
    """Time for training beside decoding: never more than `share` of the time since the decoding was first seen."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.reset()

    def reset(self) -> None:
        self._since: float | None = None
        self._spent = 0.0

    def pause(self, wanted: float) -> float:
        """Seconds to wait until a piece of `wanted` seconds is allowed."""
        now = time.perf_counter()
        self._since = now if self._since is None else self._since
        return (self._spent + wanted) / self._share - (now - self._since)

    def spend(self, seconds: float) -> None:
        self._spent += seconds
