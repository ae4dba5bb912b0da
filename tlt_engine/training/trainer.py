"""Trains the drafter from a hidden-state buffer, in micro-steps between which it can be stopped.

Knows neither the engine nor the scheduler, and touches nothing of the caller's: no grad mode, no random state, no
`.grad` of anybody's tensor. What a run computes depends on its seed, its step number and the buffer's content.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import cos, pi
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.eagle import EagleModel
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.captured import FIELDS, CapturedGradients
from tlt_engine.training.checkpoint import CheckpointWriter, read_checkpoint
from tlt_engine.training.loss import LossConfig, LossSums, Objective
from tlt_engine.training.muon import update_matrix
from tlt_engine.training.packing import PackedRows, pack_pieces
from tlt_engine.training.records import DrawPolicy

RECENT = 8  # micro-steps whose longest is what the next one is expected to take
MOMENTS = ("exp_avg", "exp_avg_sq")
Batch = tuple[PackedRows, int, int]  # sequences in it that can be trained on, and that could not be


@dataclass(frozen=True)
class TrainerConfig:
    """lr, betas, eps, weight_decay: AdamW's. muon_lr: the layer's matrices go by Muon at this rate, with the same decay
    (None: by AdamW). clip: largest norm of a step's gradient. Both rates rise over warmup_steps and stay, or fall by a
    cosine to a tenth at decay_steps. micro_rows: packed rows of a micro-step; accumulate: micro-steps of an optimiser
    step. freeze_embedding: leave a drafter's own embedding as it is (the target's always is). capture: on CUDA, full
    micro-steps of a drafter with a window replay a CUDA graph. seed: of what is drawn from the buffer.

    Defaults are SpecForge's; EAGLE-3 took lr 5e-5, fastrl trains online at 1e-6, verl-SpeCo at 1e-5."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_lr: float | None = None
    clip: float = 0.5
    warmup_steps: int = 20
    decay_steps: int | None = None
    micro_rows: int = 4096
    accumulate: int = 1
    freeze_embedding: bool = True
    capture: bool = True
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)
    draw: DrawPolicy = field(default_factory=DrawPolicy)

    def __post_init__(self) -> None:
        for name, least in (("micro_rows", 2), ("accumulate", 1), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                raise refuse(f"TrainerConfig.{name}", f"an integer >= {least}", getattr(self, name), "raise it")
        for name in ("lr", "clip", "muon_lr"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise refuse(f"TrainerConfig.{name}", "a positive number", getattr(self, name), "raise it")

    def lr_at(self, step: int) -> float:
        """Of the optimiser step with this number, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.lr
        done = min((step - self.warmup_steps) / max(self.decay_steps - self.warmup_steps, 1), 1.0)
        return self.lr * (0.1 + 0.45 * (1 + cos(pi * done)))


@dataclass(frozen=True)
class MicroStep:
    """What one did. grad_norm: None unless it ended an optimiser step."""

    samples: int
    rows: int
    loss: float
    sums: LossSums
    grad_norm: float | None


class DrafterTrainer:
    """model: a drafter bound to its target, of the target's dtype; it is trained in place, so the one that serves is
    another instance that is copied to (EagleModel.copy_from). In bf16 or fp16 the optimiser works on fp32 masters.
    lr_factor: the caller's, on top of the config's schedule, at any time: to cool down over minutes instead of steps.

    Not thread-safe but for pause and resume, which any thread may call."""

    def __init__(self, model: EagleModel, buffer: HiddenStateBuffer, config: TrainerConfig | None = None) -> None:
        self.model, self.buffer, self.config = model, buffer, config or TrainerConfig()
        self._check_fit()
        self.objective = Objective(model, self.config.loss)
        frozen = ("embed",) if self.config.freeze_embedding else ()
        self._named = {n: p for n, p in model.named_parameters() if n not in frozen}
        with torch.inference_mode(False), torch.no_grad():
            self._masters = {
                n: p.detach() if p.dtype == torch.float32 else p.detach().float() for n, p in self._named.items()
            }
            self._grads = {n: torch.zeros_like(m) for n, m in self._masters.items()}
            self._moments = {k: {n: torch.zeros_like(m) for n, m in self._masters.items()} for k in MOMENTS}
        self.lr_factor = 1.0
        self.steps = 0  # optimiser steps done
        self._micro = 0  # micro-steps since the last one
        self._times: list[float] = []
        self._counts = dict.fromkeys(("starved", "empty_steps", "not_finite_steps", "dropped_samples"), 0)
        self._running = threading.Event()
        self._running.set()
        self._writer: CheckpointWriter | None = None
        self._ahead: tuple[tuple[int, int, int], Batch] | None = None
        self._side: Any = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._captured = None
        if self.config.capture and model.device.type == "cuda":
            self._captured = CapturedGradients(self.objective, list(self._named.values()), self.config.micro_rows)

    def _check_fit(self) -> None:
        c, b, t = self.model.config, self.buffer, self.model.target
        ours = (c.aux_layers, t.config.num_layers, c.target_hidden_size, t.dtype)
        theirs = (b.aux_layers, b.last_layer, b.hidden_size, b.dtype)
        if ours != theirs:
            raise refuse("buffer", f"aux layers, last layer, hidden size, dtype {ours} of the drafter", theirs,
                         "build it for this drafter and target")

    def tensors(self) -> Iterator[Tensor]:
        """All that it keeps on the device between steps: weights, fp32 masters, gradients, moments."""
        yield from (t.detach() for t in (*self.model.parameters(), *self.model.buffers()))
        for kept in (self._masters, self._grads, *self._moments.values()):
            yield from kept.values()

    # ---------------------------------------------------------------- running

    def step(self, budget_ms: float | None = None) -> dict[str, Any]:
        """Micro-steps until the next one would not fit the budget (at least one, so a budget may be overrun by one);
        without a budget, up to the end of an optimiser step. Returns what this call did, see `_report`. Ends early when
        paused or when the buffer has nothing to train on."""
        done: list[MicroStep] = []
        start, before = perf_counter(), self.steps
        while self._running.is_set() and self._fits(start, budget_ms, len(done), before):
            began = perf_counter()
            with torch.inference_mode(False), torch.enable_grad():
                micro = self._micro_step()
            if micro is None:
                break
            done.append(micro)
            self._times = [*self._times[1 - RECENT :], perf_counter() - began]
        return self._report(perf_counter() - start, done)

    def _fits(self, start: float, budget_ms: float | None, done: int, before: int) -> bool:
        if budget_ms is None:
            return self.steps == before
        left = budget_ms / 1000 - (perf_counter() - start)
        return left > 0 and (done == 0 or max(self._times) <= left)

    def _report(self, elapsed: float, done: list[MicroStep]) -> dict[str, Any]:
        """Plain numbers. steps, starved, empty_steps, not_finite_steps, dropped_samples: since the trainer was made
        (not restored by a resume, but for steps). loss: mean over micro-steps; the lists have one entry an unroll
        step (LossSums). grad_norm: of the last optimiser step of the call, before clipping."""
        samples, rows = sum(m.samples for m in done), sum(m.rows for m in done)
        seconds = elapsed if done else 1.0
        report: dict[str, Any] = {
            "steps": self.steps, "micro_steps": len(done), "elapsed_ms": elapsed * 1000, "samples": samples,
            "tokens": rows, "samples_per_s": samples / seconds, "tokens_per_s": rows / seconds,
            "paused": not self._running.is_set(), "lr": self.lr_factor * self.config.lr_at(max(self.steps - 1, 0)),
            **self._counts,
        }
        if done:
            sums = sum((m.sums for m in done[1:]), done[0].sums)
            norms = [m.grad_norm for m in done if m.grad_norm is not None]
            report |= {"loss": sum(m.loss for m in done) / len(done), "grad_norm": norms[-1] if norms else None,
                       "rows": sums.rows.tolist(), **sums.means()}
        return report

    def pause(self) -> None:
        """`step` returns behind its current micro-step, and at once when called, until resume()."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def _micro_step(self) -> MicroStep | None:
        """One packed row forward and backward, and the optimiser step if it is the last of its window. None when the
        buffer is empty."""
        c = self.config
        batch = self._batch(self.steps, self._micro)
        if batch is None:
            self._counts["starved"] += 1
            return None
        packed, good, dropped = batch
        self._counts["dropped_samples"] += dropped
        loss, sums, grads = self._gradients(packed)
        with torch.no_grad():
            for total, grad in zip(self._grads.values(), grads):
                if grad is not None:
                    total.add_(grad.float(), alpha=1 / c.accumulate)
            self._micro += 1
            ends = self._micro == c.accumulate
            if self._side is not None:  # the host packs the next batch while the device computes
                self._prefetch(*((self.steps + 1, 0) if ends else (self.steps, self._micro)))
            norm = self._update() if ends else None
        # item() waits for the device, so that time spent is time measured.
        return MicroStep(good, len(packed), loss.item(), sums, norm)

    def _batch(self, step: int, micro: int) -> Batch | None:
        """What was packed ahead for this micro-step, under the policy that still is, or what is drawn now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != (step, micro, self.buffer.policies):
            return self._draw(step, micro)
        stream = torch.cuda.current_stream(self.model.device)
        stream.wait_stream(self._side)
        for name in FIELDS:
            getattr(ahead[1][0], name).record_stream(stream)
        return ahead[1]

    def _prefetch(self, step: int, micro: int) -> None:
        policies = self.buffer.policies
        with torch.cuda.stream(self._side):
            batch = self._draw(step, micro)
        self._ahead = None if batch is None else ((step, micro, policies), batch)

    def _draw(self, step: int, micro: int) -> Batch | None:
        c = self.config
        with self.buffer.draw(c.micro_rows, f"{c.seed}:{step}:{micro}", c.draw) as pieces:
            if not pieces:
                return None
            packed, good = pack_pieces(self.buffer, pieces, self.model.device)
        return packed, good, len(pieces) - good

    def _gradients(self, packed: PackedRows) -> tuple[Tensor, LossSums, tuple[Tensor | None, ...]]:
        if self._captured is not None and self._captured.fits(packed):
            return self._captured(packed)
        loss, sums = self.objective(packed)
        return loss, sums, torch.autograd.grad(loss, list(self._named.values()), allow_unused=True)

    def release_scratch(self) -> None:
        """Give back what `tensors` does not name: the captured micro-step, as much as the activations of one, and a
        batch that was packed ahead. Both come back with the next step."""
        self._ahead = None
        if self._captured is not None:
            self._captured.release()

    def _update(self) -> float:
        """On the masters. A gradient of zero or one that is not finite changes nothing."""
        c = self.config
        grads = list(self._grads.values())
        norm = torch.stack([g.norm() for g in grads]).norm().item()
        if norm > 0 and norm < float("inf"):
            if self._writer is not None:
                self._writer.before_update()
            self._descend(grads, min(1.0, c.clip / norm))
            for name, parameter in self._named.items():
                if parameter.dtype != torch.float32:
                    parameter.copy_(self._masters[name])
        else:
            self._counts["empty_steps" if norm == 0 else "not_finite_steps"] += 1
        torch._foreach_zero_(grads)
        self.steps += 1
        self._micro = 0
        return norm

    def _descend(self, grads: list[Tensor], scale: float) -> None:
        """scale: what clipping leaves of the gradients; Muon does not see their size."""
        torch._foreach_mul_(grads, scale)
        c, factor = self.config, self.lr_factor * self.config.lr_at(self.steps) / self.config.lr
        by_muon = {} if c.muon_lr is None else self._stacked
        for name, parts in by_muon.items():
            lr = factor * (c.muon_lr or 0.0)
            self._masters[name].mul_(1 - lr * c.weight_decay)
            update_matrix(self._masters[name], self._grads[name], self._moments[MOMENTS[0]][name], parts, lr)
        self._adamw([n for n in self._masters if n not in by_muon], factor * c.lr)

    def _adamw(self, names: list[str], lr: float) -> None:
        """AdamW (arXiv 1711.05101) on the masters of these parameters."""
        c, t, (b1, b2) = self.config, self.steps + 1, self.config.betas
        grads, masters = [self._grads[n] for n in names], [self._masters[n] for n in names]
        first, second = ([self._moments[k][n] for n in names] for k in MOMENTS)
        torch._foreach_lerp_(first, grads, 1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, grads, grads, 1 - b2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, (1 - b2**t) ** 0.5)
        torch._foreach_add_(denominators, c.eps)
        torch._foreach_mul_(masters, 1 - lr * c.weight_decay)
        torch._foreach_addcdiv_(masters, first, denominators, -lr / (1 - b1**t))

    @property
    def _stacked(self) -> dict[str, tuple[int, ...]]:
        """The layer's matrices, and the rows of those that lie stacked in one parameter."""
        c = self.model.config
        kv = c.num_kv_heads * c.head_dim
        return {"fc": (c.hidden_size,), "qkv": (c.num_heads * c.head_dim, kv, kv), "o": (c.hidden_size,),
                "gate_up": (c.intermediate_size, c.intermediate_size), "down": (c.hidden_size,)}

    # ---------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain data) of the last optimiser step; a window of micro-steps that is under way is not in it and
        is drawn again after a resume. The tensors are the trainer's own: copy them before the next step."""
        tensors = {f"master.{n}": m for n, m in self._masters.items()}
        for kind, moments in self._moments.items():
            tensors |= {f"{kind}.{n}": m for n, m in moments.items()}
        return tensors, {"steps": self.steps, "config": asdict(self.config)}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Continue from there. With the same buffer content and config the run goes on bit for bit on the CPU."""
        own, _ = self.state()
        wrong = sorted(set(own) ^ set(tensors)) or [n for n in own if own[n].shape != tensors[n].shape]
        if wrong:
            raise refuse("checkpoint", "the tensors of this trainer", wrong[:6], "build it for the same drafter")
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
            for name, parameter in self._named.items():
                parameter.copy_(self._masters[name])
            torch._foreach_zero_(list(self._grads.values()))
        self.steps, self._micro, self._ahead = int(data["steps"]), 0, None

    def save(self, writer: CheckpointWriter) -> float:
        """Starts a checkpoint; returns the seconds that it kept the caller."""
        self._writer = writer
        return writer.save(self.steps, *self.state())

    def load(self, folder: str) -> None:
        """From a folder that CheckpointWriter wrote: the newest checkpoint in it."""
        self.load_state(*read_checkpoint(folder))
