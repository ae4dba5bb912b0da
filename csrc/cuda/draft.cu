// One block a row, as the filtered sampler works: one pass keeps each slot's largest score, with logs good to 1e-4; the
// k-th largest of those bounds the k-th largest score, and only what reaches it is scored exactly and sorted.
#include "draft.h"

#include "sample_filtered.cuh"

namespace tlt::cuda {
namespace {

__device__ __forceinline__ float log2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

// Within 1e-4 of gumbel_from_word: below w = 0.01 the series of -log1p(-w) is good to 3e-7, above it 1 - w keeps w's
// leading digits.
__device__ __forceinline__ float gumbel_fast(uint32_t word) {
  const float w = uniform_from_word(word);
  const float e = w < 0.01f ? w * (1.0f + w * (0.5f + w * 0.33333334f)) : -kLn2 * log2_fast(1.0f - w);
  return -kLn2 * log2_fast(e);
}

template <typename T>
struct DraftRow {
  const DraftArgs& a;
  const Row& row;
  const T* logits;
  FilterShared& sh;
  float* slots;
  bool aligned;
  int slot_count;
  float per_unit, top = 0.0f;
  float2 sum = make_float2(0.0f, 0.0f);

  __device__ __forceinline__ int target_id(int id) const { return a.d2t ? id + static_cast<int>(a.d2t[id]) : id; }

  __device__ __forceinline__ uint32_t word(int target) const {
    const Words4 w = row.words(target / 4);
    const int i = target % 4;
    return i < 2 ? (i == 0 ? w.x[0] : w.x[1]) : (i == 2 ? w.x[2] : w.x[3]);
  }

  // f(x, id, word) for the ids of a group that are candidates.
  template <typename F>
  __device__ __forceinline__ void each(int group, const float (&x)[8], F&& f) const {
    Words4 words[2] = {};
    if (!row.greedy && !a.d2t) words[0] = row.words(group * 2), words[1] = row.words(group * 2 + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(x[i] > negative_infinity<float>())) continue;
      const int id = group * 8 + i;
      f(x[i], id, row.greedy ? 0u : a.d2t ? word(target_id(id)) : words[i / 4].x[i % 4]);
    }
  }

  __device__ __forceinline__ float near(float x, uint32_t word) const {
    return row.greedy ? x : fmaf(x, row.inverse, gumbel_fast(word));
  }
  __device__ __forceinline__ float exact(float x, uint32_t word) const {
    return row.greedy ? x : row.z_of(x) + gumbel(word);
  }

  // False: NaN, +inf, or no candidate.
  __device__ __forceinline__ bool scan_all() {
    RunningSum running;
    bool bad = false;
    float best = negative_infinity<float>();
    for (int slot = threadIdx.x; slot < slot_count; slot += kBlock) {
      float reached = negative_infinity<float>();
      for (int half = 0; half < 2; ++half) {
        const int group = first_group(slot) + 32 * half;
        float x[8];
        unpack8(load8(logits, group, a.vocab, aligned), x);
        bad |= bad8(x);
        running.raise(max8(x), per_unit);
#pragma unroll
        for (int i = 0; i < 8; ++i) running.sum += exp2_fast(fmaf(x[i], per_unit, -running.y_max));
        each(group, x, [&](float value, int, uint32_t bits) { reached = fmaxf(reached, near(value, bits)); });
      }
      slots[slot] = reached;
      best = fmaxf(best, reached);
    }
    top = block_max(best, sh.scratch);
    sum.x = block_max(running.y_max, sh.scratch);
    sum.y = block_sum(running.sum * exp2_fast(running.y_max - sum.x), sh.scratch);
    return !__syncthreads_or(bad) && top > negative_infinity<float>() && top <= 3.4028234e38f;
  }

