"""csrc/cuda/invariant_*.cuh and invariant_plan.cu compiled for the CPU on emulated.h, called through ctypes.

Knows what of these files belongs to a GPU (inline assembly, launches) and takes it out; the rest is compiled as it is.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc" / "cuda"
LAUNCH = """template <typename... Arguments>
void launch_in_line(void (*kernel)(Arguments...), int blocks, int threads, int bytes, cudaStream_t, const char*,
                    const Arguments&... arguments) {
  emulated::launch(blocks, threads, bytes, [&] { kernel(arguments...); });
}

"""
ENTRY = """
#include "emulated.h"
#include "plan.h"
#include "attention.h"

using namespace tlt::cuda;

extern "C" const char* run(const uint64_t* step, const int64_t* step_sizes, const uint64_t* plan, const uint64_t* layer,
                           const int64_t* layer_sizes, float scale_log2, unsigned seed) {
  static std::string error;
  try {
    emulated::seed = seed;
    const InvariantStep s = step_of(step, step_sizes);
    const InvariantPlan p = plan_of(plan);
    if (layer == nullptr) {
      invariant_plan(s, p, 0);
    } else {
      invariant_attention_typed<__half>(s, p, layer_of(layer, layer_sizes, scale_log2, 2), 0);
    }
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
"""


def without(text: str, start: str, end: str) -> str:
    """text without what lies from `start` up to `end`. Both must be there."""
    first = text.index(start)
    return text[:first] + text[text.index(end, first) :]


def attention_text() -> str:
    """invariant_attention.cuh with the files of its own that it includes."""
    names, text = [f"invariant_{part}.cuh" for part in ("stream", "attend", "chunk", "attention")], ""
    for name in names:
        lines = (CSRC / name).read_text().splitlines(keepends=True)
        ours = [f'#include "{other}"\n' for other in (*names, "attention_common.cuh", "matrix.cuh")]
        text += "".join(line for line in lines if line not in (*ours, "#pragma once\n"))
    return '#pragma once\n#include "emulated.h"\n' + text


def sources(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Files to compile. changes: of the attention kernels, old text to new, for tests that break them."""
    attention = attention_text()
    for old, new in (changes or {}).items():
        assert old in attention, f"{old!r} is not in csrc/cuda/invariant_*.cuh any more"
        attention = attention.replace(old, new)
    attention = re.sub(
        r"extern __shared__ __align__\(128\) unsigned char (\w+)\[\];",
        r"unsigned char* const \1 = emulated::shared;", attention,
    )
    last = "template <typename T, int D, int MT, int WM, int STAGES>\nvoid launch_attend"
    attention = without(attention, "template <typename... Arguments>\nvoid launch_in_line", last)
    attention = attention.replace(last, LAUNCH + last)
    plan = (CSRC / "invariant_plan.cu").read_text().replace('#include "common.cuh"', "")
    plan = without(plan, "void invariant_attention(", "}  // namespace tlt::cuda")
    plan = re.sub(r"(\w+)<<<(.+?), (\d+), 0, .*?>>>\((.*?)\);", r"emulated::launch(\2, \3, 0, [&] { \1(\4); });", plan)
    plan = plan.replace("namespace {", "namespace planning {")  # the other file has functions of the same names
    plan = plan.replace("}  // namespace\n", "}\nusing namespace planning;\n")
    bindings = (CSRC.parent / "bindings" / "cuda_invariant.cpp").read_text()
    readers = bindings[bindings.index("tlt::cuda::InvariantStep step_of") : bindings.index("}  // namespace\n")]
    readers = re.sub(r"const Addresses& ", "const uint64_t* ", readers)
    readers = re.sub(r"const Sizes& ", "const int64_t* ", readers)
    readers = re.sub(r"  expect_count\(.*\n", "", readers)
    at = "template <typename T>\nT* at(uint64_t address) { return reinterpret_cast<T*>(address); }\n"
    return {
        "attention.h": attention, "plan.h": "#pragma once\n" + plan,
        "entry.cpp": ENTRY.replace("using namespace tlt::cuda;", "using namespace tlt::cuda;\n" + at + readers),
        **{name: (CSRC / name).read_text() for name in ("invariant.h", "linear.h", "sample.h")},
        "emulated.h": (HERE / "emulated.h").read_text(),
    }


class Emulated:
    """In place of tlt_engine._C for CudaInvariantAttention on CPU tensors in fp16. seed: order of a block's threads."""

    with_cuda = True

    def __init__(self, folder: Path, changes: dict[str, str] | None = None) -> None:
        for name, text in sources(changes).items():
            (folder / name).write_text(text)
        library = folder / "emulated.so"
        command = [str(shutil.which("g++")), "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        subprocess.run([*command, str(folder / "entry.cpp"), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run
        self._run.restype = ctypes.c_char_p
        self.seed = 0

    def _call(self, step: Any, step_sizes: Any, plan: Any, layer: Any, layer_sizes: Any, scale: float) -> None:
        def words(values: Any, kind: Any) -> Any:
            return None if values is None else (kind * len(values))(*values)

        error = self._run(
            words(step, ctypes.c_uint64), words(step_sizes, ctypes.c_int64), words(plan, ctypes.c_uint64),
            words(layer, ctypes.c_uint64), words(layer_sizes, ctypes.c_int64), ctypes.c_float(scale),
            ctypes.c_uint(self.seed),
        )
        if error is not None:
            raise RuntimeError(error.decode())

    def cuda_invariant_plan(self, step: Any, step_sizes: Any, plan: Any, *, stream: int) -> None:
        self._call(step, step_sizes, plan, None, None, 0.0)

    def cuda_invariant_attention(
        self, step: Any, step_sizes: Any, plan: Any, layer: Any, layer_sizes: Any, scale_log2: float, dtype: int, *,
        stream: int,
    ) -> None:
        assert dtype == 2, "fp16 alone is emulated"
        self._call(step, step_sizes, plan, layer, layer_sizes, scale_log2)
