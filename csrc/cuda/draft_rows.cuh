// A pass over the row keeps the largest score of every 16 columns (a slot), with logs good to 1e-4; the k-th largest of
// those bounds the k-th largest score, and only what reaches it is scored exactly and sorted.
//
// Rows without filters: several blocks make the pass, strip by strip, and the last of them does the rest; sums depend
// on the strips alone, so results do not depend on how many blocks share a row. Filtered rows: one block, which
// processes and cuts the row as the filtered sampler does it, then makes the pass over what is left.
#pragma once
#include "draft.h"
#include "sample_filtered.cuh"

namespace tlt::cuda {

constexpr int kDraftSplits = 32;   // blocks a row at most
constexpr int kDraftStrip = 256;  // columns a warp takes at once; four make one of the sampler's strips

inline __host__ __device__ int draft_strips(int columns) { return strips_of(columns) * (kStrip / kDraftStrip); }

// Workspace: slots [R, slots_of(columns)], strips [R, draft_strips(columns)] (maximum, sum).
struct DraftWorkspace {
  float* slots;
  float2* strips;
};

inline DraftWorkspace draft_rows_workspace(void* workspace, int rows, int columns) {
  float* slots = static_cast<float*>(workspace);
  return {slots, reinterpret_cast<float2*>(slots + static_cast<int64_t>(rows) * slots_of(columns))};
}

template <typename T, bool kMods>
struct DraftRow {
  using Filtered = FilteredRow<T, kMods>;
  const DraftArgs& a;
  Filtered& f;
  typename Filtered::Kept kept;
  bool noise;
  bool shared;  // several blocks made the slots: 16 columns side by side, where the filtered sampler's are two groups
  float top = negative_infinity<float>();
  float2 sum = make_float2(0.0f, 0.0f);

  __device__ __forceinline__ float logit(int column) const {
    return modified_at(a.rows, f.row.row, *f.touched, kMods, column, widen(f.logits[column]));
  }

  // visit(x, column, word) for the columns of a group that are candidates.
  template <typename F>
  __device__ __forceinline__ void each(int group, F&& visit) const {
    float x[8];
    f.again(kept, group, x);
    score(x, group, visit);
  }

  template <typename F>
  __device__ __forceinline__ void score(const float (&x)[8], int group, F&& visit) const {
    const bool mapped = noise && a.rows.d2t;
    Words4 words[2] = {};
    int targets[8] = {};
    if (mapped) {
      targets8(a.rows, group, targets);
    } else if (noise) {
      words[0] = f.row.words(group * 2), words[1] = f.row.words(group * 2 + 1);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(x[i] > negative_infinity<float>())) continue;
      visit(x[i], group * 8 + i, mapped ? f.row.word(targets[i]) : words[i / 4].x[i % 4]);
    }
  }

  __device__ __forceinline__ float near(float x, uint32_t word) const {
    return fmaf(x, f.row.inverse, noise ? gumbel_fast(word) : 0.0f);
  }
  __device__ __forceinline__ float exact(float x, uint32_t word) const {
    return noise ? f.row.z_of(x) + gumbel(word) : f.row.z_of(x);
  }

  // One strip, one warp: a group of 8 columns a lane, a slot for each two lanes.
  __device__ __forceinline__ void score_strip(int s, const DraftWorkspace& out) const {
    const int lane = static_cast<int>(threadIdx.x % 32), group = s * (kDraftStrip / 8) + lane;
    float x[8];
    unpack8(load8(f.logits, group, f.columns, f.aligned), x);
    bool bad = bad8(x);
    modify8<kMods>(a.rows, f.row.row, f.touched, group, x);
    if (kMods) bad |= max8(x) > 3.4028234e38f;
    const float y_max = StripScan<T, kMods>::y_of_max(warp_max(max8(x)), f.per_unit);
    float mass = 0.0f, reached = negative_infinity<float>();
    score(x, group, [&](float logit, int, uint32_t bits) {
      mass += exp2_fast(fmaf(logit, f.per_unit, -y_max));
      reached = fmaxf(reached, near(logit, bits));
    });
    mass = warp_sum(bad ? __uint_as_float(0x7fc00000u) : mass);
    reached = fmaxf(reached, __shfl_xor_sync(kAll, reached, 1));
    const int64_t r = f.row.row;
    if (lane % 2 == 0) out.slots[r * f.slot_count + s * (kDraftStrip / 16) + lane / 2] = reached;
    if (lane == 0) out.strips[r * draft_strips(f.columns) + s] = make_float2(y_max, mass);
  }

