"""What an engine holds on its device and when it may run: weight updates, sleep, pause. RolloutEngine builds on it.

Knows no prompts and no outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch
from torch import Tensor

from tlt_engine.config import EngineConfig, refuse
from tlt_engine.engine.core import EngineCore
from tlt_engine.engine.fair import FairLock
from tlt_engine.engine.sample import CallInsideStep, Request
from tlt_engine.engine.sleep import Storages
from tlt_engine.engine.stops import Stop
from tlt_engine.engine.weight_stream import WeightStream, check_dtypes
from tlt_engine.kvcache.prefix import PrefixCache
from tlt_engine.models import LoadReport, Transformer
from tlt_engine.speculation.learned import EagleDrafter

TAGS = {"weights": ("weights", "drafter"), "kv_cache": ("kv_cache",)}  # what each tag of wake_up wakes
InFlight = Literal["recompute", "keep", "abort"]


class EngineHalted(RuntimeError):
    """The engine sleeps, is paused, or has no valid weights; the message says which call changes that."""


class Resident:
    config: EngineConfig
    model: Transformer
    _core: EngineCore
    _prefix: PrefixCache | None

    def __init__(self) -> None:
        self._lock = FairLock()
        # Notified when a reason of _halted(), or a request, has gone.
        self._may_run = threading.Condition(self._lock)  # type: ignore[arg-type]
        self._stepping = False
        self._paused = False
        self._draining = 0  # calls of pause_generation("wait") under way
        self._asleep: dict[str, Storages] = {}  # "weights", "drafter", "kv_cache"
        self._falling_asleep = False
        self._stream: WeightStream | None = None
        self._updates = 0
        self._loads = 0
        self._fingerprint = ""
        self._before_work: Callable[[], None] | None = None
        self._before_sleep: Callable[[], None] | None = None

    def before_work(
        self, callback: Callable[[], None] | None, before_sleep: Callable[[], None] | None = None
    ) -> None:
        """Call this before requests are queued and before weights change or go to sleep, so that whoever uses the
        device meanwhile (a drafter's training) can leave it; and before_sleep behind it when the engine falls asleep,
        so that he gives back memory of his own. From the caller's thread, inside the engine's lock: neither may call
        the engine. One at a time; None takes both away."""
        with self._lock:
            if callback is not None and self._before_work is not None:
                raise refuse("before_work", "one callback at a time", callback, "take the other away with None first")
            self._before_work, self._before_sleep = callback, before_sleep

    def _announce_work(self) -> None:
        if self._before_work is not None:
            self._before_work()

    # ---------------------------------------------------------------- weights

    @property
    def weight_version(self) -> str:
        """The label of the weights that the next tokens are drawn under; a count until update_weights gives one."""
        return self._core.version

    @property
    def weights_usable(self) -> bool:
        """Whether the target's weights are whole and on the device, and are to stay there. For who computes with them
        besides the engine; without the lock: look again in the callback of before_work."""
        return not self._falling_asleep and "weights" not in self._asleep and self.model.weights.invalid is None

    @property
    def _weights(self) -> str:
        """Identity of the weights: the caller's label and a fingerprint, so that equal labels in two engines do not
        hide different weights."""
        return f"{self._core.version}:{self._fingerprint}"

    def update_weights(
        self, weights: Any, *, weight_version: str | int | None = None, strict: bool = True,
        in_flight: InFlight = "recompute",
    ) -> LoadReport | None:
        """Copy new target weights in place, cast to the model's dtypes. Addresses do not move, so CUDA graphs stay
        valid; cached prefixes are dropped.

        weights: a mapping, pairs or an iterator of (Hugging Face name, tensor), a transformers model, a folder of
        safetensors, or a WeightSource (rl.policy.PolicyWeights is one). Validated whole before anything changes;
        ValueError lists every missing, unknown and misshapen name. A sharded DTensor is gathered one at a time.
        Between start_weight_update and finish_weight_update: the next pieces of that stream (weight_version is given to
        finish_weight_update then, and None is returned).
        weight_version labels later tokens; default: a count. strict=False takes a subset; the report names what was
        loaded, missing, unexpected and cast.
        in_flight: requests that have begun keep their tokens and go on in a new noise segment, with their KV computed
        again under the new weights ("recompute") or kept as it is, of mixed policies ("keep"); or they end ("abort").
        """
        if in_flight not in ("recompute", "keep", "abort"):
            raise refuse("in_flight", "'recompute', 'keep' or 'abort'", in_flight, "pick one")
        with self._lock:
            self._refuse_inside_step("update_weights")
            self._refuse_without_memory("update_weights")
            self._announce_work()
            if self._stream is not None:
                self._stream.take(weights)
                return None
            report = self.model.load_weights(weights, strict=strict)
            self._take_new_weights(weight_version, in_flight)
            return report

    def start_weight_update(
        self, names: Seq[str], shapes: Seq[Seq[int]], dtypes: Seq[str | torch.dtype] | None = None, *,
        strict: bool = True,
    ) -> LoadReport:
        """Announce tensors that will come in pieces through update_weights, for sets too large to hold at once. Names
        and shapes are validated whole; nothing has changed yet. From the first piece to finish_weight_update no step
        runs. A stream that deviates leaves the weights invalid, and every call that needs them refuses, until a full
        update; calling this again drops an unfinished stream."""
        with self._lock:
            self._refuse_inside_step("start_weight_update")
            self._refuse_without_memory("start_weight_update")
            check_dtypes(dtypes, names)
            self._stream = WeightStream(self.model.weights, names, shapes, strict)
            return self._stream.report

    def finish_weight_update(
        self, weight_version: str | int | None = None, *, in_flight: InFlight = "recompute"
    ) -> LoadReport:
        """All announced pieces have come: the new weights go live. ValueError names those that have not."""
        with self._lock:
            if self._stream is None:
                raise refuse("finish_weight_update", "a stream begun by start_weight_update", None, "start one")
            stream, self._stream = self._stream, None
            stream.finish()
            self._take_new_weights(weight_version, in_flight)
            return stream.report

    def weight_checksums(self) -> dict[str, str]:
        """{Hugging Face name: 16 hex digits} over the bytes as they are stored. Reads all weights once."""
        with self._lock:
            self._refuse_without_memory("weight_checksums")
            return self.model.weights.checksums()

    def _take_new_weights(self, weight_version: str | int | None, in_flight: InFlight = "recompute") -> None:
        """The target's weights have changed: what was computed under the old ones is not used again. If it fails here,
        the next step begins with it anew, as `loads` still differ."""
        core = self._core
        fingerprint = self.model.weights.fingerprint()
        core.version = str(weight_version) if weight_version is not None else _count_up(core.version)
        self._updates += 1
        self._fingerprint = fingerprint
        core.target_changed(recomputed=in_flight != "keep")
        core.scheduler.set_version(self._updates)
        if in_flight != "keep":
            core.scheduler.recompute_all()
        for sample in list(core.samples.values()):
            if sample.internal or in_flight == "abort":
                core.end(sample, Stop("abort", "the weights changed meanwhile"))
            elif sample.output.token_ids:
                sample.seq.segment += 1
        self._loads = self.model.weights.loads
        self._may_run.notify_all()

    # ---------------------------------------------------------------- sleep

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: weights (level 1: kept in host memory, pinned on CUDA; level 2: discarded, so
        that waking needs a full update_weights), KV, CUDA graphs and their buffers, a learned drafter's weights (kept
        on the host at both levels) and K and V. Requests in flight stay queued and are recomputed after wake_up. Asleep
        in part, it falls asleep whole; level 2 drops an unfinished weight stream. A model shared with another engine is
        refused: it would pull the weights from under that one. If the host has no memory the error is raised and no
        value is lost; what sleeps by then (is_sleeping) wakes by wake_up."""
        if level not in (1, 2):
            raise refuse("level", "1 (weights kept on the host) or 2 (weights discarded)", level, "pick one")
        with self._lock:
            self._refuse_inside_step("sleep")
            if len(self.model.users) > 1:
                raise refuse("sleep", "a model of this engine alone", f"{len(self.model.users)} engines on it",
                             "give each its own, or let the others go first (del, then gc.collect())")
            self._falling_asleep = True
            try:
                self._announce_work()
                if self._before_sleep is not None:
                    self._before_sleep()
                self._fall_asleep(level)
            finally:
                self._falling_asleep = False

    def _fall_asleep(self, level: int) -> None:
        core = self._core
        core.forget_ahead()
        core.scheduler.recompute_all()
        if self._prefix is not None:
            self._prefix.reset()
        core.runner.release_graphs()
        working = [core.runner.kv.data, *core.runner.graph_buffers()]
        if isinstance(core.drafter, EagleDrafter):
            core.drafter.target_changed(recomputed=True)
            drafter, recomputed = core.drafter.device_tensors()
            self._offload("drafter", drafter, keep=True)
            working += recomputed
        self._offload("weights", (*dict(self.model.named_weights()).values(), self.model.weights.head), level == 1)
        if level == 2:
            self._asleep["weights"].forget()
            self.model.weights.invalid = "sleep(2) discarded them"
            self._stream = None
        self._offload("kv_cache", working, keep=False)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _offload(self, part: str, tensors: Iterable[Tensor], keep: bool) -> None:
        if part not in self._asleep:
            storages = Storages(tensors)
            storages.offload(keep=keep)
            self._asleep[part] = storages

    def wake_up(self, tags: Seq[str] | None = None) -> None:
        """Take the memory back: all of it, or what `tags` names ("weights", a learned drafter's among them, and
        "kv_cache"), for a trainer that sends weights before there is room for the KV. After sleep(1) the same tokens as
        before; CUDA graphs are captured again at first use."""
        if isinstance(tags, str):
            raise refuse("tags", f"a list with some of {tuple(TAGS)}", tags, "wrap it in a list")
        wanted = tuple(TAGS if tags is None else tags)
        for tag in wanted:
            if tag not in TAGS:
                raise refuse("tags", f"some of {tuple(TAGS)}", tag, "leave it out")
        with self._lock:
            for part in (part for tag in wanted for part in TAGS[tag]):
                if (storages := self._asleep.get(part)) is not None:
                    storages.restore()  # out of memory: it stays asleep, and can be woken later
                    del self._asleep[part]
            self._may_run.notify_all()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    # ---------------------------------------------------------------- pause

    def pause_generation(self, mode: Literal["abort", "wait", "keep"] = "keep", *, clear_cache: bool = False) -> None:
        """No step runs after this returns, until resume_generation. "abort": requests in flight end with what they
        have. "wait": they run to their ends first; requests that come meanwhile are held like those that come later.
        "keep": they stay where they are; calls of other threads wait. clear_cache: forget cached prefixes too."""
        if mode not in ("abort", "wait", "keep"):
            raise refuse("mode", "'abort', 'wait' or 'keep'", mode, "pick one")
        with self._lock:
            self._refuse_inside_step("pause_generation")
            if mode == "abort":
                for sample in list(self._core.samples.values()):
                    self._core.end(sample, Stop("abort"))
            requests = {id(s.request): s.request for s in self._core.samples.values()} if mode == "wait" else {}
            self._draining += 1
        try:
            while not self._drained(requests, clear_cache):
                pass  # without the lock: other threads' calls take their turns
        finally:
            with self._lock:
                self._draining -= 1

    def resume_generation(self) -> None:
        with self._lock:
            self._paused = False
            self._may_run.notify_all()

    def _drained(self, requests: dict[int, Request], clear_cache: bool) -> bool:
        """One step for these requests, or the pause if none of them is left."""
        with self._lock:
            if any(id(sample.request) in requests for sample in self._core.samples.values()):
                if (reason := self._halted()) is not None:
                    raise EngineHalted(f"pause_generation: expected requests that can run to their ends, but {reason}")
                self._step()
                return False
            self._paused = True
            if clear_cache and self._prefix is not None:
                self._prefix.reset()
            return True

    # ---------------------------------------------------------------- may it run?

    def _step(self) -> None:
        raise NotImplementedError

    def _halted(self) -> str | None:
        """Why no step may run now."""
        if self._asleep:
            return f"it sleeps without its {' and '.join(self._asleep)}; call wake_up()"
        if self.model.weights.invalid is not None:
            return f"its weights are invalid: {self.model.weights.invalid}; call update_weights with the whole set"
        if self._paused:
            return "generation is paused; call resume_generation()"
        return None

    def _refuse_halted(self, method: str) -> None:
        reason = "generation is being paused; wait for it" if self._draining else self._halted()
        if reason is not None:
            raise EngineHalted(f"{method}: expected an engine that may run, but {reason}")

    def _refuse_without_memory(self, method: str, part: str = "weights") -> None:
        if part in self._asleep:
            raise EngineHalted(f"{method}: expected {part} on the device, but the engine sleeps; call wake_up() first")

    def _refuse_inside_step(self, method: str) -> None:
        """A logits processor or a drafter runs in the middle of a step, whose work would be overtaken. Other threads
        wait for the step's end at the lock and never see this."""
        if self._stepping:
            raise CallInsideStep(
                f"{method}: expected a call between steps, got one from a callback inside a step; make it after step() "
                "or generate() has returned, or from another thread"
            )


def _count_up(version: str) -> str:
    return str(int(version) + 1) if version.isdigit() else f"{version}+1"
