"""A micro-step's forward and backward pass as one CUDA graph. Knows neither buffers nor optimisers.

The unroll launches some 250 small kernels a step and as many again backward. At 4096 rows, four steps and a target of
135M their launches took 35 ms on an H200's host, of which the device worked 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tlt_engine.models.eagle import EagleModel
from tlt_engine.training.loss import LossSums, Objective
from tlt_engine.training.packing import PackedRows

FILLED = 0.9  # share of the rows from which a batch is padded to the graph's size instead of run without it
FIELDS = ("tokens", "aux", "last", "positions", "starts", "ends", "usable")


class CapturedGradients:
    """The gradients of `objective` for batches of up to `rows` packed rows, of a drafter with a window. What the graph
    returns is overwritten by the next call. A graph is captured at the first call, and again when a tensor that it
    reads has moved (sleep, another target)."""

    def __init__(self, objective: Objective, parameters: Sequence[Tensor], rows: int) -> None:
        self.objective, self.parameters, self.rows = objective, list(parameters), rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: PackedRows | None = None
        self._result: tuple[Tensor, Tensor, tuple[Tensor | None, ...]] | None = None
        self._places: tuple[int, ...] = ()

    def fits(self, packed: PackedRows) -> bool:
        return self.objective.model.config.window is not None and FILLED * self.rows <= len(packed) <= self.rows

    def __call__(self, packed: PackedRows) -> tuple[Tensor, LossSums, tuple[Tensor | None, ...]]:
        """(loss, sums, a gradient for each parameter or None)."""
        if self._graph is None or self._places != self._where():
            self.release()
            self._static = padded(packed, self.rows)
            self._capture()
        else:
            assert self._static is not None
            fill(self._static, packed)
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        loss, sums, grads = self._result
        return loss, LossSums(*sums.clone()), grads

    def release(self) -> None:
        """The graph and its memory go; the next call captures another."""
        self._graph = self._static = self._result = None

    def _where(self) -> tuple[int, ...]:
        model, weights = self.objective.model, self.objective.model.target.weights
        read = (*model.parameters(), *model.buffers(), weights.embed, weights.head, weights.norm)
        return tuple(t.data_ptr() for t in read)

    def _capture(self) -> None:
        device = self.objective.model.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._run()  # compiles the kernels, and cuBLAS takes its workspace
        torch.cuda.current_stream(device).wait_stream(stream)
        self._places = self._where()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be decoding: what it does is no business of this capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._result = self._run()
        self._graph = graph

    def _run(self) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        assert self._static is not None
        with stand_ins(self.objective.model) as aliases:
            loss, sums = self.objective(self._static)
            inputs = [aliases[id(p)] for p in self.parameters]
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return loss.detach(), torch.stack([getattr(sums, n) for n in sums.__dataclass_fields__]), grads


@contextmanager
def stand_ins(model: EagleModel) -> Iterator[dict[int, Tensor]]:
    """Within the block the model computes with other leaves of the same storage, given by their parameters' ids. A
    parameter's own node in autograd lives as long as anybody's loss of it does, and belongs to the stream on which that
    was computed: met in a capture, it would break it."""
    own = dict(model._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                model._parameters[name] = nn.Parameter(parameter.detach())
        yield {id(p): model._parameters[n] for n, p in own.items() if p is not None}  # type: ignore[misc]
    finally:
        model._parameters.update(own)


def padded(packed: PackedRows, rows: int) -> PackedRows:
    """A copy with `rows` rows, the added ones sequences of their own that are not trained. Its window is the
    drafter's, whatever the longest sequence."""
    shapes = {n: getattr(packed, n) for n in FIELDS}
    new = {n: torch.zeros(rows, *t.shape[1:], dtype=t.dtype, device=t.device) for n, t in shapes.items()}
    static = replace(packed, **new, longest=rows)
    fill(static, packed)
    return static


def fill(static: PackedRows, packed: PackedRows) -> None:
    """In place; both of one drafter."""
    count, rows = len(packed), len(static)
    for name in FIELDS:
        getattr(static, name)[:count].copy_(getattr(packed, name))
    if count < rows:
        own = torch.arange(count, rows, device=static.starts.device)
        for name in FIELDS:
            getattr(static, name)[count:] = own if name in ("starts", "ends") else 0
