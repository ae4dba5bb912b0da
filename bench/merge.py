"""Takes records that a benchmark wrote on another machine into bench/results.

    python -m bench.merge FILE [--commit SHA]

FILE: the <area>.json of a run with --out. --commit: what was measured, for records made where git was not or knew
another commit than that of the copied files; it replaces what they say.
Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.results import RESULTS, _locked, load


def merge(file: Path, commit: str | None = None, folder: Path = RESULTS) -> int:
    """How many records of `file` now lie in `folder`, each in place of one of equal metric and params."""
    area = file.stem
    fresh = json.loads(file.read_text())
    target = folder / file.name
    with _locked(target):
        kept = {_identity(entry): entry for entry in load(area, folder=folder)}
        for entry in fresh:
            if commit is None and entry["commit"] == "unknown":
                raise ValueError(f"commit: expected the measured commit, got {entry['commit']!r}; pass --commit")
            entry["commit"] = commit[:12] if commit else entry["commit"]  # as long as bench.results writes it
            kept[_identity(entry)] = entry
        half = target.with_suffix(".json.new")  # a reader must never meet half a file
        half.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        half.replace(target)
    return len(fresh)


def _identity(entry: dict[str, object]) -> str:
    return json.dumps([entry["metric"], entry["params"]], sort_keys=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    print(f"{merge(args.file, args.commit)} records from {args.file}", file=sys.stderr)
