"""TRL with several processes, for real: an engine in each, the same rollouts as one process of the whole batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, processes: int, batch: int) -> list[dict[str, Any]]:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
    command = [sys.executable, *(launcher if processes > 1 else []), "tests/rl/ranks.py", str(folder), str(batch)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(processes)]


@pytest.mark.slow
def test_two_ranks_roll_out_what_one_process_would(tmp_path):
    alone = run(tmp_path / "one", 1, 12)[0]
    ranks = run(tmp_path / "two", 2, 6)  # the border of the ranks cuts a group of four
    assert [r["processes"] for r in ranks] == [2, 2] and alone["processes"] == 1
    assert ranks[0]["calls"][0] + ranks[1]["calls"][0] == alone["calls"][0]
    assert ranks[0]["checksums"] == ranks[1]["checksums"], "both have the same policy at the last step"
    for result in (alone, *ranks):
        assert len(result["differences"]) == 2 and all(d < 1e-4 for d in result["differences"])
