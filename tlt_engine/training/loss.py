"""The drafter's loss: unrolled on its own outputs, against the target's own distribution. Knows neither optimisers nor
buffers.

Shape legend: R packed rows, S unroll steps, H drafter hidden, Ht target hidden, V / Vd target and draft vocabulary,
C rows of a chunk.

Training-time test is EAGLE-3's (arXiv 2503.01840, section 3); forming the gradient of a large-vocabulary loss chunk by
chunk in the forward pass is Liger-Kernel's idea (arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tlt_kernels.reference.rope import rotate
from tlt_kernels.soft_loss import row_stats, soft_cross_entropy
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.eagle import EagleModel
from tlt_engine.models.rope import rope_tables
from tlt_engine.training.attention import unroll_attention
from tlt_engine.training.packing import PackedRows

FEATURES = ("none", "l1", "smooth_l1")


@dataclass(frozen=True)
class LossConfig:
    """steps: unroll depth; decay: weight of step s is decay ** s. features: optional loss between the drafter's output
    and the target's last hidden state that it stands in for (eagle1: behind the final norm), with feature_weight.
    chunk_elements: logits held at once; at 2^26 the loss needs about 1 GB beside the model, whatever the batch.

    Recipes: EAGLE-3 and SpecForge take 7 steps and decay 0.8, speculators 3 and 1.0, EAGLE-1 one step, smooth_l1
    with 10 times the weight of the cross-entropy."""

    steps: int = 7
    decay: float = 0.8
    features: str = "none"
    feature_weight: float = 1.0
    chunk_elements: int = 2**26

    def __post_init__(self) -> None:
        if self.steps < 1 or self.decay <= 0 or self.chunk_elements < 1:
            raise refuse("LossConfig", "steps >= 1, decay > 0 and chunk_elements >= 1",
                         (self.steps, self.decay, self.chunk_elements), "enlarge them")
        if self.features not in FEATURES:
            raise refuse("LossConfig.features", f"one of {', '.join(FEATURES)}", self.features, "pick one")

    def weights(self) -> list[float]:
        return [self.decay**s for s in range(self.steps)]


@dataclass(frozen=True)
class LossSums:
    """Sums over rows for each unroll step, fp32 [S], detached; divide by rows (a fraction of 0 rows is 0, see
    `means`).

    rows: trained rows. cross_entropy and entropy: of the teacher, in nats, over the draft vocabulary; their difference
    is the KL divergence. agreement: rows whose drafter's best token is the target's best of all. overlap:
    sum_v min(p, q) over the draft vocabulary, the acceptance bound of one draft under p/q rejection. masked: the
    target's probability outside the draft vocabulary. feature: of the feature loss, 0 without one."""

    rows: Tensor
    cross_entropy: Tensor
    entropy: Tensor
    agreement: Tensor
    overlap: Tensor
    masked: Tensor
    feature: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    def means(self) -> dict[str, list[float]]:
        rows = self.rows.clamp_min(1)
        names = [n for n in self.__dataclass_fields__ if n != "rows"]
        return {n: (getattr(self, n) / rows).tolist() for n in names}


class Objective:
    """The loss of one drafter. Rope tables are built once, for the drafter's positions and its unroll."""

    def __init__(self, model: EagleModel, config: LossConfig | None = None) -> None:
        self.model, self.config = model, config or LossConfig()
        length = model.config.max_position_embeddings + self.config.steps
        self._cos, self._sin = rope_tables(model.config.rope, length, model.device)
        self._weights = torch.tensor(self.config.weights(), device=model.device)

    def unroll(self, packed: PackedRows) -> list[Tensor]:
        """Outputs [R, H] before the final norm of steps 0 .. S - 1. Row r of step s is the draft of depth s behind
        entry r; rows whose token lies behind their sequence's end hold numbers without meaning."""
        model, c = self.model, self.model.config
        rows = torch.arange(len(packed), device=packed.tokens.device)
        window = packed.longest + self.config.steps if c.window is None else c.window
        window = min(window, packed.longest + self.config.steps)  # a longer band would hold masked keys only
        hidden, kept, outs = model.fuse(packed.aux), [], []
        for step in range(self.config.steps):
            tokens = packed.tokens[torch.minimum(rows + step + 1, packed.ends)]
            inputs, residual = model.enter(F.embedding(tokens, model.embedding), hidden)
            q, k, v = model.qkv_rows(inputs)
            positions = packed.positions + step
            cos, sin = self._cos[positions].to(q.dtype), self._sin[positions].to(q.dtype)
            kept.append((rotate(k, cos, sin), v))
            attended = unroll_attention(
                rotate(q, cos, sin), kept[0], kept[1:], packed.starts, window=window, scale=c.head_dim**-0.5
            )
            hidden = model.finish(attended, residual)
            outs.append(hidden)
        return outs

    def counts(self, packed: PackedRows) -> Tensor:
        """fp32 [S]: trained rows of each step."""
        return torch.stack([packed.trained(s).sum() for s in range(self.config.steps)]).float()

    def __call__(self, packed: PackedRows, counts: Tensor | None = None) -> tuple[Tensor, LossSums]:
        """(loss, sums). The loss is sum_s decay^s * (sum over rows of step s) / counts[s]; counts fp32 [S] default to
        this batch's own, pass those of all micro-steps together to accumulate over several. Without a trained row the
        loss is 0 and so are its gradients."""
        counts = self.counts(packed) if counts is None else counts
        scales = torch.where(counts > 0, self._weights / counts.clamp_min(1), 0.0)
        outs = self.unroll(packed)
        states = torch.stack([self.model.final(out) for out in outs])
        teacher = Teacher.of(self.model)
        loss, rows, cross_entropy, entropy, agreement, overlap, masked = _SoftCrossEntropy.apply(
            states, self.model.head_weight, packed, teacher, scales, self.config.chunk_elements
        )
        feature = torch.zeros_like(counts)
        if self.config.features != "none":
            added, feature = self._features(packed, outs, scales)
            loss = loss + self.config.feature_weight * added
        return loss, LossSums(rows, cross_entropy, entropy, agreement, overlap, masked, feature)

    def _features(self, packed: PackedRows, outs: list[Tensor], scales: Tensor) -> tuple[Tensor, Tensor]:
        c = self.model.config
        if c.hidden_size != c.target_hidden_size:
            raise refuse("LossConfig.features", "'none' for a drafter of another width than its target",
                         self.config.features, "there is nothing to compare with")
        goal = Teacher.of(self.model).normed(packed.last) if c.kind == "eagle1" else packed.last
        compare = F.l1_loss if self.config.features == "l1" else F.smooth_l1_loss
        sums = []
        for step, out in enumerate(outs):
            trained = packed.trained(step)[: -step - 1]
            each = compare(out[: -step - 1].float(), goal[step + 1 :].float(), reduction="none").mean(-1)
            sums.append((each * trained).sum())
        stacked = torch.stack(sums)
        return (stacked * scales).sum(), stacked.detach()