  // The exact scores of what may be among the k best, sorted; kList + 1 when they do not fit.
  __device__ __forceinline__ int list() {
    const float slack = 1e-3f + 1e-6f * fabsf(top);
    const float bound = slot_bound(sh, slots, slot_count, top, 1.0f, a.k) - slack;
    if (threadIdx.x == 0) sh.listed = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slot_count; slot += kBlock) {
      if (!(slots[slot] >= bound)) continue;
      for (int half = 0; half < 2; ++half) {
        float x[8];
        const int group = first_group(slot) + 32 * half;
        unpack8(load8(logits, group, a.vocab, aligned), x);
        each(group, x, [&](float value, int id, uint32_t bits) {
          if (near(value, bits) < bound) return;
          const int at = atomicAdd(&sh.listed, 1);
          if (at < kList) sh.list[at] = pack_entry(exact(value, bits), id);
        });
      }
    }
    __syncthreads();
    const int listed = sh.listed;
    if (listed > kList) return kList + 1;
    block_sort(sh.list, listed);
    return listed;
  }

  // Thousands of equal scores: k rounds, each finding the best entry below the last.
  __device__ __forceinline__ int list_by_rounds() {
    uint64_t last = ~0ull;
    for (int round = 0; round < a.k; ++round) {
      uint64_t best = 0;
      for (int id = threadIdx.x; id < a.vocab; id += kBlock) {
        const float x = widen(logits[id]);
        if (!(x > negative_infinity<float>())) continue;
        const uint64_t entry = pack_entry(exact(x, row.greedy ? 0u : word(target_id(id))), id);
        if (entry < last && entry > best) best = entry;
      }
      __syncthreads();
      if (threadIdx.x == 0) sh.list[round] = 0;
      __syncthreads();
      atomicMax(reinterpret_cast<unsigned long long*>(&sh.list[round]), static_cast<unsigned long long>(best));
      __syncthreads();
      last = sh.list[round];
      if (last == 0) return round;
    }
    return a.k;
  }

  __device__ __forceinline__ void write(int listed) const {
    for (int i = threadIdx.x; i < a.k; i += kBlock) {
      const int64_t at = static_cast<int64_t>(row.row) * a.k + i;
      const bool there = i < listed;
      const int id = there ? entry_id(sh.list[i]) : 0;
      const float logprob = there ? log_probability(widen(logits[id]), per_unit, sum) : negative_infinity<float>();
      a.tokens[at] = there ? target_id(id) : -1;
      a.logprobs[at] = logprob;
      a.scores[at] = there && !row.greedy ? logprob + gumbel(word(target_id(id))) : logprob;
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kBlock) noisy_top_k_kernel(const DraftArgs a) {
  extern __shared__ float slots[];
  __shared__ FilterShared shared;
  Row row{};
  const int r = blockIdx.x;
  row.row = r;
  row.greedy = a.temperature[r] < kGreedyBelow;
  row.temperature = row.greedy ? 1.0f : a.temperature[r];
  row.inverse = __frcp_rn(row.temperature);
  row.key = static_cast<uint64_t>(a.keys[r]);
  row.position = static_cast<uint32_t>(a.positions[r]);
  row.sample = static_cast<uint32_t>(a.samples[r]);
  row.segment = static_cast<uint32_t>(a.segments[r]);
  const T* logits = static_cast<const T*>(a.logits) + r * a.row_stride;
  DraftRow<T> state{a, row, logits, shared, slots, reinterpret_cast<uintptr_t>(logits) % 16 == 0, slots_of(a.vocab),
                    kLog2e / row.temperature};
  int listed = 0;
  if (state.scan_all()) {
    listed = state.list();
    if (listed > kList) listed = state.list_by_rounds();
  }
  __syncthreads();
  state.write(listed);
}

template <typename T>
void launch(const DraftArgs& a, cudaStream_t stream) {
  const int bytes = slots_of(a.vocab) * static_cast<int>(sizeof(float));
  check(cudaFuncSetAttribute(noisy_top_k_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "noisy_top_k: shared memory");
  noisy_top_k_kernel<T><<<a.rows, kBlock, bytes, stream>>>(a);
  check_launch("noisy_top_k");
}

}  // namespace

void noisy_top_k(const DraftArgs& a, uint64_t stream) {
  if (a.rows == 0 || a.k == 0) return;
  switch (a.dtype) {
    case Dtype::kFloat32: launch<float>(a, as_stream(stream)); break;
    case Dtype::kFloat16: launch<__half>(a, as_stream(stream)); break;
    case Dtype::kBfloat16: launch<__nv_bfloat16>(a, as_stream(stream)); break;
  }
}

}  // namespace tlt::cuda
