"""Checkpoints of named tensors, written beside the training. Knows neither models nor optimisers.

`save` takes a snapshot and returns; a thread writes it into a hidden folder, syncs it to disk and renames it, so a
folder with a checkpoint's name is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse

TENSORS, DATA = "tensors.safetensors", "state.json"


class CheckpointWriter:
    """folder: made if absent. keep: newest checkpoints that stay, older ones are deleted.

    On CUDA the snapshot goes to pinned memory on a stream of its own, and `before_update` makes the next change of the
    tensors wait for it, on the device; on the CPU `save` copies them."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise refuse("keep", "at least 1 checkpoint", keep, "raise it")
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._snapshot: dict[str, Tensor] = {}
        self._copied: Any = None  # CUDA event behind the snapshot
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stalls: list[float] = []
        self._writes: list[float] = []

    def save(self, step: int, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> float:
        """Seconds until the caller may go on. Waits for the write before it; raises what that one raised."""
        start = perf_counter()
        self.wait()
        self._take_snapshot(tensors)
        name = f"step-{step:08d}"
        self._thread = threading.Thread(target=self._write, args=(name, dict(data), self._copied), name=f"save {name}")
        self._thread.start()
        self._stalls.append(perf_counter() - start)
        return self._stalls[-1]

    def before_update(self) -> None:
        """Call before the tensors of the last `save` change."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Until the last checkpoint is on disk. Raises if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"checkpoint: expected to write into {self.folder}, got {error!r}; the ones before it "
                               "are whole") from error

    def stats(self) -> dict[str, float]:
        """saves, and milliseconds: stall_ms and write_ms of the last, stall_ms_total of all."""
        return {
            "saves": len(self._stalls), "stall_ms": 1000 * (self._stalls or [0.0])[-1],
            "stall_ms_total": 1000 * sum(self._stalls), "write_ms": 1000 * (self._writes or [0.0])[-1],
        }

    @torch.no_grad()
    def _take_snapshot(self, tensors: Mapping[str, Tensor]) -> None:
        same = {n: (t.shape, t.dtype) for n, t in self._snapshot.items()} == {
            n: (t.shape, t.dtype) for n, t in tensors.items()
        }
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        if not same:
            with torch.inference_mode(False):
                self._snapshot = {
                    n: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for n, t in tensors.items()
                }
        if device is None:
            for name, tensor in tensors.items():
                self._snapshot[name].copy_(tensor)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._snapshot[name].copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _write(self, name: str, data: dict[str, Any], copied: Any) -> None:
        try:
            start = perf_counter()
            if copied is not None:
                copied.synchronize()
            self._write_folder(name, data)
            self._writes.append(perf_counter() - start)
        except BaseException as error:  # it belongs to the thread that trains, which meets it in wait()
            self._error = error

    def _write_folder(self, name: str, data: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        part, final = self.folder / f".{name}.part", self.folder / name
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_file(self._snapshot, part / TENSORS)
        (part / DATA).write_text(json.dumps(data))
        for file in (part / TENSORS, part / DATA):
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(final)
        os.rename(part, final)
        for old in checkpoints(self.folder)[: -self.keep]:
            shutil.rmtree(old)


def checkpoints(folder: str | Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    return sorted(p for p in Path(folder).glob("step-*") if (p / DATA).is_file())


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, data) of the newest checkpoint."""
    from safetensors.torch import load_file

    found = checkpoints(folder)
    if not found:
        raise refuse("checkpoint", "a folder with checkpoints step-*", str(folder), "save one first")
    return load_file(found[-1] / TENSORS), json.loads((found[-1] / DATA).read_text())
