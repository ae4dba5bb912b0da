"""Weights from a policy that FSDP2 has sharded over real processes: every rank's engine gets the whole of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.engines import plain_outputs
from tests.engine.sharded import PROMPTS
from tlt_engine import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_ranks_of_an_fsdp2_policy_roll_out_its_tokens(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
               "-m", "tests.engine.sharded", str(tmp_path)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    params = SamplingParams(max_tokens=16, seed=5)
    old, new = (plain_outputs(PROMPTS, params, model_seed=seed) for seed in (3, 9))
    assert old != new
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told.pop("sharded") > 10, "each rank holds a part of most weights only"
        assert told == {"before": old, "state_dict": new, "model": new, "pairs": new}
