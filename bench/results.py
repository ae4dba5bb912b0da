"""Benchmark records: one JSON list an area in bench/results, each entry made by a real run at a named commit.

    record("core", "leak.pages", 0, "pages", {"events": 10000}, command="python -m bench.core leak")

Knows nothing of what is measured. Written by benchmarks only, never by hand; `bench.tables` turns the files
into the README's tables.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "transformers", "triton", "numpy", "flashinfer-python", "trl", "tlt-engine")
# Files that a benchmark run itself writes: they do not make the measured code differ from the commit.
GENERATED = ("bench/results", "README.md", "bench/LOG.md")


def record(
    area: str,
    metric: str,
    value: float,
    unit: str,
    params: Mapping[str, Any],
    *,
    command: str,
    spread: Sequence[float] | None = None,
    runs: int = 1,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Write one measured value to `<folder>/<area>.json` (default bench/results) and return the entry.

    value: the median over `runs`; spread: [low, high] over them. params: what the value depends on (model,
    weights, batch ...), JSON values only. The entry replaces an earlier one of equal metric and params, at
    its place in the list. Machine, versions, commit ("-dirty" where tracked code differs) and UTC date are
    added here. Safe against other processes. ValueError for values that JSON or a table could not hold.
    """
    entry = {
        "metric": _text("metric", metric),
        "value": _finite("value", value),
        "unit": _text("unit", unit, empty=True),
        "params": _plain(params),
        "spread": _spread(spread),
        "runs": runs,
        "command": _text("command", command),
        "machine": machine_name(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = (folder or RESULTS) / f"{area}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        entries = load(area, folder=folder)
        same = [i for i, e in enumerate(entries) if e["metric"] == metric and e["params"] == entry["params"]]
        if same:
            entries[same[0]] = entry
        else:
            entries.append(entry)
        # A reader must never meet half a file: write beside it, then rename.
        fresh = path.with_suffix(".json.new")
        fresh.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(path)
    return entry


def load(area: str, *, folder: Path | None = None) -> list[dict[str, Any]]:
    """The entries of an area, in file order; [] when nothing was recorded yet."""
    path = (folder or RESULTS) / f"{area}.json"
    if not path.exists():
        return []
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(
            f"{path.name}: expected a JSON list of records, got {type(entries).__name__}; rerun it"
        )
    return entries


def machine_name() -> str:
    """The GPU's name where there is one, else the CPU's model and core count. torch is asked only if it is
    loaded, so that recording a CPU figure starts no CUDA context."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{torch.cuda.get_device_name(0)}{f' x{count}' if count > 1 else ''}"
    return cpu_name()


def cpu_name() -> str:
    """CPU model and the cores this process may use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = named[0] if named else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(root: Path = ROOT) -> str:
    """Short hash of HEAD, with "-dirty" when tracked files other than the generated ones differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":(exclude){p}" for p in GENERATED)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The lock lives in its own file: the data file is replaced under it.
    with path.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _text(name: str, value: object, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{name}: expected {'a' if empty else 'a non-empty'} string, got {value!r}; name it")
    return value


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{name}: expected a finite number, got {value!r}; record what was measured"
        )
    return value


def _spread(spread: Sequence[float] | None) -> list[float] | None:
    if spread is None:
        return None
    if len(spread) != 2 or _finite("spread", spread[0]) > _finite("spread", spread[1]):
        raise ValueError(f"spread: expected [low, high], got {spread!r}; pass the extremes over the runs")
    return [spread[0], spread[1]]


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """params as JSON gives them back, so that they compare equal to those of an entry read from the file."""
    try:
        return json.loads(json.dumps(dict(params), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"params: expected JSON values, got {params!r} ({error}); convert them"
        ) from None
