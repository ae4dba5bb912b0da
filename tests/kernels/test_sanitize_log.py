"""What tests/gpu/sanitize.py reads from compute-sanitizer's output: a part that broke off is never clean."""

from __future__ import annotations

import pytest

from tests.gpu.sanitize import RAN, errors_of

CLEAN = f"========= COMPUTE-SANITIZER\n{RAN}\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize("log,errors", [
    (CLEAN, 0),
    (CLEAN.replace("0 errors", "1 error"), 1),
    (f"{RAN}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
    (f"{RAN}\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
    (CLEAN.replace(RAN, "Traceback"), -1),
    (f"{RAN}\n", -1),
    ("========= Error: Device not supported\n", -1),
])
def test_errors_are_counted_and_silence_is_not_success(log: str, errors: int) -> None:
    assert errors_of(log) == errors
