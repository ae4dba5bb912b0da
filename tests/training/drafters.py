"""Small drafters, targets and packed rows for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tiny import tiny_target
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.transformer import Transformer
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.packing import PackedRows, pack
from tlt_engine.training.prefill import prefill


def tiny_drafter(
    target: Transformer, seed: int = 0, *, vocabulary: Sequence[int] | None = None, **config: Any
) -> EagleModel:
    """Random weights, norms included. vocabulary: target ids of a reduced draft vocabulary."""
    if vocabulary is not None:
        config["draft_vocab_size"] = len(vocabulary)
    model = EagleModel(EagleConfig.for_target(target.config, **config)).bind(target)
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if vocabulary is not None:
        model.set_vocabulary(torch.tensor(vocabulary))
    return model


def random_texts(lengths: Sequence[int], vocab: int = 64, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def states(target: Transformer, ids: Sequence[int], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(aux [n, k Ht], last [n, Ht]) of one text."""
    last = target.config.num_layers
    layers = tuple(dict.fromkeys((*aux_layers, last)))
    (done,) = prefill(target, [ids], layers, max_rows=len(ids))
    return torch.cat([done.hidden[i] for i in aux_layers], -1), done.hidden[last]


def packed_texts(
    target: Transformer, model: EagleModel, texts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None
) -> PackedRows:
    parts = [states(target, ids, model.config.aux_layers) for ids in texts]
    aux, last = (torch.cat(rows) for rows in zip(*parts))
    return pack([torch.tensor(ids) for ids in texts], aux, last, firsts or [0] * len(texts))


def filled_buffer(
    target: Transformer, model: EagleModel, texts: Sequence[Sequence[int]], byte_budget: int = 2**22
) -> HiddenStateBuffer:
    buffer = HiddenStateBuffer(
        model.config.aux_layers, target.config.num_layers, target.config.hidden_size, byte_budget=byte_budget,
        dtype=target.dtype, device=target.device,
    )
    buffer.fill(target, texts)
    return buffer


def gradients(model: EagleModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


__all__ = [
    "filled_buffer", "gradients", "packed_texts", "random_texts", "states", "tiny_drafter", "tiny_target",
]