@dataclass(frozen=True)
class Teacher:
    """The target's distribution from its last hidden state. norm [Ht], head [V, Ht]: the target's own, by reference;
    ids int64 [Vd]: the target ids of a reduced draft vocabulary, ascending, or None."""

    norm: Tensor
    eps: float
    head: Tensor
    ids: Tensor | None

    @staticmethod
    def of(model: EagleModel) -> Teacher:
        weights = model.target.weights
        return Teacher(weights.norm, model.target.config.rms_norm_eps, weights.head, model.target_ids)

    def normed(self, last: Tensor) -> Tensor:
        wide = last.float()
        return self.norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(last.dtype)

    def __call__(self, last: Tensor) -> TeacherRows:
        """last [C, Ht]."""
        logits = F.linear(self.normed(last).to(self.head.dtype), self.head)
        norm, entropy, best = row_stats(logits)
        if self.ids is None:
            return TeacherRows(logits, norm, entropy, best, torch.zeros_like(norm))
        inside = logits[:, self.ids]
        kept, entropy, _ = row_stats(inside)
        return TeacherRows(inside, kept, entropy, best, -torch.expm1(kept - norm))


@dataclass(frozen=True)
class TeacherRows:
    """logits [C, Vd]; norm fp32 [C], their logsumexp: p = exp(logits - norm) is renormalised over the draft vocabulary;
    entropy of p [C]; best [C], the target's best id of all; masked [C], its probability outside the draft vocabulary.
    """

    logits: Tensor
    norm: Tensor
    entropy: Tensor
    best: Tensor
    masked: Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over steps and rows of scales[s] * H(p, q). Goes through the teacher's rows in chunks: a chunk's teacher is
    computed once for all steps, and what is kept of its logits is the gradient for the states and the head."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, packed: PackedRows, teacher: Teacher, scales: Tensor, elements: int
    ) -> tuple[Tensor, ...]:
        steps = len(states)
        wants_states, wants_head = ctx.needs_input_grad[:2]
        grad_states = torch.zeros_like(states) if wants_states else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if wants_head else None
        sums = torch.zeros(6, steps, device=states.device)  # in the order of LossSums
        all_rows = torch.arange(len(packed), device=states.device)
        size = max(1, elements // max(teacher.head.shape[0], len(head)))
        for first in range(1, len(packed), size):  # row 0 can only be somebody's input
            rows = all_rows[first : first + size]
            p = teacher(packed.last[rows])
            for step in range(steps):
                skip = max(step + 1 - first, 0)  # their outputs would stand before row 0
                if skip >= len(rows):
                    continue
                at = slice(first + skip - step - 1, first + len(rows) - step - 1)
                trained = ((all_rows[at] >= packed.starts[rows[skip:]]) & packed.usable[at]).float()
                x = states[step, at].to(head.dtype)
                grad = F.linear(x, head)  # the logits, which soft_cross_entropy turns into their gradient
                crossed, overlap, guess = soft_cross_entropy(
                    grad, p.logits[skip:], p.norm[skip:], scales[step] * trained
                )
                guess = guess if teacher.ids is None else teacher.ids[guess]
                each = (torch.ones_like(trained), crossed, p.entropy[skip:], (guess == p.best[skip:]).float(), overlap,
                        p.masked[skip:])
                sums[:, step] += torch.stack(each) @ trained
                if grad_states is not None:
                    grad_states[step, at] = (grad @ head).to(states.dtype)
                    if grad_head is not None:
                        grad_head += grad.T @ x
        ctx.save_for_backward(grad_states, None if grad_head is None else grad_head.to(head.dtype))
        outputs = ((sums[1] * scales).sum(), *sums.unbind())
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_head = ctx.saved_tensors
        scaled = [None if g is None else g * grad_loss.to(g.dtype) for g in (grad_states, grad_head)]
        return (*scaled, None, None, None, None)
