"""A weight update that arrives in pieces: announced and checked whole, then copied as the tensors come.

Knows weights, neither requests nor steps. From the first piece to the last the weights are a mixture of two policies,
and Weights.invalid says so: nobody may step until `finish`, or until a full update if the stream goes wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.sources import check_tensor, gathered
from tlt_engine.models.weights import LoadReport, Weights


class WeightStream:
    """names, shapes: of all tensors to come, in any order; refused as Weights.check refuses them, before anything
    changes. strict: as in update_weights."""

    def __init__(self, weights: Weights, names: Sequence[str], shapes: Sequence[Sequence[int]], strict: bool) -> None:
        if len(names) != len(shapes):
            raise refuse("shapes", f"one a name ({len(names)})", len(shapes), "match the lengths")
        if len(set(names)) < len(names):
            twice = [name for name, count in Counter(names).items() if count > 1]
            raise refuse("names", "each name once", twice, "drop the repeats")
        self._weights = weights
        self._shapes = {name: tuple(shape) for name, shape in zip(names, shapes)}
        self.report: LoadReport = weights.check(self._shapes, strict=strict)
        self._wanted = set(self.report.loaded)
        self._come: set[str] = set()
        self._before = weights.invalid
        self._failed = False

    def take(self, pieces: Any) -> None:
        """Copy a mapping, pairs or an iterator of (name, tensor). Raises ValueError at the first one that was not
        announced so, or came before; the weights then stay invalid."""
        if self._failed:
            raise self._deviation("no more pieces after one that was refused", "another piece")
        self._failed = True
        items = pieces.items() if hasattr(pieces, "items") else pieces
        self._weights.copy(self._checked(items))
        self._weights.wait()
        self._failed = False

    def finish(self) -> None:
        """All pieces are in place."""
        left = sorted(self._wanted - self._come)
        if left or self._failed:
            self._failed = True
            raise self._deviation(f"all {len(self._wanted)} announced tensors", f"{len(left)} missing: {left[:6]}")
        self._weights.invalid = self._before if self.report.missing else None

    def _checked(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in items:
            if name not in self._shapes:
                raise self._deviation("the names announced", repr(name))
            if name in self._come:
                raise self._deviation("each tensor once", f"{name!r} again")
            check_tensor(name, value)
            if tuple(value.shape) != self._shapes[name]:
                raise self._deviation(f"{name} {list(self._shapes[name])}", f"{list(value.shape)}")
            self._come.add(name)
            if name in self._wanted:
                self._weights.invalid = "a streamed update of the weights is under way, or broke off"
                yield name, gathered(value)

    @staticmethod
    def _deviation(expected: str, got: str) -> ValueError:
        return ValueError(
            f"weights: expected {expected}, got {got}; the weights are invalid until a full update: call "
            "start_weight_update again, or update_weights with the whole set"
        )


def check_dtypes(dtypes: Sequence[str | torch.dtype] | None, names: Sequence[str]) -> None:
    """Announced dtypes must be floating-point ones; values are cast to the model's own."""
    if dtypes is None:
        return
    if len(dtypes) != len(names):
        raise refuse("dtypes", f"one a name ({len(names)})", len(dtypes), "match the lengths")
    for name, dtype in zip(names, dtypes):
        found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise refuse(f"dtypes[{name}]", "a floating-point dtype such as 'bfloat16'", dtype, "dequantize it first")
