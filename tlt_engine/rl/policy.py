"""A trainer's policy as the engine wants it: Hugging Face names, whole tensors, adapters merged.

Knows wrappers (DDP, compile, PEFT) and LoRA, not engines. Nothing of the trainer's model is changed, so its base
weights stay what they are under LoRA; merged tensors exist one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.sources import gathered

WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel, torch.compile
INNER_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # around single layers: compile, activation checkpointing


class PolicyWeights:
    """The weights of a transformers model in training, for RolloutEngine.update_weights. model: the model itself, or
    wrapped by DDP, torch.compile or PEFT. LoRA layers come as base + sum of the active adapters' deltas, in the base
    weight's dtype; modules that PEFT trains whole (modules_to_save) come as trained. ValueError for adapters whose
    delta cannot be added (DoRA and the like) or is not all (lora_bias), and for LoRA on quantized weights."""

    def __init__(self, model: Any) -> None:
        self._model = unwrapped(model)
        self._holders: dict[str, tuple[Any, str]] = {}  # name -> (module, name of its parameter)
        for path, module in self._model.named_modules():
            for own, _ in module.named_parameters(recurse=False):
                if (name := _public_name(f"{path}.{own}" if path else own, self._model)) is not None:
                    self._holders[name] = (module, own)
        self._adapted = {
            name: layer for path, layer in self._model.named_modules() if hasattr(layer, "get_delta_weight")
            for name in [_public_name(f"{path}.base_layer.weight", self._model)] if name in self._holders
        }
        for name, layer in self._adapted.items():
            _check_adapter(name, layer)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(getattr(module, own).shape) for name, (module, own) in self._holders.items()}

    @torch.no_grad()
    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            module, own = self._holders[name]
            value = gathered(getattr(module, own).detach())
            layer = self._adapted.get(name)
            if layer is not None and not layer.disable_adapters and not layer.merged:
                for adapter in layer.active_adapters:
                    if adapter in _adapters(layer):
                        value = value + gathered(layer.get_delta_weight(adapter)).to(value.dtype)
            yield name, value


def unwrapped(model: Any) -> Any:
    """The transformers model inside DDP, torch.compile and PEFT."""
    while (inner := next((getattr(model, w) for w in WRAPPERS if hasattr(model, w)), None)) is not None:
        model = inner
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _public_name(path: str, model: Any) -> str | None:
    """The Hugging Face name of a parameter; None for what is not one of the model's own weights: an adapter's
    matrices, and of a module that PEFT trains whole the copy that is not in use."""
    if ".lora_" in path:
        return None
    if ".original_module." in path:
        wrapper = model.get_submodule(path.split(".original_module.")[0])
        trained = wrapper.active_adapters and not wrapper.disable_adapters
        return None if trained else _plain(path.replace(".original_module.", "."))
    if ".modules_to_save." in path:
        head, tail = path.split(".modules_to_save.")
        adapter, _, own = tail.partition(".")
        wrapper = model.get_submodule(head)
        active = adapter in wrapper.active_adapters[:1] and not wrapper.disable_adapters
        return _plain(f"{head}.{own}") if active else None
    return _plain(path.replace(".base_layer.", "."))


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in INNER_WRAPPERS)


def _adapters(layer: Any) -> set[str]:
    return {*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ())}


def _check_adapter(name: str, layer: Any) -> None:
    variants = [f"{kind} ({adapter})" for adapter, kind in getattr(layer, "lora_variant", {}).items()]
    if variants:
        raise refuse(f"adapter of {name}", "plain LoRA, whose delta is added to the weight", variants,
                     "merge it with PEFT's own merge_and_unload() and pass the merged model")
    biased = [adapter for adapter, trained in getattr(layer, "lora_bias", {}).items() if trained]
    if biased:
        raise refuse(f"adapter of {name}", "LoRA without lora_bias, which is no part of the weight", biased,
                     "train with lora_bias=False, or merge it with PEFT's own merge_and_unload()")
    if not layer.get_base_layer().weight.is_floating_point():
        raise refuse(f"base weight of {name}", "a floating-point tensor", str(layer.get_base_layer().weight.dtype),
                     "dequantize the base model for rollouts")
