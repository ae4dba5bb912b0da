"""bench.results and bench.tables: what a record holds, that parallel runs lose nothing, that tables follow."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import threading
from pathlib import Path

import pytest

from bench import kernels, merge, results, tables


def put(folder: Path, value: float = 4.2, **changes: object) -> dict:
    fields: dict = {
        "area": "area",
        "metric": "ar.ms",
        "unit": "ms",
        "params": {"batch": 1},
        "command": "python -m x",
    }
    fields |= changes
    area, metric, unit, params = (fields.pop(k) for k in ("area", "metric", "unit", "params"))
    return results.record(area, metric, value, unit, params, folder=folder, **fields)


def test_a_record_says_where_it_came_from(tmp_path: Path) -> None:
    entry = put(tmp_path, spread=[4.19, 4.25], runs=5)
    on_disk = json.loads((tmp_path / "area.json").read_text())
    assert on_disk == [entry]
    measured = ["metric", "value", "unit", "params", "spread", "runs", "command"]
    assert list(entry) == [*measured, "machine", "versions", "commit", "date"]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=results.ROOT, capture_output=True, text=True
    ).stdout
    if head:  # an sdist has no history
        assert head.startswith(entry["commit"].removesuffix("-dirty"))
    assert entry["versions"]["torch"] and entry["machine"] and entry["date"].endswith("+00:00")


def test_the_newest_run_replaces_the_older_in_place(tmp_path: Path) -> None:
    put(tmp_path, 1.0)
    put(tmp_path, 2.0, params={"batch": 2})
    put(tmp_path, 3.0)
    assert [(e["params"]["batch"], e["value"]) for e in results.load("area", folder=tmp_path)] == [
        (1, 3.0),
        (2, 2.0),
    ]
    # A tuple comes back from JSON as a list: it must still be the same params.
    put(tmp_path, 4.0, params={"shape": (1, 2)})
    put(tmp_path, 5.0, params={"shape": (1, 2)})
    assert [e["value"] for e in results.load("area", folder=tmp_path)] == [3.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"value": float("nan")}, "value"),
        ({"value": "4.2"}, "value"),
        ({"value": True}, "value"),
        ({"spread": [2.0, 1.0]}, "spread"),
        ({"spread": [1.0]}, "spread"),
        ({"command": ""}, "command"),
        ({"metric": ""}, "metric"),
        ({"params": {"f": object()}}, "params"),
        ({"params": {"f": float("inf")}}, "params"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, changes: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        put(tmp_path, **changes)
    assert not (tmp_path / "area.json").exists()


def _write_many(folder: Path, writer: int) -> None:
    for i in range(8):
        put(folder, float(i), params={"writer": writer, "i": i})


def _lost(folder: Path) -> int:
    """Records missing after 4 processes wrote 8 each at once."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(folder, w)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 32 - len(results.load("area", folder=folder))


def test_parallel_writers_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "commit", lambda: "abc")
    assert _lost(tmp_path) == 0


def test_sabotage_without_the_lock_records_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, parent, load = multiprocessing.get_context("fork").Barrier(4), os.getpid(), results.load

    def load_together(area: str, *, folder: Path | None = None) -> list:
        entries = load(area, folder=folder)
        if os.getpid() != parent:
            with contextlib.suppress(threading.BrokenBarrierError):  # a writer has died: its records are lost too
                meeting.wait(timeout=2)
        return entries

    monkeypatch.setattr(results, "commit", lambda: "abc")
    monkeypatch.setattr(results, "_locked", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(results, "load", load_together)
    assert _lost(tmp_path) > 0


def git(folder: Path, *args: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *args],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def test_commit_is_dirty_only_when_code_differs(tmp_path: Path) -> None:
    assert results.commit(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "core.json").write_text("[]")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    clean = results.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "bench" / "results" / "core.json").write_text("[1]")
    assert results.commit(tmp_path) == clean  # a run's own records do not make its code dirty
    (tmp_path / "code.py").write_text("a = 2\n")
    assert results.commit(tmp_path) == f"{clean}-dirty"


def test_tables_show_the_records_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 1234.5678, unit="ms", params={"batch": 1, "kind": "a|b"}, spread=[1200.0, 1300.0], runs=3)
    put(tmp_path, 0, metric="leak.pages", unit="pages", params={})
    text = "# T\n<!-- bench:area ar. -->\nstale\n<!-- /bench -->\nend\n<!-- bench:none -->\n<!-- /bench -->\n"
    new = tables.render(text, folder=tmp_path)
    assert "**1,235** ms (1,200 to 1,300, 3 runs)" in new and "stale" not in new and "leak" not in new
    assert "a\\|b" in new and "Made by `python -m x` on " in new and "_Nothing recorded yet._" in new
    assert new.startswith("# T\n") and tables.render(new, folder=tmp_path) == new
    with pytest.raises(ValueError, match="bench markers: expected"):
        tables.render("<!-- bench:area -->\n", folder=tmp_path)


def test_check_fails_on_a_stale_table_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:nothing-of-this-name -->\n| typed by hand |\n<!-- /bench -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 1 and "typed by hand" in readme.read_text()
    assert tables.main([]) == 0 and "typed by hand" not in readme.read_text()
    assert tables.main(["--check"]) == 0


def test_merged_records_say_what_was_measured(tmp_path: Path) -> None:
    away, here = tmp_path / "away", tmp_path / "here"
    put(here, value=1.0, params={"batch": 1})
    put(here, value=2.0, params={"batch": 2})
    for commit in ("unknown", "0123456789ab"):  # git was not there, or knew the copy it was made from
        entry = put(away, value=3.0, params={"batch": 2}) | {"commit": commit}
        (away / "area.json").write_text(json.dumps([entry]))
        assert merge.merge(away / "area.json", "f" * 40, here) == 1
        kept = results.load("area", folder=here)
        assert [e["value"] for e in kept] == [1.0, 3.0] and kept[1]["commit"] == "f" * 12
    entry["commit"] = "unknown"
    (away / "area.json").write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="pass --commit"):
        merge.merge(away / "area.json", None, here)


def test_a_benchmark_report_becomes_records(tmp_path: Path) -> None:
    stats = {"q1": 10e-6, "median": 12e-6, "q3": 15e-6, "rounds": 200}
    report = {"benchmarks": [{"name": "test_sample[64]", "extra_info": {"rows": 64}, "stats": stats}]}
    assert kernels.record_ops(report, tmp_path) == 1
    (entry,) = results.load("gpu", folder=tmp_path)
    assert entry["metric"] == "op.us" and entry["params"] == {"op": "sample", "rows": 64}
    assert entry["value"] == pytest.approx(12) and entry["spread"] == pytest.approx([10, 15]) and entry["runs"] == 200
