// One block a row. The row is processed and cut as the filtered sampler does it; one pass more keeps each slot's largest
// score, with logs good to 1e-4; the k-th largest of those bounds the k-th largest score, and only what reaches it is
// scored exactly and sorted.
#pragma once
#include "draft.h"
#include "sample_filtered.cuh"

namespace tlt::cuda {

template <typename T, bool kMods>
struct DraftRow {
  using Filtered = FilteredRow<T, kMods>;
  const DraftArgs& a;
  Filtered& f;
  typename Filtered::Kept kept;
  bool noise;
  float top = negative_infinity<float>();
  float2 sum = make_float2(0.0f, 0.0f);

  __device__ __forceinline__ uint32_t word(int column) const {
    return noise ? f.row.word(target_of(a.rows, column)) : 0u;
  }

  // visit(x, column, word) for the columns of a group that are candidates.
  template <typename F>
  __device__ __forceinline__ void each(int group, F&& visit) const {
    float x[8];
    f.again(kept, group, x);
    Words4 words[2] = {};
    if (noise && !a.rows.d2t) words[0] = f.row.words(group * 2), words[1] = f.row.words(group * 2 + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(x[i] > negative_infinity<float>())) continue;
      visit(x[i], group * 8 + i, noise && a.rows.d2t ? word(group * 8 + i) : words[i / 4].x[i % 4]);
    }
  }

  __device__ __forceinline__ float near(float x, uint32_t word) const {
    return fmaf(x, f.row.inverse, noise ? gumbel_fast(word) : 0.0f);
  }
  __device__ __forceinline__ float exact(float x, uint32_t word) const {
    return noise ? f.row.z_of(x) + gumbel(word) : f.row.z_of(x);
  }

  // Each slot's best score, and the sum of what is kept.
  __device__ __forceinline__ void score_all() {
    const float y_max = f.x_max * f.per_unit;
    float mass = 0.0f;
    __syncthreads();  // the cut has been found with the slots of before
    for (int slot = threadIdx.x; slot < f.slot_count; slot += kBlock) {
      float reached = negative_infinity<float>();
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        each(first_group(slot) + 32 * half, [&](float x, int, uint32_t bits) {
          mass += exp2_fast(fmaf(x, f.per_unit, -y_max));
          reached = fmaxf(reached, near(x, bits));
        });
      }
      f.slots[slot] = reached;
      top = fmaxf(top, reached);
    }
    top = block_max(top, f.sh.scratch);
    sum = make_float2(y_max, block_sum(mass, f.sh.scratch));
  }

  // The exact scores of what may be among the k best, sorted; kList + 1 when they do not fit.
  __device__ __forceinline__ int list() {
    const float slack = 1e-3f + 1e-6f * fabsf(top);
    const float bound = slot_bound(f.sh, f.slots, f.slot_count, top, 1.0f, a.k) - slack;
    if (threadIdx.x == 0) f.sh.listed = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < f.slot_count; slot += kBlock) {
      if (!(f.slots[slot] >= bound)) continue;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        each(first_group(slot) + 32 * half, [&](float x, int column, uint32_t bits) {
          if (near(x, bits) < bound) return;
          const int at = atomicAdd(&f.sh.listed, 1);
          if (at < kList) f.sh.list[at] = pack_entry(exact(x, bits), column);
        });
      }
    }
    __syncthreads();
    const int listed = f.sh.listed;
    if (listed > kList) return kList + 1;
    block_sort(f.sh.list, listed);
    return listed;
  }

  // Thousands of equal scores: k rounds, each finding the best entry below the last.
  __device__ __forceinline__ int list_by_rounds() {
    uint64_t last = ~0ull;
    for (int round = 0; round < a.k; ++round) {
      uint64_t best = 0;
      for (int group = threadIdx.x; group < f.slot_count * 2; group += kBlock) {
        each(group, [&](float x, int column, uint32_t bits) {
          const uint64_t entry = pack_entry(exact(x, bits), column);
          if (entry < last && entry > best) best = entry;
        });
      }
      __syncthreads();
      if (threadIdx.x == 0) f.sh.list[round] = 0;
      __syncthreads();
      atomicMax(reinterpret_cast<unsigned long long*>(&f.sh.list[round]), static_cast<unsigned long long>(best));
      __syncthreads();
      last = f.sh.list[round];
      if (last == 0) return round;
    }
    return a.k;
  }

  __device__ __forceinline__ void write(int listed) const {
    for (int i = threadIdx.x; i < a.k; i += kBlock) {
      const int64_t at = static_cast<int64_t>(f.row.row) * a.k + i;
      const bool there = i < listed;
      const int column = there ? entry_id(f.sh.list[i]) : 0;
      float logprob = negative_infinity<float>();
      if (there) {
        const float x = modified_at(a.rows, f.row.row, *f.touched, kMods, column, widen(f.logits[column]));
        logprob = log_probability(x, f.per_unit, sum);
      }
      a.tokens[at] = there ? target_of(a.rows, column) : -1;
      a.draft_ids[at] = there ? column : -1;
      a.logprobs[at] = logprob;
      a.scores[at] = there && noise ? logprob + gumbel(word(column)) : logprob;
    }
  }
};

template <typename T, bool kMods>
__global__ void __launch_bounds__(kBlock, 2) noisy_top_k_kernel(const __grid_constant__ DraftArgs a) {
  extern __shared__ float slots[];
  __shared__ FilterShared shared;
  __shared__ Touched touched;
  const int r = blockIdx.x, columns = a.rows.columns;
  const Row row = load_row(a.rows, r);
  if constexpr (kMods) fill_touched(a.rows, r, touched);
  const T* logits = static_cast<const T*>(a.rows.logits) + r * a.rows.row_stride;
  FilteredRow<T, kMods> state{a.rows, row, &touched, logits, shared, slots,
                              reinterpret_cast<uintptr_t>(logits) % 16 == 0, columns, slots_of(columns),
                              kLog2e / row.temperature};
  const bool valid = state.scan_all();
  Cut cut{negative_infinity<float>(), columns};
  if (valid && row.filtered() && !state.narrow(cut)) cut = state.slow_cut();
  DraftRow<T, kMods> draft{a, state, state.kept_by(cut), a.noise && !row.greedy};
  int listed = 0;
  if (valid) {
    draft.score_all();
    listed = draft.list();
    if (listed > kList) listed = draft.list_by_rounds();
  }
  __syncthreads();
  draft.write(listed);
}

template <typename T, bool kMods>
void launch_draft(const DraftArgs& a, cudaStream_t stream) {
  const int bytes = slots_of(a.rows.columns) * static_cast<int>(sizeof(float));
  check(cudaFuncSetAttribute(noisy_top_k_kernel<T, kMods>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "noisy_top_k: shared memory");
  noisy_top_k_kernel<T, kMods><<<a.rows.rows, kBlock, bytes, stream>>>(a);
  check_launch("noisy_top_k");
}

template <typename T>
void draft_typed(const DraftArgs& a, cudaStream_t stream) {
  if (has_mods(a.rows)) {
    launch_draft<T, true>(a, stream);
  } else {
    launch_draft<T, false>(a, stream);
  }
}

}  // namespace tlt::cuda
