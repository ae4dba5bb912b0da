"""What the commands print: results on stdout, everything else on stderr, so that --json leaves stdout to one object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def note(text: str) -> None:
    """A line for the person watching; stderr."""
    Console(stderr=True).print(text, highlight=False)


def print_json(result: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    grid = Table.grid(padding=(0, 3, 0, 2))
    for key, value in pairs.items():
        grid.add_row(key, escape(value))
    Console().print(f"[bold]{title}[/bold]", grid, highlight=False)


def say(text: str) -> None:
    """A line of the result; stdout. Not rewrapped and without emoji codes: a sample's ":smile:" is its own text."""
    Console(emoji=False).print(text, highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr while samples finish; nothing when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("samples"),
        TextColumn("{task.fields[tokens]:,} tokens"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars
