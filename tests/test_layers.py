"""Imports go one way (docs/design.md), `kernels/` shadows nobody, importing the package is light, files stay small.

Every rule is a function from sources to a list of complaints, so that a sibling test can feed it a broken source.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600

# Lowest first. A module may import lower layers and its own package; the modules of BASE may import each other.
LAYERS: list[tuple[str, ...]] = [
    ("tlt_kernels",),
    ("tlt_engine.config", "tlt_engine.types", "tlt_engine.rng", "tlt_engine.outputs"),
    ("tlt_engine.kvcache",),
    ("tlt_engine.models",),
    ("tlt_engine.speculation", "tlt_engine.training"),
    ("tlt_engine.scheduler", "tlt_engine.graphs"),
    ("tlt_engine.engine",),
    ("tlt_engine",),  # __init__.py: the lazy front door
    ("tlt_engine.rl",),
    ("tlt_engine.cli",),
]
BASE = 1
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
EXTENSION = "tlt_engine._C"


def owner(module: str) -> str | None:
    """The entry of LAYERS that holds `module`; None for modules that are not ours. A module of tlt_engine that no
    layer names belongs to the front door, so that nothing below can reach it unnoticed."""
    parts = module.split(".")
    if parts[0] not in ("tlt_kernels", "tlt_engine"):
        return None
    pair = ".".join(parts[:2])
    return pair if pair in RANK else parts[0]


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions and under TYPE_CHECKING included."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            # `from tlt_engine import config` names a module, `from tlt_engine.config import refuse` a function.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    mine = owner(module)
    assert mine is not None
    complaints = []
    if mine == "tlt_engine" and module != "tlt_engine":
        complaints.append(
            f"{module}: no layer names it; give it one in tests/test_layers.py and docs/design.md"
        )
    for line, name in imported(ast.parse(source), module, is_package):
        theirs = owner(name)
        if theirs is None or name.startswith(EXTENSION) or theirs == mine:
            continue
        if RANK[theirs] > RANK[mine] or (RANK[theirs] == RANK[mine] != BASE):
            complaints.append(f"{module}:{line} imports {name}: {theirs} does not lie below {mine}")
    return complaints


def python_modules() -> Iterator[tuple[str, str, bool]]:
    for top, root in (("tlt_engine", ROOT / "tlt_engine"), ("tlt_kernels", ROOT / "kernels" / "tlt_kernels")):
        for path in sorted(root.rglob("*.py")):
            parts = [top, *path.relative_to(root).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            yield ".".join(parts[:-1] if is_package else parts), path.read_text(encoding="utf-8"), is_package


def test_imports_go_one_way() -> None:
    modules = list(python_modules())
    assert len(modules) > 10
    assert [
        c for module, source, is_package in modules for c in wrong_imports(module, source, is_package)
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tlt_kernels.sample", "from tlt_engine.config import refuse"),
        ("tlt_kernels.sample", "import tlt_engine"),
        ("tlt_engine.rng", "from tlt_engine.models import loader"),
        ("tlt_engine.kvcache.pool", "from tlt_engine.models.loader import load_model"),
        ("tlt_engine.speculation.tree", "from tlt_engine.training import trainer"),
        ("tlt_engine.kvcache.pool", "from ..scheduler import sequence"),
        ("tlt_engine.speculation.tree", "def f():\n    from tlt_engine.engine import core"),
        ("tlt_engine.scheduler.scheduler", "if TYPE_CHECKING:\n    from tlt_engine import RolloutEngine"),
        ("tlt_engine.engine.core", "import tlt_engine.cli.main"),
        ("tlt_engine.helpers", "import os"),
    ],
)
def test_sabotage_an_import_upwards_is_seen(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tlt_kernels.sample", "from tlt_engine import _C"),
        ("tlt_engine.config", "from tlt_engine.rng import check_seed\nfrom .types import MAX_NODES"),
        ("tlt_engine.engine.core", "from .outputs import RequestOutput\nimport tlt_kernels, torch"),
        ("tlt_engine.cli.main", "from tlt_engine import RolloutEngine"),
    ],
)
def test_an_import_downwards_is_not(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


def foreign_includes(path: str, source: str) -> list[str]:
    """csrc outside its bindings knows neither Python nor torch; nothing there knows torch or the CUDA driver."""
    barred = ["torch", "ATen", "c10", "cuda.h"]
    if "bindings" not in Path(path).parts:
        barred += ["pybind11", "Python.h"]
    lines = [line.split() for line in source.splitlines() if line.lstrip().startswith("#include")]
    names = [words[-1].strip('<>"') for words in lines]
    return [f"{path} includes {n}" for n in names if n.split("/")[0] in barred]


def test_csrc_is_free_of_python_and_torch() -> None:
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert files
    assert [c for p in files for c in foreign_includes(str(p.relative_to(ROOT)), p.read_text())] == []


def test_sabotage_a_foreign_include_is_seen() -> None:
    assert (
        foreign_includes("csrc/cpu/noise.cpp", "#include <pybind11/pybind11.h>\n#include <torch/torch.h>\n")
        != []
    )
    assert foreign_includes("csrc/bindings/bind.h", "#include <cuda.h>") != []
    assert foreign_includes("csrc/bindings/bind.h", "#include <pybind11/pybind11.h>\n#include <cmath>") == []


def shadowing(root: Path) -> list[str]:
    """Folders on top that would shadow a package which transformers or TRL imports when the root is on sys.path."""
    return [name for name in ("kernels", "vllm", "datasets", "ray") if (root / name / "__init__.py").exists()]


def test_no_folder_shadows_a_package(tmp_path: Path) -> None:
    assert shadowing(ROOT) == [] and (ROOT / "kernels").is_dir()
    (tmp_path / "kernels").mkdir()
    assert shadowing(tmp_path) == []
    (tmp_path / "kernels" / "__init__.py").touch()
    assert shadowing(tmp_path) == ["kernels"]


def loaded_by(statement: str) -> list[str]:
    """What of the heavy kind a fresh interpreter holds after `statement`: modules, and CUDA libraries mapped."""
    code = f"""{statement}
import os, sys
heavy = [m for m in ("torch", "transformers", "triton", "numpy", "typer", "tlt_engine._C") if m in sys.modules]
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
print(*heavy, *[lib for lib in ("libcuda.so", "libcudart") if lib in maps])"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_neither_torch_nor_cuda() -> None:
    assert loaded_by("import tlt_engine") == []
    assert "torch" not in loaded_by("import tlt_engine.cli.main")  # `tlt --help` is quick


def test_sabotage_a_heavy_import_is_seen() -> None:
    assert loaded_by("import tlt_engine, numpy") == ["numpy"]


def too_long(files: dict[str, str]) -> list[str]:
    return [f"{name}: {n} lines" for name, text in files.items() if (n := text.count("\n")) > MAX_LINES]


def test_files_stay_readable_in_one_sitting() -> None:
    folders = ("tlt_engine", "kernels", "csrc", "bench", "tests", "examples")
    suffixes = (".py", ".cpp", ".h", ".cu", ".cuh")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    assert len(paths) > 20
    assert too_long({str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in paths}) == []


def test_sabotage_a_long_file_is_seen() -> None:
    assert too_long({"a.py": "x\n" * MAX_LINES}) == []
    assert too_long({"a.py": "x\n" * (MAX_LINES + 1)}) == [f"a.py: {MAX_LINES + 1} lines"]
