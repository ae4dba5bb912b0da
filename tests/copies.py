"""Targets and drafters that know them exactly, by construction.

Two targets can be copied by one EAGLE-3 layer without loss. Both need embeddings of one length, so that a norm is a
multiplication by one number.

bigram: all layers of the target write nothing, so the next token depends on the last one alone: logits = head(norm(e)).
    The drafter's window is its own entry, and its attention a linear map of [norm(e'), norm(h)]: it adds e' and takes h
    away, which leaves e' on the residual stream, at every depth.
attention: the last layer of the target, with a window of its own, attends to the first half of the features and writes
    to the second, which alone the head reads. The drafter's layer is that layer; what stands in the first half of its
    residual stream (the embedding of the token before) has the same length, and the norm sees no difference. Exact at
    depth 1: below, the second half is not empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.tiny import tiny_hf_model
from tlt_engine.models.config import ModelConfig
from tlt_engine.models.eagle import EagleConfig, EagleModel

HIDDEN, VOCAB, WINDOW = 32, 64, 8


@torch.no_grad()
def silent(model: Any, scale: float) -> Any:
    """A target whose layers write nothing, whose norms are 1 and whose embeddings have length sqrt(HIDDEN)."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
    model.model.norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.sign_()
    model.lm_head.weight.mul_(scale)
    return model


@torch.no_grad()
def bigram() -> tuple[Any, EagleModel]:
    target = silent(tiny_hf_model(num_hidden_layers=3, rms_norm_eps=1e-8), scale=2.0)
    config = EagleConfig.for_target(
        ModelConfig.from_hf(target.config), window=1, num_kv_heads=4, aux_layers=(0, 1, 3)
    )
    drafter = EagleModel(config)
    eye = torch.eye(HIDDEN)
    drafter.fc.copy_(torch.cat((0 * eye, 0 * eye, eye), 1))
    drafter.qkv[2 * HIDDEN :].copy_(torch.cat((eye, -eye), 1))  # v; a lone key has all the weight
    drafter.o.copy_(eye)
    return target, drafter


@torch.no_grad()
def attention() -> tuple[Any, EagleModel]:
    half = HIDDEN // 2
    target = tiny_hf_model("mistral", num_hidden_layers=3, rms_norm_eps=1e-8, sliding_window=WINDOW)
    last = {name: p.clone() for name, p in target.model.layers[-1].self_attn.named_parameters()}
    target = silent(target, scale=5.0)
    target.model.embed_tokens.weight[:, half:] = 0
    target.lm_head.weight[:, :half] = 0
    own = target.model.layers[-1].self_attn
    own.o_proj.weight.copy_(last["o_proj.weight"])
    own.o_proj.weight[:half] = 0
    config = EagleConfig.for_target(ModelConfig.from_hf(target.config), window=WINDOW, aux_layers=(0, 1, 2))
    drafter = EagleModel(config)
    drafter.fc.copy_(torch.cat((torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)), 1))
    layer = torch.cat([getattr(own, f"{n}_proj").weight for n in "qkv"])
    drafter.qkv.copy_(torch.cat((layer, torch.zeros_like(layer)), 1))
    drafter.o.copy_(own.o_proj.weight)
    return target, drafter


def reduced(drafter: EagleModel, target: Any, ids: Tensor) -> EagleModel:
    """The same drafter with a head of its own over these target ids."""
    small = EagleModel(replace(drafter.config, draft_vocab_size=len(ids)))
    small.set_vocabulary(ids.sort().values)
    own = dict(small.named_tensors())
    copied = {**own, **dict(drafter.named_tensors()), "lm_head.weight": target.lm_head.weight[ids.sort().values]}
    small.copy_from({name: tensor.detach() for name, tensor in copied.items()})
    return small
