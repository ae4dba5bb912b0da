"""What is shipped: metadata, entry point, extras, pins, and the files of the sdist and the wheel. No network."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("csrc", "kernels", "tlt_engine", "tests", "bench", "docs", "setup.py", "CMakeLists.txt", "MANIFEST.in")


def requirement(line: str) -> tuple[str, str]:
    """(name, specifier)"""
    found = re.match(r"([\w.-]+)(.*)", line)
    assert found is not None
    return found[1].lower(), found[2]


def test_the_installed_metadata_is_this_project() -> None:
    try:
        metadata = distribution("tlt-engine").metadata
    except PackageNotFoundError:
        pytest.skip("not installed: run through PYTHONPATH")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == PROJECT["project"]["version"] == importlib.import_module("tlt_engine").__version__
    assert set(metadata.get_all("Provides-Extra") or ()) == {"cuda", "demo", "rl", "metrics", "dev"}
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_entry_point_runs() -> None:
    module, _, name = PROJECT["project"]["scripts"]["tlt"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_optional_packages_stay_optional() -> None:
    required = {requirement(line)[0] for line in PROJECT["project"]["dependencies"]}
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"triton", "flashinfer-python"} <= {requirement(line)[0] for line in extras["cuda"]}
    assert required.isdisjoint({"triton", "flashinfer-python", "trl", "ray", "reasoning-gym", "matplotlib", "vllm"})


def pins_outside_range(constraints: str, wanted: list[str]) -> list[str]:
    from packaging.specifiers import SpecifierSet

    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    ranges = [requirement(line) for line in wanted]
    return [f"{n}=={pins[n]} is not {s}" for n, s in ranges if n in pins and pins[n] not in SpecifierSet(s)]


def test_the_pins_lie_within_the_declared_ranges() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    constraints = (ROOT / "constraints.txt").read_text()
    assert "torch==" in constraints and pins_outside_range(constraints, wanted) == []


def test_sabotage_a_pin_outside_its_range_is_seen() -> None:
    assert pins_outside_range("torch==2.10.0", ["torch>=2.11", "numpy"]) == ["torch==2.10.0 is not >=2.11"]


def folders_without_init(root: Path) -> list[str]:
    """Packages that setuptools would leave out of the wheel."""
    folders = {p.parent for p in root.rglob("*.py")}
    return sorted(str(f.relative_to(root)) for f in folders if not (f / "__init__.py").exists())


def test_every_package_has_an_init(tmp_path: Path) -> None:
    assert folders_without_init(ROOT / "tlt_engine") == folders_without_init(ROOT / "kernels" / "tlt_kernels") == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").touch()
    assert folders_without_init(tmp_path) == ["a"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is written into the checkout."""
    work = tmp_path_factory.mktemp("sdist")
    copy = work / "copy"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in [*SOURCES, "pyproject.toml", "LICENSE", "README.md"]:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, copy / name)
    return _build("build_sdist", copy, work)


def _build(hook: str, source: Path, out: Path, **env: str) -> Path:
    code = f"import setuptools.build_meta as b; print('made:' + b.{hook}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.rpartition("made:")[2].strip()


def test_the_sdist_can_be_built_from(sdist: Path) -> None:
    copy = sdist.parent / "copy"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "kernels", "tlt_engine"):
        wanted = {str(p.relative_to(copy)) for p in (copy / folder).rglob("*") if p.is_file()}
        assert len(wanted) > 5 and wanted <= names, wanted - names
    assert {"CMakeLists.txt", "setup.py", "LICENSE", "pyproject.toml"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)


@pytest.mark.slow
def test_the_wheel_of_the_sdist_holds_both_packages_and_the_extension(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    wheel = _build("build_wheel", source, tmp_path, TLT_CUDA="0")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for root, top in ((source / "tlt_engine", "tlt_engine"), (source / "kernels" / "tlt_kernels", "tlt_kernels")):
        assert {f"{top}/{p.relative_to(root).as_posix()}" for p in root.rglob("*.py")} <= names
        assert f"{top}/py.typed" in names
    assert any(re.fullmatch(r"tlt_engine/_C\.[\w.-]+\.so", name) for name in names)
    assert not any(name.startswith(("tests/", "bench/", "csrc/", "kernels/")) for name in names)
    code = "from tlt_engine import _C; print(_C.__file__, _C.with_cuda)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path)) and run.stdout.split()[-1] == "False"
