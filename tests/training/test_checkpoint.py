"""Checkpoints: whole or not there, the values of the moment of `save`, errors that reach the caller, a small stall."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tlt_engine.training import checkpoint
from tlt_engine.training.checkpoint import CheckpointWriter, checkpoints, read_checkpoint


def test_what_is_saved_is_what_stood_there_when_save_was_called(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    tensors = {"a": torch.arange(5.0), "b": torch.tensor([True, False])}
    writer.save(3, tensors, {"steps": 3})
    writer.before_update()
    tensors["a"].zero_()
    writer.wait()
    found, data = read_checkpoint(tmp_path)
    assert found["a"].tolist() == [0, 1, 2, 3, 4] and found["b"].tolist() == [True, False] and data == {"steps": 3}


def test_sabotage_a_snapshot_that_aliases_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = CheckpointWriter._write_folder

    def late(self: CheckpointWriter, name: str, data: dict[str, object]) -> None:
        assert gate.wait(30)
        real(self, name, data)

    def alias(self: CheckpointWriter, tensors: dict[str, torch.Tensor]) -> None:
        self._snapshot = dict(tensors)

    monkeypatch.setattr(CheckpointWriter, "_write_folder", late)
    for broken, expected in ((False, [1.0]), (True, [2.0])):
        gate.clear()
        if broken:
            monkeypatch.setattr(CheckpointWriter, "_take_snapshot", alias)
        writer = CheckpointWriter(tmp_path / str(broken))
        value = torch.tensor([1.0])
        writer.save(1, {"a": value}, {})
        value.fill_(2.0)
        gate.set()
        writer.wait()
        assert read_checkpoint(tmp_path / str(broken))[0]["a"].tolist() == expected


def test_the_newest_are_kept_and_a_half_written_one_is_none(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (1, 2, 10, 10):
        writer.save(step, {"a": torch.tensor([float(step)])}, {"steps": step})
    writer.wait()
    (tmp_path / ".step-00000011.part").mkdir()
    (tmp_path / "step-00000012").mkdir()  # a folder without its data file
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]
    assert read_checkpoint(tmp_path)[1] == {"steps": 10}


def test_an_error_of_the_thread_reaches_the_caller_and_leaves_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(1, {"a": torch.zeros(1)}, {"steps": 1})
    writer.wait()

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "rename", full)
        writer.save(2, {"a": torch.zeros(1)}, {"steps": 2})
        with pytest.raises(RuntimeError, match="no space left"):
            writer.wait()
    assert read_checkpoint(tmp_path)[1] == {"steps": 1}
    writer.save(3, {"a": torch.zeros(1)}, {"steps": 3})
    writer.wait()
    assert read_checkpoint(tmp_path)[1] == {"steps": 3}


def test_the_stall_is_less_than_the_write(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    tensors = {f"{i}": torch.ones(2**18) for i in range(16)}  # 16 MB
    writer.save(0, tensors, {})  # allocates the snapshot
    writer.wait()
    stall = writer.save(1, tensors, {})
    writer.wait()
    stats = writer.stats()
    assert stats["saves"] == 2 and stats["stall_ms"] == pytest.approx(1000 * stall)
    assert stats["stall_ms"] < stats["write_ms"]


def test_refusals_teach(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder with checkpoints"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="keep"):
        CheckpointWriter(tmp_path, keep=0)
