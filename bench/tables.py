"""The README's result tables, generated from bench/results: a figure without a record does not appear.

    python -m bench.tables            # rewrite the tables in README.md and docs/*.md
    python -m bench.tables --check    # exit 1 when one of them is not what the records say

A table stands between `<!-- bench:AREA -->` and `<!-- /bench -->`. AREA may be followed by metric prefixes,
to show a part of the file: `<!-- bench:core equality. speed. -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results import ROOT, load

MARKED = re.compile(
    r"(?P<open><!-- bench:(?P<area>[\w-]+)(?P<prefixes>(?: [\w.-]+)*) -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /bench -->)",
    re.S,
)


def number(value: float) -> str:
    """Four significant digits; integers whole, with thousands separators."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _params(params: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in params.items()) or "–"


def _shared(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Params that every entry has with one value: said once below the table."""
    first, *rest = [e["params"] for e in entries]
    return {k: v for k, v in first.items() if rest and all(k in p and p[k] == v for p in rest)}


def _row(entry: dict[str, Any], shared: dict[str, Any]) -> str:
    value = f"**{number(entry['value'])}** {entry['unit']}".strip()
    if entry["spread"]:
        low, high = entry["spread"]
        value += f" ({number(low)} to {number(high)}, {entry['runs']} runs)"
    own = {k: v for k, v in entry["params"].items() if k not in shared}
    cells = [f"`{entry['metric']}`", value, _params(own), f"`{entry['commit']}`"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(area: str, prefixes: Sequence[str] = (), *, folder: Path | None = None) -> str:
    """The Markdown table of an area; below it what all its rows share, the machines, and the commands that made it."""
    entries = [
        e for e in load(area, folder=folder) if not prefixes or e["metric"].startswith(tuple(prefixes))
    ]
    if not entries:
        return "_Nothing recorded yet._\n"
    shared = _shared(entries)
    rows = [_row(entry, shared) for entry in entries]
    machines = "; ".join(dict.fromkeys(e["machine"] for e in entries))
    commands = ", ".join(f"`{c}`" for c in dict.fromkeys(e["command"] for e in entries))
    made = f"Made by {commands} on {machines}" + (f"; all: {_params(shared)}." if shared else ".")
    return "\n".join(["| metric | value | of | commit |", "|---|---|---|---|", *rows, "", made]) + "\n"


def render(text: str, *, folder: Path | None = None) -> str:
    """`text` with every marked table made anew."""
    openings = len(re.findall(r"<!-- bench:", text))
    found = list(MARKED.finditer(text))
    if len(found) != openings or any("<!-- bench:" in m["body"] for m in found):
        raise ValueError(
            "bench markers: expected each `<!-- bench:AREA -->` line closed by `<!-- /bench -->`; add it"
        )
    return MARKED.sub(
        lambda m: m["open"] + table(m["area"], m["prefixes"].split(), folder=folder) + m["close"], text
    )


def documents() -> list[Path]:
    return [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if p.exists()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tables", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table is stale")
    options = parser.parse_args(argv)
    stale = []
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = render(old)
        if old != new:
            stale.append(path.relative_to(ROOT).as_posix())
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(
            f"{'stale, run `python -m bench.tables`' if options.check else 'rewritten'}: {', '.join(stale)}"
        )
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
