// Launches of the row kernels for one type of logits; each type is compiled in a file of its own.
#pragma once
#include "sample_filtered.cuh"

namespace tlt::cuda {

template <typename T, bool kMods>
void launch_rows(const SampleArgs& a, cudaStream_t stream) {
  const int most = min(kMaxSplits, (strips_of(a.vocab) + kRowWarps - 1) / kRowWarps);
  const int splits = max(1, min(most, 4 * a.processors / a.rows));  // 4 blocks fit on a multiprocessor
  sample_rows<T, kMods><<<dim3(splits, a.rows), kRowThreads, 0, stream>>>(a, row_workspace(a.workspace, a.rows));
  check_launch("sample_rows");
  if (!a.top_k && !a.top_p && !a.min_p) return;
  const int bytes = slots_of(a.vocab) * static_cast<int>(sizeof(float));
  check(cudaFuncSetAttribute(sample_filtered<T, kMods>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "sample_filtered: shared memory");
  sample_filtered<T, kMods><<<a.rows, kBlock, bytes, stream>>>(a);
  check_launch("sample_filtered");
}

template <typename T>
void sample_typed(const SampleArgs& a, cudaStream_t stream) {
  if (has_mods(a)) {
    launch_rows<T, true>(a, stream);
  } else {
    launch_rows<T, false>(a, stream);
  }
}

}  // namespace tlt::cuda
