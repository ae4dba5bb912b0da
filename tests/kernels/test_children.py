"""Runs children_interpreted.py under Triton's interpreter, in a process of its own: TRITON_INTERPRET counts when
triton is first imported, and this process may have imported it for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    tests = Path(__file__).with_name("children_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, env=clean | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280,
        cwd=tests.parents[2],
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
