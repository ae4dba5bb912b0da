"""Where weights come from: names and shapes first, so that the whole set can be checked, then one tensor at a time.

Knows neither models nor engines, and not what the names mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt_engine.config import refuse


class WeightSource(Protocol):
    """shapes: of every tensor it has, known before any of them is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), one at a time, each name once; the order may be the source's own."""


class InMemory:
    """Tensors that exist already, as a state_dict has them; never copied here. A sharded DTensor is gathered when its
    turn comes and dropped again: full_tensor() is collective, so all ranks must hold the same names in the same order.
    ValueError for what cannot be copied into a weight, found before anything has been."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in tensors.items():
            check_tensor(name, value)
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self._tensors.items()}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, gathered(self._tensors[name])) for name in names)


class Safetensors:
    """The safetensors files of a folder, single or sharded. Tensors are read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._files = _weight_map(folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        from safetensors import safe_open

        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as f:
                own = [n for n, at in self._files.items() if at == file]
                shapes.update({n: tuple(f.get_slice(n).get_shape()) for n in own})
        return shapes

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        wanted = list(names)
        for file in sorted({self._files[n] for n in wanted}):
            with safe_open(file, framework="pt") as f:
                yield from ((n, f.get_tensor(n)) for n in wanted if self._files[n] == file)


def weight_source(weights: Any) -> WeightSource:
    """A WeightSource as it is, a folder of safetensors, an in-memory transformers model, a mapping, or (name, tensor)
    pairs. An iterator of pairs is read to its end first: nothing can be checked whole before."""
    if hasattr(weights, "shapes") and hasattr(weights, "tensors"):
        return weights
    if isinstance(weights, (str, Path)):
        folder = Path(weights)
        if not folder.is_dir():
            raise refuse("weights", "an existing folder of safetensors", str(folder), "save the model there first")
        return Safetensors(folder)
    if hasattr(weights, "state_dict"):
        weights = weights.state_dict()
    try:
        return InMemory(weights if isinstance(weights, Mapping) else dict(weights))
    except (TypeError, ValueError) as error:
        if str(error).startswith("weights:"):
            raise
        raise refuse(
            "weights", "a mapping or pairs of (Hugging Face name, tensor), a transformers model or a folder",
            type(weights).__name__, f"pass model.state_dict(), for one ({error})",
        ) from error


def check_tensor(name: str, value: object) -> None:
    """Refuses what copy_ could not take, which would show only when half of the set is in place, or takes silently."""
    if not isinstance(value, Tensor):
        got = f"{type(value).__name__} for {name}"
        raise ValueError(f"weights: expected torch tensors, got {got}; convert it with torch.as_tensor")
    kind, remedy = "", ""
    if value.is_meta:
        kind, remedy = "meta tensor", "send one with data"
    elif value.layout != torch.strided:
        kind, remedy = f"{value.layout} tensor", "make it dense with to_dense()"
    elif not value.is_floating_point():
        kind, remedy = f"{value.dtype} tensor", "dequantize it"
    elif value.element_size() == 1:  # float8 means something only together with scales of its own
        kind, remedy = f"{value.dtype} tensor", "dequantize it with its scales"
    if kind:
        raise ValueError(f"weights: expected plain floating-point tensors, got a {kind} for {name}; {remedy} "
                         "(nothing was changed)")


def gathered(value: Tensor) -> Tensor:
    """The whole of a tensor that is sharded over ranks (torch.distributed.tensor.DTensor), any other as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. The index names the shards; without one, every safetensors file counts."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        absent = sorted({f for f in names.values() if not (folder / f).is_file()})
        if absent:
            raise refuse("model", f"all shards named in {index.name}", f"no {', '.join(absent)}", "download them")
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise refuse("model", "*.safetensors files", sorted(p.name for p in folder.iterdir()),
                     "save it with save_pretrained(folder, safe_serialization=True)")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as f:
            found.update(dict.fromkeys(f.keys(), file))
    return found
