"""Runs triton_*_interpreted.py under Triton's interpreter, in a process of its own: TRITON_INTERPRET counts
when triton is first imported, and this process may have imported it for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton_attention_interpreted.py", "triton_invariant_interpreted.py"])
def test_kernels_under_the_interpreter(name: str) -> None:
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, env=clean | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280,
        cwd=tests.parents[2],
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


# Slots of a KV head by size of cluster on an H200: 132 multiprocessors, 4 heads; clusters_at_once said 132, 66, 39, ...
H200_SLOTS = [33, 32, 27, 28, 25, 24, 21, 24]


def test_clusters_hold_whole_tiles_where_they_can() -> None:
    from tlt_kernels.triton.attention import CLUSTERS, best_cluster

    assert [best_cluster(H200_SLOTS, tiles) for tiles in (1, 4, 8, 16)] == [4, 6, 3, 2]  # as the sweep found
    for tiles in range(1, 34):
        cluster = best_cluster(H200_SLOTS, tiles)
        assert H200_SLOTS[CLUSTERS.index(cluster)] >= tiles, "a second wave of items"
    assert best_cluster(H200_SLOTS, 40) == 1
    assert best_cluster([4, 4, 3, 4, 0, 0, 0, 0], 4) == 1, "clusters of which no whole one fits for each head are out"