  // What the strips of all blocks have left. False: the row holds NaN or +inf, or no candidate.
  __device__ __forceinline__ bool gather(const DraftWorkspace& from) {
    const float4* slots = reinterpret_cast<const float4*>(from.slots + static_cast<int64_t>(f.row.row) * f.slot_count);
    for (int i = threadIdx.x; i < f.slot_count / 4; i += kBlock) {
      const float4 four = __ldcg(slots + i);
      reinterpret_cast<float4*>(f.slots)[i] = four;
      top = fmaxf(top, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    }
    const int strips = draft_strips(f.columns);
    const float2* sums = from.strips + static_cast<int64_t>(f.row.row) * strips;
    float2 mine = make_float2(-1e37f, 0.0f);
    for (int s = threadIdx.x; s < strips; s += kBlock) {
      const float2 strip = __ldcg(sums + s);
      const float y_max = fmaxf(mine.x, strip.x);
      mine = make_float2(y_max, mine.y * exp2_fast(mine.x - y_max) + strip.y * exp2_fast(strip.x - y_max));
    }
    top = block_max(top, f.sh.scratch);
    sum.x = block_max(mine.x, f.sh.scratch);
    sum.y = block_sum(mine.y * exp2_fast(mine.x - sum.x), f.sh.scratch);
    return sum.y > 0.0f && sum.y <= 3.4028234e38f;
  }

  // As score_strip, of a row that one block has cut.
  __device__ __forceinline__ void score_kept() {
    const float y_max = f.x_max * f.per_unit;
    float mass = 0.0f;
    __syncthreads();  // the cut has been found with the slots of before
    for (int slot = threadIdx.x; slot < f.slot_count; slot += kBlock) {
      float reached = negative_infinity<float>();
#pragma unroll 1
      for (int half = 0; half < 2 && f.slots[slot] >= kept.least; ++half) {
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

  // A column that may be among the k best.
  struct Candidate {
    int column, target;
    float x;
    uint32_t bits;
    uint64_t entry;  // by its exact score
  };

  // Whether column i % 16 of slot hot[i / 16] reaches the bound.
  __device__ __forceinline__ bool candidate(const int* hot, int i, float bound, Candidate& c) const {
    const int slot = hot[i / 16], apart = first_group(slot) * 8 + i / 8 % 2 * 256 + i % 8;
    c.column = shared ? slot * 16 + i % 16 : apart;
    if (c.column >= f.columns) return false;
    c.target = target_of(a.rows, c.column);  // on its way while the logit is
    c.x = logit(c.column);
    c.bits = noise ? f.row.word(c.target) : 0u;
    if (!(c.x > negative_infinity<float>()) || !f.keeps(kept, c.x, c.column) || near(c.x, c.bits) < bound) return false;
    c.entry = pack_entry(exact(c.x, c.bits), c.column);
    return true;
  }

  __device__ __forceinline__ void push(uint64_t entry) const {
    const int at = atomicAdd(&f.sh.listed, 1);
    if (at < kList) f.sh.list[at] = entry;
  }

  // Ranks what may be among the k best by exact scores and writes the k best: first the slots that reach the bound, by
  // threads that had one each; then a thread for each of their columns. False when they do not fit.
  __device__ __forceinline__ bool rank() const {
    const float slack = 1e-3f + 1e-6f * fabsf(top);
    const float bound = slot_bound(f.sh, f.slots, f.slot_count, top, 1.0f, a.k) - slack;
    int* const hot = reinterpret_cast<int*>(f.sh.more_masses);
    if (threadIdx.x == 0) f.sh.listed = 0, f.sh.bound = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < f.slot_count; slot += kBlock) {
      if (!(f.slots[slot] >= bound)) continue;
      const uint32_t at = atomicAdd(&f.sh.bound, 1u);
      if (at < kBins) hot[at] = slot;
    }
    __syncthreads();
    const int reaching = static_cast<int>(f.sh.bound), columns = reaching * 16;
    if (reaching > kBins) return false;
    Candidate mine;
    if (columns <= kBlock) {  // each thread keeps its own
      const bool there = static_cast<int>(threadIdx.x) < columns && candidate(hot, threadIdx.x, bound, mine);
      if (there) push(mine.entry);
      __syncthreads();
      const int listed = f.sh.listed;
      int better = 0;
      for (int i = 0; there && i < listed; ++i) better += f.sh.list[i] > mine.entry;
      if (there && better < a.k) write(better, mine);
      write_rest(listed);
      return true;
    }
    for (int i = threadIdx.x; i < columns; i += kBlock) {
      if (candidate(hot, i, bound, mine)) push(mine.entry);
    }
    __syncthreads();
    const int listed = f.sh.listed;
    if (listed > kList) return false;
    block_sort(f.sh.list, listed);
    write_listed(listed);
    return true;
  }

  // Thousands of equal scores: k rounds, each finding the best entry below the last.
  __device__ __forceinline__ void rank_by_rounds() {
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
      if (last == 0) return write_listed(round);
    }
    write_listed(a.k);
  }

  __device__ __forceinline__ void write(int place, const Candidate& c) const {
    const int64_t at = static_cast<int64_t>(f.row.row) * a.k + place;
    const float logprob = log_probability(c.x, f.per_unit, sum);
    a.tokens[at] = c.target;
    a.draft_ids[at] = c.column;
    a.logprobs[at] = logprob;
    a.scores[at] = noise ? logprob + gumbel(c.bits) : logprob;
  }

  // The places from `listed` on, of which there are k.
  __device__ __forceinline__ void write_rest(int listed) const {
    for (int i = listed + static_cast<int>(threadIdx.x); i < a.k; i += kBlock) {
      const int64_t at = static_cast<int64_t>(f.row.row) * a.k + i;
      a.tokens[at] = -1, a.draft_ids[at] = -1;
      a.logprobs[at] = a.scores[at] = negative_infinity<float>();
    }
  }

  __device__ __forceinline__ void write_listed(int listed) const {
    for (int i = threadIdx.x; i < min(listed, a.k); i += kBlock) {
      const int column = entry_id(f.sh.list[i]), target = target_of(a.rows, column);
      write(i, {column, target, logit(column), noise ? f.row.word(target) : 0u, 0});
    }
    write_rest(listed);
  }

  // All that is left once the scores are there; not valid: the row has no answer.
  __device__ __forceinline__ void finish(bool valid) {
    if (!valid) return write_rest(0);
    if (!rank()) rank_by_rounds();
  }
};

// Rows without filters. arrived [R], all zero between calls: blocks of the row done.
template <typename T, bool kMods>
__global__ void __launch_bounds__(kBlock, 2) draft_shared_kernel(const __grid_constant__ DraftArgs a,
                                                                 const DraftWorkspace w) {
  extern __shared__ float slots[];
  __shared__ FilterShared shared;
  __shared__ Touched touched;
  __shared__ bool last;
  const int r = blockIdx.y, columns = a.rows.columns, splits = gridDim.x;
  const Row row = load_row(a.rows, r);
  if (row.filtered()) return;  // draft_filtered_kernel's
  if constexpr (kMods) fill_touched(a.rows, r, touched);
  const T* logits = static_cast<const T*>(a.rows.logits) + r * a.rows.row_stride;
  FilteredRow<T, kMods> state{a.rows, row, &touched, logits, shared, slots,
                              reinterpret_cast<uintptr_t>(logits) % 16 == 0, columns, slots_of(columns),
                              kLog2e / row.temperature};
  const Cut all{negative_infinity<float>(), columns};
  DraftRow<T, kMods> draft{a, state, state.kept_by(all), a.noise && !row.greedy, true};
  for (int s = threadIdx.x / 32 * splits + blockIdx.x; s < draft_strips(columns); s += kBlockWarps * splits) {
    draft.score_strip(s, w);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive(a.rows.arrived + r) == static_cast<unsigned>(splits) - 1u;
    if (last) a.rows.arrived[r] = 0;
  }
  __syncthreads();
  if (last) draft.finish(draft.gather(w));
}

template <typename T, bool kMods>
__global__ void __launch_bounds__(kBlock, 2) draft_filtered_kernel(const __grid_constant__ DraftArgs a) {
  extern __shared__ float slots[];
  __shared__ FilterShared shared;
  __shared__ Touched touched;
  const int r = blockIdx.x, columns = a.rows.columns;
  const Row row = load_row(a.rows, r);
  if (!row.filtered()) return;
  if constexpr (kMods) fill_touched(a.rows, r, touched);
  const T* logits = static_cast<const T*>(a.rows.logits) + r * a.rows.row_stride;
  FilteredRow<T, kMods> state{a.rows, row, &touched, logits, shared, slots,
                              reinterpret_cast<uintptr_t>(logits) % 16 == 0, columns, slots_of(columns),
                              kLog2e / row.temperature};
  const bool valid = state.scan_all();
  Cut cut{negative_infinity<float>(), columns};
  if (valid && !state.narrow(cut)) cut = state.slow_cut();
  DraftRow<T, kMods> draft{a, state, state.kept_by(cut), a.noise && !row.greedy, false};
  if (valid) draft.score_kept();
  draft.finish(valid);
}

// Blocks a row: at few rows as many as keep a warp for each strip, at many as fill the device.
inline int draft_splits(const SampleArgs& a) {
  const int each = (draft_strips(a.columns) + 3) / 4;  // four warps a block, one on each of its schedulers
  return max(1, min(min(each, kDraftSplits), 2 * a.processors / a.rows));
}

template <typename T, bool kMods>
void launch_draft(const DraftArgs& a, cudaStream_t stream) {
  const int bytes = slots_of(a.rows.columns) * static_cast<int>(sizeof(float));
  const DraftWorkspace w = draft_rows_workspace(a.rows.workspace, a.rows.rows, a.rows.columns);
  check(cudaFuncSetAttribute(draft_shared_kernel<T, kMods>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "noisy_top_k: shared memory");
  draft_shared_kernel<T, kMods><<<dim3(draft_splits(a.rows), a.rows.rows), kBlock, bytes, stream>>>(a, w);
  check_launch("noisy_top_k");
  if (!a.rows.top_k && !a.rows.top_p && !a.rows.min_p) return;
  check(cudaFuncSetAttribute(draft_filtered_kernel<T, kMods>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "noisy_top_k: shared memory");
  draft_filtered_kernel<T, kMods><<<a.rows.rows, kBlock, bytes, stream>>>(a);
  check_launch("noisy_top_k: filtered rows");
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
