"""Where the arrays of a step lie in the staging buffer, and how they are filled. Host work only; knows no graphs.

Shape legend: R rows, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from tlt_kernels import NoiseIds, PackedTrees
from tlt_kernels.backend import extension
from torch import Tensor

from tlt_engine.engine.packing import Lanes, PackedStep
from tlt_engine.engine.staging import Frame, Sections
from tlt_engine.speculation.tree import DraftTree
from tlt_engine.types import StepInputs

I64, I32, F32, U8 = torch.int64, torch.int32, torch.float32, torch.uint8


def frame_sections(requests: int, rows: int, decode_rows: int, pages: int) -> Sections:
    """The inputs of a pass and of the draw after it, in the order of csrc/cpu/step.h. depths, parents: of the
    draft trees; draws: position of the token drawn at a row."""
    return {
        "token_ids": ((rows,), I64), "positions": ((rows,), I64), "slots": ((rows,), I64),
        "ancestors": ((rows, 2), I64), "prefix_lens": ((requests,), I32), "node_indptr": ((requests + 1,), I32),
        "causal": ((requests,), U8), "keys": ((decode_rows,), I64), "draws": ((decode_rows,), I64),
        "samples": ((decode_rows,), I64), "segments": ((decode_rows,), I64), "temperature": ((decode_rows,), F32),
        "parents": ((decode_rows,), I32), "depths": ((decode_rows,), I32), "page_table": ((requests, pages), I32),
    }


@dataclass(frozen=True)
class DeviceView:
    """The decode rows of a step on the device: what the draw, the walk and the commit take."""

    inputs: StepInputs
    trees: PackedTrees
    ids: NoiseIds
    temperature: Tensor


class Layout:
    """Where the arrays of a step of one size lie. Rows beyond the step's own belong to nobody: their K and V go to
    `dummy_page`, which no request holds."""

    def __init__(self, frame: Frame, page_size: int, dummy_page: int) -> None:
        self.frame = frame
        d = frame.device
        self.inputs = StepInputs(
            d["token_ids"], d["positions"], d["slots"], d["page_table"], d["prefix_lens"], d["node_indptr"],
            d["ancestors"], d["causal"], logit_rows=d["positions"],  # as many as rows: all of them
        )
        self._page_size = page_size
        self._host = {name: torch.from_numpy(frame.host[name]) for name in frame.host}
        self._arrays = extension().StepArrays(
            [tensor.data_ptr() for tensor in self._host.values()], rows=len(d["token_ids"]),
            requests=len(d["prefix_lens"]), page=page_size, width=d["page_table"].shape[1], dummy_page=dummy_page,
        )
        self._view: DeviceView | None = None
        self._view_sizes: tuple[int, ...] = ()
        rows = len(d["token_ids"])
        self._pad_slots = dummy_page * page_size + np.arange(rows) % page_size

    def clear(self) -> None:
        """A step of padding alone."""
        self._pad(0, 0, 0)

    def fill(self, packed: PackedStep, ids: NoiseIds, temperature: np.ndarray) -> None:
        host, step = self.frame.host, packed.inputs
        requests, rows, drawn = len(step.prefix_lens), len(step.token_ids), packed.decode_rows
        for name in ("token_ids", "positions", "slots", "ancestors"):
            host[name][:rows] = getattr(step, name).numpy()
        for name in ("prefix_lens", "causal"):
            host[name][:requests] = getattr(step, name).numpy()
        keys = step.prefix_lens.numpy() + np.diff(step.node_indptr.numpy())
        columns = -(-int(keys.max(initial=0)) // self._page_size)  # behind them nothing is read
        host["page_table"][:requests, :columns] = step.page_table.numpy()[:, :columns]
        host["node_indptr"][: requests + 1] = step.node_indptr.numpy()
        for name in ("keys", "samples", "segments"):
            host[name][:drawn] = getattr(ids, name).numpy()
        host["draws"][:drawn] = ids.positions.numpy()
        host["temperature"][:drawn] = temperature
        host["parents"][:drawn], host["depths"][:drawn] = packed.trees.parents.numpy(), packed.trees.depths.numpy()
        self._pad(requests, rows, drawn)

    def _pad(self, requests: int, rows: int, drawn: int) -> None:
        host = self.frame.host
        if requests == len(host["prefix_lens"]) and rows == len(host["token_ids"]) and drawn == len(host["keys"]):
            return
        for name in ("token_ids", "positions", "ancestors"):
            host[name][rows:] = 0
        host["slots"][rows:] = self._pad_slots[rows:]
        for name in ("prefix_lens", "causal"):
            host[name][requests:] = 0
        host["node_indptr"][requests:] = rows
        for name in ("keys", "samples", "segments", "draws", "temperature", "parents", "depths"):
            host[name][drawn:] = 0

    def fill_decodes(self, trees: list[DraftTree], lanes: Lanes) -> tuple[int, int]:
        """fill(pack_step(...)) of a step without chunks, in one C++ call into the host arrays: the GPU waits for this
        before every verification. Returns rows and the depth of the deepest node."""
        return lanes.native.pack(trees, self._arrays)

    def packed(self, trees: Seq[DraftTree], rows: int) -> PackedStep:
        """What fill_decodes has filled in, on the host, for row_params; the inputs are the layout's."""
        host, n = self._host, len(trees)
        packed = PackedTrees(
            host["token_ids"][:rows], host["parents"][:rows], host["depths"][:rows], host["ancestors"][:rows],
            host["node_indptr"][: n + 1],
        )
        return PackedStep(self.inputs, packed, np.fromiter((len(t.tokens) for t in trees), np.int64, n), [])

    def view(self, *sizes: int) -> DeviceView:
        """The step's own part on the device, padding left out. sizes: requests, decode rows."""
        if self._view is None or self._view_sizes != sizes:
            self._view, self._view_sizes = self._make_view(*sizes), sizes
        return self._view

    def _make_view(self, requests: int, rows: int) -> DeviceView:
        d = self.frame.device
        trees = PackedTrees(
            d["token_ids"][:rows], d["parents"][:rows], d["depths"][:rows], d["ancestors"][:rows],
            d["node_indptr"][: requests + 1],
        )
        inputs = replace(
            self.inputs, page_table=d["page_table"][:requests], prefix_lens=d["prefix_lens"][:requests],
            node_indptr=trees.node_indptr,
        )
        ids = NoiseIds(d["keys"][:rows], d["draws"][:rows], d["samples"][:rows], d["segments"][:rows])
        return DeviceView(inputs, trees, ids, d["temperature"][:rows])
