// Launches of the row kernels for one type of logits; each type is compiled in a file of its own.
#pragma once
#include "sample_nucleus.cuh"

namespace tlt::cuda {

// Blocks a row: the fewest rounds of strips a warp, waves of blocks counted whole, with one round's worth of setup each.
inline int splits_of(const SampleArgs& a) {
  const int slots = kRowBlocks * a.processors, strips = strips_of(a.vocab);
  int best = 1;
  int64_t least = 0;
  for (int splits = 1; splits <= kMaxSplits; ++splits) {
    const int64_t waves = (static_cast<int64_t>(a.rows) * splits + slots - 1) / slots;
    const int64_t rounds = waves * ((strips + splits * kRowWarps - 1) / (splits * kRowWarps) + 1);
    if (splits == 1 || rounds < least) best = splits, least = rounds;
  }
  return best;
}

template <typename T, bool kMods>
void launch_rows(const SampleArgs& a, cudaStream_t stream) {
  const int splits = splits_of(a);
  const int ahead = kRowWarps * kStrip * static_cast<int>(sizeof(T));
  check(cudaFuncSetAttribute(sample_rows<T, kMods>, cudaFuncAttributeMaxDynamicSharedMemorySize, ahead),
        "sample_rows: shared memory");
  sample_rows<T, kMods><<<dim3(splits, a.rows), kRowThreads, ahead, stream>>>(a, row_workspace(a.workspace, a.rows));
  check_launch("sample_rows");
  if (!a.top_k && !a.top_p && !a.min_p) return;
  const int bytes = filter_bytes(a.vocab);
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
