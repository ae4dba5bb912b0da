"""Builds tlt_engine._C with CMake and Ninja. Everything else is declared in pyproject.toml.

The extension links neither libtorch nor libcuda, so the build needs no torch and no GPU. CUDA sources are compiled
in when nvcc is found; set TLT_CUDA=0 to leave them out, TLT_CUDA=1 to insist. TLT_CUDA_ARCHITECTURES overrides the
default "80;90" (a semicolon-separated list for CMAKE_CUDA_ARCHITECTURES).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """The build tool from this Python's environment, else from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"building tlt_engine needs {name}: install it with `pip install {name}`")
    return found


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        # Resolve without symlinks: CMake writes straight to where setuptools (in place or not) expects the file.
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        work = Path(self.build_temp).resolve() / "cmake"
        work.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"), "-S", str(ROOT), "-B", str(work), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTLT_OUTPUT_DIR={target.parent}",
            f"-DTLT_OUTPUT_NAME={target.name}",
            f"-DTLT_CUDA={os.environ.get('TLT_CUDA', 'AUTO')}",
        ]
        if architectures := os.environ.get("TLT_CUDA_ARCHITECTURES"):
            configure.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
        subprocess.run(configure, check=True)
        subprocess.run([tool("cmake"), "--build", str(work)], check=True)


setup(
    ext_modules=[Extension("tlt_engine._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
