"""The learned drafter's module: EAGLE-3's one decoder layer, or EAGLE-1's. The same module trains and serves.

Shape legend: R rows (entries), H drafter hidden, Ht target hidden, k aux layers, D head dimension, V / Vd target and
draft vocabulary. Knows neither requests nor caches, windows nor losses; attention between `qkv_rows` and `finish` is
the caller's.

An entry t is made of the target's hidden states at position t and the embedding of token x_{t+1}. It stands at rope
position t and predicts x_{t+2}. A draft of a draft takes the drafter's own output, before the final norm, in place of
the target's hidden states.

EAGLE-1: arXiv 2401.15077; EAGLE-3: arXiv 2503.01840. Names of tensors are SpecForge's, which SGLang and vLLM load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt_engine.config import refuse
from tlt_engine.models.config import ModelConfig, default_aux_layers
from tlt_engine.models.rope import RopeConfig
from tlt_engine.models.transformer import Transformer

KINDS = ("eagle3", "eagle1")


@dataclass(frozen=True)
class EagleConfig:
    """kind: "eagle3", which reads the hidden states `aux_layers` (numbered as StepOutputs.hidden), or "eagle1", which
    reads the last one after the target's final norm.

    draft_vocab_size: None takes the target's own head; a number gives the drafter a head of its own over that many
    target ids. window: entries that one attends to, itself included; None: all. max_position_embeddings: entries stand
    at positions below it. hidden_size other than target_hidden_size needs an embedding and a head of the drafter's own.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    aux_layers: tuple[int, ...]
    kind: str = "eagle3"
    draft_vocab_size: int | None = None
    window: int | None = 512

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise refuse("EagleConfig.kind", f"one of {', '.join(KINDS)}", self.kind, "pick one")
        sizes = ("hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                 "vocab_size", "max_position_embeddings")
        for name in sizes:
            if getattr(self, name) < 1:
                raise refuse(f"EagleConfig.{name}", "a positive integer", getattr(self, name), "enlarge it")
        if self.num_heads % self.num_kv_heads:
            raise refuse("EagleConfig.num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads,
                         "correct it")
        if self.window is not None and self.window < 1:
            raise refuse("EagleConfig.window", "None or at least 1", self.window, "None attends to everything")
        if self.rope.rotary_dim > self.head_dim:
            raise refuse("EagleConfig.rope", f"rotary_dim at most head_dim = {self.head_dim}", self.rope.rotary_dim,
                         "give the drafter a rope of its own")
        if self.rope.kind == "dynamic":
            raise refuse("EagleConfig.rope", "angles that do not depend on lengths", self.rope.kind,
                         "use kind 'default'")
        reduced = self.draft_vocab_size
        if reduced is not None and not 1 <= reduced <= self.vocab_size:
            raise refuse("EagleConfig.draft_vocab_size", f"None or an integer in [1, {self.vocab_size}]", reduced,
                         "None takes the target's own head")
        if not self.aux_layers or len(set(self.aux_layers)) != len(self.aux_layers) or min(self.aux_layers) < 0:
            raise refuse("EagleConfig.aux_layers", "distinct indices of hidden states", self.aux_layers,
                         "0 is the embedding, i the output of layer i - 1")
        if self.kind == "eagle1" and (len(self.aux_layers) != 1 or reduced is not None or self.own_embedding):
            raise refuse("EagleConfig.kind", "'eagle3' for several aux layers, a reduced vocabulary or another width",
                         self.kind, "eagle1 reads one hidden state and has the target's own head and width")
        if self.own_embedding and reduced is None:
            raise refuse("EagleConfig.draft_vocab_size", f"a number, as hidden_size {self.hidden_size} is not the "
                         f"target's {self.target_hidden_size}", None, "the target's head does not fit; give it its own")

    @property
    def own_embedding(self) -> bool:
        return self.hidden_size != self.target_hidden_size

    @property
    def inputs(self) -> int:
        """Features that the q, k and v products take."""
        return self.hidden_size if self.kind == "eagle1" else 2 * self.hidden_size

    @staticmethod
    def for_target(target: ModelConfig, **overrides: Any) -> EagleConfig:
        """A drafter with the target's own sizes. Rope is the plain one at the target's theta: a drafter that sees a
        window needs no scaling. overrides: fields of EagleConfig."""
        kind = overrides.get("kind", "eagle3")
        if "aux_layers" not in overrides:
            last = (target.num_layers,)
            overrides["aux_layers"] = last if kind == "eagle1" else default_aux_layers(target.num_layers)
        head_dim = overrides.get("head_dim", target.head_dim)
        config = EagleConfig(**{
            "hidden_size": target.hidden_size, "target_hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size, "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads, "head_dim": head_dim, "vocab_size": target.vocab_size,
            "rms_norm_eps": target.rms_norm_eps, "rope": RopeConfig(theta=target.rope.theta, rotary_dim=head_dim),
            "max_position_embeddings": target.context_limit, **overrides,
        })
        return replace(config, aux_layers=tuple(config.aux_layers))


class EagleModel(nn.Module):
    """Parameters: fc [H, k Ht] (eagle1: [H, 2 H]); input_norm (of the embedding), hidden_norm [H]; qkv [(Hq + 2 Hkv) D,
    2 H] (eagle1: H inputs, and neither norm); o [H, Hq D]; post_norm [H]; gate_up [2 I, H]; down [H, I]; norm [H];
    head [Vd, H]; embed [V, H]. norm is None for eagle1, head without a reduced vocabulary, embed unless the widths
    differ. Buffers of a reduced vocabulary: d2t int64 [Vd], target id = draft id + d2t[draft id]; t2d bool [V].

    Weights are zero and norms 1 until `initialise` or `copy_from`. `bind` gives it the target, whose embedding, head
    and final norm are used by reference, as they are when called: they are no parameters and in no checkpoint.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: EagleConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = c = config
        self._target: Transformer | None = None

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

        def norm() -> nn.Parameter:
            return nn.Parameter(torch.ones(c.hidden_size, dtype=dtype, device=device))

        eagle3 = c.kind == "eagle3"
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.fc = new(c.hidden_size, len(c.aux_layers) * c.target_hidden_size if eagle3 else 2 * c.hidden_size)
        self.input_norm = norm() if eagle3 else None
        self.hidden_norm = norm() if eagle3 else None
        self.qkv = new(q + 2 * kv, c.inputs)
        self.o = new(c.hidden_size, q)
        self.post_norm = norm()
        self.gate_up = new(2 * c.intermediate_size, c.hidden_size)
        self.down = new(c.hidden_size, c.intermediate_size)
        self.norm = norm() if eagle3 else None
        self.head = None if c.draft_vocab_size is None else new(c.draft_vocab_size, c.hidden_size)
        self.embed = new(c.vocab_size, c.hidden_size) if c.own_embedding else None
        if c.draft_vocab_size is not None:
            # The first Vd ids until set_vocabulary chooses better ones.
            self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64, device=device))
            self.register_buffer("t2d", torch.arange(c.vocab_size, device=device) < c.draft_vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.qkv.dtype

    @property
    def device(self) -> torch.device:
        return self.qkv.device

    # ---------------------------------------------------------------- values

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights: normal with variance 1 / inputs, the two that write to the residual stream at half of it;
        norms 1. The draws come from `generator` (a CPU one) and are the same on every device."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            scale = (0.5 if name in ("o", "down") else 1.0) / parameter.shape[1]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale**0.5)

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Behind `initialise` and `bind`, for EAGLE-3 at the target's width: take over the target's last layer, its
        attention on the hidden half of the input, and its final norm; fc passes the highest aux layer through. What the
        target has in other shapes, and what it lacks, keeps its draw, smaller where it writes to the residual stream.

        On SmolLM2-135M 166 optimiser steps then led to a cross-entropy of 4.39 nats, from random weights to 4.83."""
        c, weights = self.config, self.target.weights
        if self.hidden_norm is None or self.norm is None or c.own_embedding:
            raise refuse("start_from_target", "an eagle3 drafter at its target's width", c.kind, "initialise is enough")
        last, width = weights.layers[-1], c.hidden_size
        self.fc.mul_(0.3)
        self.fc[:, -width:] += torch.eye(width, dtype=self.dtype, device=self.device)
        self.norm.copy_(weights.norm)
        self.post_norm.copy_(last.post_norm)
        self.o.mul_(0.3)
        if self.qkv.shape[0] == last.qkv.shape[0] and self.o.shape == last.o.shape:
            self.hidden_norm.copy_(last.input_norm)
            self.qkv[:, width:] = last.qkv
            self.o.copy_(last.o)
        units = min(c.intermediate_size, last.down.shape[1])
        self.down.mul_(0.3)
        self.down[:, :units] = last.down[:, :units]
        for own, theirs in zip(self.gate_up.chunk(2), last.gate_up.chunk(2)):
            own[:units] = theirs[:units]

    @torch.no_grad()
    def set_vocabulary(self, target_ids: Tensor) -> None:
        """target_ids int64 [Vd], ascending: the target ids that the draft vocabulary stands for."""
        if self.head is None:
            raise refuse("set_vocabulary", "a drafter with draft_vocab_size", None, "it has the target's vocabulary")
        ids = target_ids.to(self.device)
        ascending = ids.dtype == torch.int64 and ids.shape == self.d2t.shape and bool((ids.diff() > 0).all())
        if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= self.config.vocab_size:
            raise refuse("target_ids", f"{len(self.d2t)} ascending int64 ids below {self.config.vocab_size}",
                         list(target_ids[:8]), "sort them and drop repeats")
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd], the target id of each draft id; None where they are the same."""
        return None if self.head is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(SpecForge's name, view of ours), d2t and t2d included. Writing to a view writes to the module."""
        c = self.config
        layer = "layers.0" if c.kind == "eagle1" else "midlayer"
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        yield "fc.weight", self.fc
        norms = {"input_layernorm": self.input_norm, "hidden_norm": self.hidden_norm,
                 "post_attention_layernorm": self.post_norm}
        for name, norm in norms.items():
            if norm is not None:
                yield f"{layer}.{name}.weight", norm
        for name, view in zip("qkv", self.qkv.split((q, kv, kv))):
            yield f"{layer}.self_attn.{name}_proj.weight", view
        yield f"{layer}.self_attn.o_proj.weight", self.o
        for name, view in zip(("gate", "up"), self.gate_up.split(c.intermediate_size)):
            yield f"{layer}.mlp.{name}_proj.weight", view
        yield f"{layer}.mlp.down_proj.weight", self.down
        if self.norm is not None:
            yield "norm.weight", self.norm
        if self.embed is not None:
            yield "embed_tokens.weight", self.embed
        if self.head is not None:
            yield "lm_head.weight", self.head
            yield "d2t", self.d2t
            yield "t2d", self.t2d

    @torch.no_grad()
    def copy_from(self, source: EagleModel | Mapping[str, Tensor]) -> None:
        """Copies all tensors in place, by SpecForge's names, casting floats. Validated whole before anything changes;
        ValueError lists what is missing, unknown or misshapen. Values are copied, never aliased."""
        given = dict(source.named_tensors()) if isinstance(source, EagleModel) else dict(source)
        own = dict(self.named_tensors())
        wrong = [f"{n} missing" for n in own if n not in given] + [f"{n} unknown" for n in given if n not in own]
        for name, tensor in own.items():
            value = given.get(name)
            if value is not None and value.shape != tensor.shape:
                wrong.append(f"{name} expected {list(tensor.shape)}, got {list(value.shape)}")
            elif value is not None and value.is_floating_point() != tensor.is_floating_point():
                wrong.append(f"{name} expected {tensor.dtype}, got {value.dtype}")
        if wrong:
            raise ValueError(f"drafter weights: expected this {self.config.kind} drafter's {len(own)} tensors, got "
                             f"{'; '.join(wrong[:6])}; build the drafter with their config (nothing was changed)")
        for name, tensor in own.items():
            tensor.copy_(given[name])

    # ---------------------------------------------------------------- the target

    def bind(self, target: Transformer) -> EagleModel:
        """Use this target's embedding, head and final norm, by reference. ValueError if it is not the drafter's."""
        c, t = self.config, target.config
        for name, own, theirs in (("vocab_size", c.vocab_size, t.vocab_size),
                                  ("target_hidden_size", c.target_hidden_size, t.hidden_size)):
            if own != theirs:
                raise refuse(f"EagleConfig.{name}", f"the target's {theirs}", own, "this drafter is another model's")
        target.check_capture(c.aux_layers)
        if target.dtype != self.dtype or target.device != self.device:
            raise refuse("drafter", f"the target's {target.dtype} on {target.device}", f"{self.dtype} on {self.device}",
                         "build it with the same dtype and device")
        self._target = target
        return self

    @property
    def target(self) -> Transformer:
        if self._target is None:
            raise refuse("EagleModel", "a drafter that knows its target", None, "call bind(target) first")
        return self._target

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return self.target.weights.embed if self.embed is None else self.embed

    @property
    def head_weight(self) -> Tensor:
        """[Vd or V, H], in the target's lm_head_dtype where it is the target's."""
        return self.target.weights.head if self.head is None else self.head

    @torch.no_grad()
    def copy_head(self) -> None:
        """Start the reduced head from the target's rows of those ids."""
        ids = self.target_ids
        if self.head is None or ids is None or self.config.own_embedding:
            raise refuse("copy_head", "a reduced vocabulary at the target's width", self.config.draft_vocab_size,
                         "there is nothing to copy")
        self.head.copy_(self.target.weights.head[ids])

    # ---------------------------------------------------------------- the layer

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [R, k Ht], the target's hidden states side by side -> the hidden input [R, H]. eagle1: the target's final
        norm."""
        if self.config.kind == "eagle1":
            return _rms_norm(aux, self.target.weights.norm, self.target.config.rms_norm_eps)
        return F.linear(aux, self.fc)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embeds [R, H] of the next tokens, hidden [R, H] from `fuse` or the parents' outputs -> what the q, k and v
        products take [R, inputs], and the residual stream [R, H]."""
        if self.input_norm is None or self.hidden_norm is None:
            x = F.linear(torch.cat((embeds, hidden), -1), self.fc)
            return x, x
        eps = self.config.rms_norm_eps
        normed = (_rms_norm(embeds, self.input_norm, eps), _rms_norm(hidden, self.hidden_norm, eps))
        return torch.cat(normed, -1), hidden

    def qkv_rows(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, Hq, D], k and v [R, Hkv, D] of entered rows, before the rotation."""
        c = self.config
        rows = F.linear(inputs, self.qkv).unflatten(-1, (-1, c.head_dim))
        q, k, v = rows.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), -2)
        return q, k, v

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended [R, Hq, D] or [R, Hq * D] -> the output [R, H], before the final norm: what the head reads after its
        norm, and what the next level takes as its hidden input."""
        x = residual + F.linear(attended.reshape(len(residual), -1), self.o)
        gate, up = F.linear(_rms_norm(x, self.post_norm, self.config.rms_norm_eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def final(self, out: Tensor) -> Tensor:
        """What the head reads [R, H] of outputs [R, H]: behind the final norm, where there is one."""
        return out if self.norm is None else _rms_norm(out, self.norm, self.config.rms_norm_eps)

    def logits(self, out: Tensor) -> Tensor:
        """[R, Vd or V] of outputs [R, H]."""
        head = self.head_weight
        return F.linear(self.final(out).to(head.dtype), head)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As tlt_kernels.norm, with a gradient."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
