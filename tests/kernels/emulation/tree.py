"""csrc/cuda/tree.cu compiled for the CPU on emulated.h, in the place of tlt_engine._C below tlt_kernels.cuda."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from tests.kernels.emulation.sampler import CSRC, HERE, rewritten

ENTRY = """
#include "sampler.h"
#include "tree.cu"

using namespace tlt::cuda;

template <typename T>
T* at(uint64_t address) { return reinterpret_cast<T*>(address); }

extern "C" const char* run(int op, const uint64_t* p, const int* n, unsigned seed) {
  static std::string error;
  try {
    emulated::seed = seed;
    if (op == 0) {
      pack_trees(at<int32_t>(p[0]), at<int32_t>(p[1]), n[0], at<int32_t>(p[2]), at<int64_t>(p[3]), 0);
    } else if (op == 1) {
      tree_from_candidates(at<int64_t>(p[0]), at<int32_t>(p[1]), at<float>(p[2]), at<int32_t>(p[3]), at<int32_t>(p[4]),
                           n[0], n[1], at<void>(p[5]),
                           {at<int64_t>(p[6]), at<int32_t>(p[7]), at<int32_t>(p[8]), at<int64_t>(p[9]),
                            at<int32_t>(p[10])}, 0);
    } else {
      verify_tree(at<int64_t>(p[0]), at<int64_t>(p[1]), at<int32_t>(p[2]), at<int32_t>(p[3]), n[0], n[1],
                  at<int32_t>(p[4]), at<int32_t>(p[5]), at<int64_t>(p[6]), 0);
    }
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
extern "C" int64_t workspace(int batch) { return tree_workspace(batch); }
"""


class EmulatedTrees:
    """seed: order of a block's threads. changes: old text to new in tree.cu, for tests that break the kernels."""

    with_cuda = True

    def __init__(self, folder: Path, changes: dict[str, str] | None = None) -> None:
        text = (CSRC / "cuda" / "tree.cu").read_text()
        for old, new in (changes or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        emulated = (HERE / "emulated.h").read_text()
        files = {
            "tree.cu": rewritten(text), "entry.cpp": ENTRY, "sampler.h": (HERE / "sampler.h").read_text(),
            "emulated.h": emulated[: emulated.index("namespace tlt::cuda {")],
        } | {name: rewritten((CSRC / "cuda" / name).read_text()) for name in ("tree.h", "block.cuh", "common.cuh")}
        for name, content in files.items():
            (folder / name).write_text(content)
        library = folder / "tree.so"
        command = [str(shutil.which("g++")), "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"]
        subprocess.run(
            [*command, "-shared", "-fPIC", "-w", f"-I{folder}", str(folder / "entry.cpp"), "-o", str(library)],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._library.run.restype, self._library.workspace.restype = ctypes.c_char_p, ctypes.c_int64
        self.seed = 0

    def _call(self, op: int, addresses: list[int], *sizes: int) -> None:
        error = self._library.run(
            op, (ctypes.c_uint64 * len(addresses))(*addresses), (ctypes.c_int * len(sizes))(*sizes),
            ctypes.c_uint(self.seed),
        )
        if error is not None:
            raise RuntimeError(error.decode())

    def cuda_tree_workspace(self, batch: int) -> int:
        return int(self._library.workspace(batch))

    def cuda_pack_trees(self, parents: int, indptr: int, batch: int, *out: int, stream: int) -> None:
        self._call(0, [parents, indptr, *out], batch)

    def cuda_tree_from_candidates(self, *arguments: int, stream: int) -> None:
        self._call(1, [*arguments[:5], *arguments[7:]], *arguments[5:7])

    def cuda_verify_tree(self, *arguments: int, stream: int) -> None:
        self._call(2, [*arguments[:4], *arguments[6:]], *arguments[4:6])
