"""csrc/cuda/sample*.{cu,cuh} and draft*.{cu,cuh} in fp32 and bf16, compiled for the CPU on emulated.h.

Takes the place of tlt_engine._C below tlt_kernels.cuda, so that argument lists are the real ones. Launches, includes of
CUDA and the declaration of dynamic shared memory are rewritten; the rest is compiled as it is.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
FILES = (
    "common.cuh", "block.cuh", "row.cuh", "sample.h", "sample_rows.cuh", "sample_filtered.cuh", "sample_nucleus.cuh",
    "sample_launch.cuh", "sample.cu", "draft.h", "draft_rows.cuh", "draft.cu",
)
ENTRY = """
#include "sampler.h"
#include "philox.h"
#include "draft.cu"
#include "sample.cu"
#include "sample_launch.cuh"
#include "draft_rows.cuh"

namespace tlt::cuda {
template void sample_typed<float>(const SampleArgs&, cudaStream_t);
template void sample_typed<__nv_bfloat16>(const SampleArgs&, cudaStream_t);
template void draft_typed<float>(const DraftArgs&, cudaStream_t);
template void draft_typed<__nv_bfloat16>(const DraftArgs&, cudaStream_t);
}  // namespace tlt::cuda

namespace {
@READERS@
}  // namespace

// sizes: what the bindings take beside the addresses, in their order.
extern "C" const char* run(bool draft, const uint64_t* addresses, const int64_t* sizes, unsigned seed) {
  static std::string error;
  try {
    emulated::seed = seed;
    Reader next(addresses);
    const int64_t* n = sizes;
    tlt::cuda::DraftArgs d{};
    tlt::cuda::SampleArgs& a = d.rows;
    a = read_rows(next);
    if (draft) {
      next(a.d2t), next(d.tokens), next(d.draft_ids), next(d.scores), next(d.logprobs);
      next(a.arrived), next(a.workspace);
    } else {
      next(a.forced), next(a.tokens), next(a.logprobs), next(a.raw_logprobs), next(a.arrived), next(a.workspace);
    }
    a.dtype = static_cast<tlt::cuda::Dtype>(*n++), a.row_stride = *n++, a.rows = *n++;
    if (draft) a.columns = *n++;
    a.vocab = *n++, a.limit = *n++, a.allowed_words = *n++, a.branch_width = *n++, a.histories = *n++;
    if (draft) {
      a.d2t_wide = *n++, d.k = *n++, d.noise = *n++, a.processors = *n++;
      tlt::cuda::noisy_top_k(d, 0);
    } else {
      a.columns = a.vocab, a.processors = *n++;
      tlt::cuda::sample(a, 0);
    }
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
extern "C" int64_t workspace(int rows, int vocab) { return tlt::cuda::sample_workspace(rows, vocab); }
extern "C" int64_t draft_workspace(int rows, int columns) { return tlt::cuda::draft_workspace(rows, columns); }
"""


def rewritten(text: str) -> str:
    text = re.sub(r".*Dtype::kFloat16: .*\n", "", text)  # two types tell as much as three, in two thirds of the time
    text = re.sub(r"#include <cuda_\w+\.h>\n", "", text)
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* const \2 = (\1*)emulated::shared;", text)
    return re.sub(
        r"(?m)^( *)([\w<>, ]+?)<<<(.+?), (\w+), (\w+), [^>]*>>>\(([^;]*)\);$",
        r"\1emulated::launch_plane(\3, \4, \5, [=] { \2(\6); });", text,
    )


def sources(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Files to compile. changes: old text to new, each in just one file, for tests that break the kernels."""
    texts = {name: (CSRC / "cuda" / name).read_text() for name in FILES}
    for old, new in (changes or {}).items():
        (name,) = [name for name, text in texts.items() if old in text]
        texts[name] = texts[name].replace(old, new)
    bindings = (CSRC / "bindings" / "cuda_sample.cpp").read_text()
    reader = bindings[bindings.index("// The logits, identities") : bindings.index("}  // namespace\n")]
    readers = """struct Reader {
  const uint64_t* addresses;
  explicit Reader(const uint64_t* first) : addresses(first) {}
  template <typename T>
  void operator()(T*& field) { field = reinterpret_cast<T*>(*addresses++); }
};
"""
    emulated = (HERE / "emulated.h").read_text()
    return {name: rewritten(text) for name, text in texts.items()} | {
        "entry.cpp": ENTRY.replace("@READERS@", readers + reader), "philox.h": (CSRC / "philox.h").read_text(),
        "emulated.h": emulated[: emulated.index("namespace tlt::cuda {")],  # the rest stands in for attention's helpers
        "sampler.h": (HERE / "sampler.h").read_text(),
    }


class EmulatedSampler:
    """What tlt_kernels.cuda calls of tlt_engine._C. seed: order of a block's threads. processors: how many the split
    of rows over blocks counts on."""

    with_cuda = True

    def __init__(self, folder: Path, changes: dict[str, str] | None = None) -> None:
        for name, text in sources(changes).items():
            (folder / name).write_text(text)
        library = folder / "sampler.so"
        command = [str(shutil.which("g++")), "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-mfma"]
        subprocess.run(
            [*command, "-shared", "-fPIC", "-w", f"-I{folder}", str(folder / "entry.cpp"), "-o", str(library)],
            check=True,
        )
        library_c = ctypes.CDLL(str(library))
        self._run, self._workspace = library_c.run, library_c.workspace
        self._draft_workspace = library_c.draft_workspace
        self._run.restype, self._workspace.restype = ctypes.c_char_p, ctypes.c_int64
        self._draft_workspace.restype = ctypes.c_int64
        self.seed = 0

    def _call(self, draft: bool, addresses: list[int], sizes: list[int]) -> None:
        error = self._run(
            draft, (ctypes.c_uint64 * len(addresses))(*addresses), (ctypes.c_int64 * len(sizes))(*map(int, sizes)),
            ctypes.c_uint(self.seed),
        )
        if error is not None:
            raise RuntimeError(error.decode())

    def cuda_sample_workspace(self, rows: int, vocab: int) -> int:
        return int(self._workspace(rows, vocab))

    def cuda_draft_workspace(self, rows: int, columns: int) -> int:
        return int(self._draft_workspace(rows, columns))

    def cuda_sample(self, addresses: list[int], *sizes: Any, stream: int) -> None:
        self._call(False, addresses, list(sizes))

    def cuda_noisy_top_k(self, addresses: list[int], *sizes: Any, stream: int) -> None:
        self._call(True, addresses, list(sizes))
