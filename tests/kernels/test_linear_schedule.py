"""How the CUDA product deals its work out (csrc/cuda/linear_schedule.h), walked on the CPU: every stage to one worker,
in order, in equal runs, and no two unfinished sums in one place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
WALK = """
#include <cstdio>
#include <set>
#include <vector>
#include "HEADER"
using namespace tlt::cuda;

#define HOLD(x) if (!(x)) { std::printf("%s: %d tiles, %d steps, %d\\n", #x, d.tiles, d.steps, d.workers); return 1; }

int main() {
  for (int tiles : {1, 2, 3, 28, 36, 148, 1188}) for (int steps : {1, 2, 9, 56, 296}) for (int workers : {1, 7, 132}) {
    Deal d{tiles, steps, workers < tiles * steps ? workers : tiles * steps};
    HOLD(d.first_stage(0) == 0 && d.first_stage(d.workers) == tiles * steps);
    std::set<int> places;
    for (int w = 0; w < d.workers; ++w) {
      const int first = d.first_stage(w), end = d.first_stage(w + 1), share = tiles * steps / d.workers;
      HOLD(end - first >= share && end - first <= share + 1);
      for (int s = first; s < end; ++s) HOLD(d.worker_of(s) == w);
      for (int tile = first / steps; tile <= (end - 1) / steps; ++tile) {
        if (first <= tile * steps && (tile + 1) * steps <= end) continue;
        HOLD(d.slot_of(w, tile) < 2 * d.workers && places.insert(d.slot_of(w, tile)).second);
      }
    }
  }
}
"""


def complaint(header: str, folder: Path) -> str:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (folder / "walk.cpp").write_text(WALK.replace("HEADER", header))
    subprocess.run([compiler, "-std=c++17", "-O1", str(folder / "walk.cpp"), "-o", str(folder / "walk")], check=True)
    return subprocess.run([folder / "walk"], capture_output=True, text=True).stdout


def test_every_stage_has_one_worker(tmp_path: Path) -> None:
    assert complaint(str(CSRC / "cuda" / "linear_schedule.h"), tmp_path) == ""


@pytest.mark.parametrize(("right", "wrong"), [
    ("stage) + 1) * workers - 1)", "stage) + 1) * workers)"),
    ("2 * worker + (tile != first_stage(worker) / steps ? 1 : 0)", "2 * worker"),
    ("worker) * tiles * steps / workers", "worker) * (tiles * steps / workers)"),
])
def test_walk_sees_a_wrong_deal(right: str, wrong: str, tmp_path: Path) -> None:
    source = (CSRC / "cuda" / "linear_schedule.h").read_text()
    assert right in source
    (tmp_path / "broken.h").write_text(source.replace(right, wrong))
    assert complaint(str(tmp_path / "broken.h"), tmp_path)
