// The unfiltered sampler: rows without min-p, top-k and top-p, greedy rows among them.
//
// A row is cut into strips of kStrip ids. A warp handles whole strips; each strip's sum of exponentials depends on the
// strip alone, and the last block of a row adds the strips in order: the result does not depend on how many blocks
// share a row, nor on the batch. Logits are read once; nothing of the row's size is written.
#pragma once
#include "row.cuh"

namespace tlt::cuda {

constexpr int kStripGroups = 4;                // groups of 8 logits a lane holds at once, all loaded together
constexpr int kStrip = 256 * kStripGroups;     // 149 strips for a vocabulary of 151,936
constexpr int kRowThreads = 384;
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kRowBlocks = 2;   // a multiprocessor holds: 80 registers a thread
constexpr int kMaxSplits = 32;  // blocks a row at most

inline __host__ __device__ int strips_of(int vocab) { return (vocab + kStrip - 1) / kStrip; }

struct StripSum {
  float y_max, sum, raw_max, raw_sum;
};

// Workspace: best [R, kMaxSplits], strips [R, S].
struct RowWorkspace {
  Best* best;
  StripSum* strips;
};

inline RowWorkspace row_workspace(void* workspace, int rows) {
  Best* best = static_cast<Best*>(workspace);
  return {best, reinterpret_cast<StripSum*>(best + static_cast<int64_t>(rows) * kMaxSplits)};
}

// A lane's part of a strip: groups first + 32 j of 8 logits.
template <typename T>
struct Held {
  Raw8<T> raw[kStripGroups];

  // Whole strips of aligned rows are 16-byte loads without a condition; anything else is -inf beyond `n`.
  __device__ __forceinline__ void load(const T* logits, int first, int n, bool whole) {
    if (whole) {
      const uint4* source = reinterpret_cast<const uint4*>(logits + first * 8);
      constexpr int kQuads = static_cast<int>(sizeof(T) / 2);
#pragma unroll
      for (int j = 0; j < kStripGroups; ++j) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) raw[j].q[i] = __ldg(source + 32 * kQuads * j + i);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kStripGroups; ++j) raw[j] = load8(logits, first + 32 * j, n, false);
    }
  }

  // -inf from column n on.
  __device__ __forceinline__ void cut_off(int first, int n) {
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
      T* x = reinterpret_cast<T*>(&raw[j]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((first + 32 * j) * 8 + i >= n) x[i] = negative_infinity<T>();
      }
    }
  }

  // The same of a whole strip by way of shared memory: `place` is the lane's, and asked for and taken by no other.
  static __device__ __forceinline__ void request(const T* logits, int first, uint4* place) {
    const uint4* source = reinterpret_cast<const uint4*>(logits + first * 8);
    constexpr int kQuads = static_cast<int>(sizeof(T) / 2);
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) start_copy(place + 32 * (kQuads * j + i), source + 32 * kQuads * j + i);
    }
  }

  __device__ __forceinline__ void take(const uint4* place) {
    constexpr int kQuads = static_cast<int>(sizeof(T) / 2);
    copies_done();
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) raw[j].q[i] = place[32 * (kQuads * j + i)];
    }
  }
};

template <typename T, bool kMods>
struct StripScan {
  using H = std::conditional_t<kMods, float, T>;  // what is held: changed logits no longer fit their type
  const SampleArgs& a;
  const Row& row;
  const Touched* touched;
  const T* logits;
  bool aligned;
  float per_unit;  // log2(e) / temperature

  // Processed logits of one group, read again: few are.
  __device__ __forceinline__ void again(int group, float (&x)[8]) const {
    unpack8(load8(logits, group, a.vocab, aligned), x);
    modify8<kMods>(a, row.row, touched, group, x);
  }

  // Sum of 2^(y - y_max) over the lane's logits, and over each group.
  template <typename U>
  static __device__ __forceinline__ float sum(const Held<U>& held, float unit, float y_max, float (&s8)[kStripGroups]) {
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
      float x[8];
      unpack8(held.raw[j], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = exp2_fast(fmaf(x[i], unit, -y_max));
      s8[j] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
    return (s8[0] + s8[1]) + (s8[2] + s8[3]);
  }

  static __device__ __forceinline__ float y_of_max(float top, float unit) { return fmaxf(top * unit, -1e37f); }

  static __device__ __forceinline__ int first_of(int s) {
    return s * (kStrip / 8) + static_cast<int>(threadIdx.x % 32);
  }
  __device__ __forceinline__ bool whole(int s) const { return aligned && (s + 1) * kStrip <= a.limit; }

  // The lane's logits, processed. True when one is NaN or +inf, where that would not reach the sum by itself.
  __device__ __forceinline__ bool process(int s, int first, const Held<T>& raw, Held<H>& held, StripSum& sums) const {
    if (a.raw_logprobs) {
      float s8[kStripGroups];
      sums.raw_max = y_of_max(warp_max(max_raw<false>(raw.raw)), kLog2e);
      sums.raw_sum = warp_sum(sum(raw, kLog2e, sums.raw_max, s8));
    }
    bool bad = false;
    if constexpr (kMods) {
#pragma unroll
      for (int j = 0; j < kStripGroups; ++j) {
        float x[8];
        unpack8(raw.raw[j], x);
        bad |= bad8(x);
        modify8<true>(a, row.row, touched, first + 32 * j, x);
        float* to = reinterpret_cast<float*>(&held.raw[j]);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = x[i];
      }
    } else {
      held = raw;
      if ((s + 1) * kStrip > a.limit) {
#pragma unroll
        for (int j = 0; j < kStripGroups; ++j) {
          float x[8];
          unpack8(raw.raw[j], x);
          bad |= bad8(x);
        }
        held.cut_off(first, a.limit);
      }
    }
    return bad;
  }

  // Greedy: the logit is the score. Strips come in ascending order, so only a larger maximum changes the best.
  __device__ __forceinline__ void greedy(const Held<H>& held, int first, float top, Argmax& argmax) const {
    if (!(top > argmax.bound)) return;
    uint32_t lowest = 0x7fffffff;
#pragma unroll
    for (int j = kStripGroups - 1; j >= 0; --j) {
      float x[8];
      unpack8(held.raw[j], x);
#pragma unroll
      for (int i = 7; i >= 0; --i) lowest = x[i] == top ? (first + 32 * j) * 8 + i : lowest;
    }
    argmax.bound = top;
    argmax.x = top, argmax.id = static_cast<int32_t>(__reduce_min_sync(kAll, lowest));
  }

  // found: the row's bound on the best score, as far as it is known.
  __device__ __forceinline__ StripSum strip(int s, const Held<T>& raw, Argmax& argmax, uint32_t found,
                                            uint32_t* shared_bound) const {
    const int first = first_of(s);
    StripSum sums{0.0f, 0.0f, 0.0f, 0.0f};
    Held<H> held;
    const bool bad = process(s, first, raw, held, sums);
    const float top = warp_max(max_raw<false>(held.raw));
    sums.y_max = y_of_max(top, per_unit);
    float s8[kStripGroups];
    const float lane_sum = sum(held, per_unit, sums.y_max, s8);
    sums.sum = warp_sum(bad ? __uint_as_float(0x7fc00000u) : lane_sum);
    if (top == negative_infinity<float>()) return sums;
    if (row.greedy) {
      greedy(held, first, top, argmax);
    } else {
      const float before = fmaxf(argmax.bound, bound_of(found));
      argmax.bound = before;
      const auto logits_of = [&](int g, float(&x)[8]) { again(g, x); };
      argmax.strip<kStripGroups>(row, first, s8, per_unit, sums.y_max, logits_of, logits_of,
                                 [&](float bound) { return share_bound(shared_bound, bound); },
                                 [&](float x, uint32_t bits, int at) { argmax.offer(row, x, bits, at); });
      if (threadIdx.x % 32 == 0 && argmax.bound > before) atomicMax(shared_bound, ordered_key(argmax.bound));
    }
    return sums;
  }
};

// Adds the strips of a row in a fixed order. One warp; returns (maximum, sum) to every lane.
__device__ __forceinline__ float2 merge_strips(const StripSum* strips, int count, bool raw) {
  float top = -1e37f;
  bool bad = false;
  for (int s = threadIdx.x % 32; s < count; s += 32) {
    const float m = raw ? __ldcg(&strips[s].raw_max) : __ldcg(&strips[s].y_max);
    bad |= !(m <= 3.4028234e38f);
    top = fmaxf(top, m);
  }
  top = warp_max(top);
  float sum = 0.0f;
  for (int s = threadIdx.x % 32; s < count; s += 32) {
    const float m = raw ? __ldcg(&strips[s].raw_max) : __ldcg(&strips[s].y_max);
    sum += (raw ? __ldcg(&strips[s].raw_sum) : __ldcg(&strips[s].sum)) * exp2_fast(m - top);
  }
  if (bad) sum = __uint_as_float(0x7fc00000u);
  return make_float2(top, warp_sum(sum));
}

// Log-probability of a logit under a sum of 2^(y - y_max). The difference to the maximum is taken in one rounding.
__device__ __forceinline__ float log_probability(float x, float per_unit, float2 sum) {
  return fmaf(fmaf(x, per_unit, -sum.x), kLn2, -logf(sum.y));
}

// Writes one row's results. One thread. x: the token's logit before the temperature.
template <typename T>
__device__ __forceinline__ void write_raw(const SampleArgs& a, int r, const T* logits, int64_t token, float2 raw) {
  if (!a.raw_logprobs) return;
  a.raw_logprobs[r] = token >= 0 ? log_probability(widen(logits[token]), kLog2e, raw) : __uint_as_float(0x7fc00000u);
}

template <typename T, bool kMods>
__device__ __forceinline__ void finish_row(const SampleArgs& a, const Row& row, const Touched* touched,
                                           const T* logits, const RowWorkspace& w, int splits, float per_unit) {
  const int lane = threadIdx.x % 32, strips = strips_of(a.vocab), r = row.row;
  Best best = no_best();
  if (lane < splits) {
    const float4 stored = __ldcg(reinterpret_cast<const float4*>(w.best + static_cast<int64_t>(r) * kMaxSplits + lane));
    best = {stored.x, __float_as_int(stored.y), stored.z, 0.0f};
  }
  best = warp_best(best);
  const StripSum* sums = w.strips + static_cast<int64_t>(r) * strips;
  const float2 sum = merge_strips(sums, strips, false);
  const float2 raw = a.raw_logprobs ? merge_strips(sums, strips, true) : make_float2(0.0f, 1.0f);
  if (lane != 0) return;
  const float nan = __uint_as_float(0x7fc00000u);
  const bool valid = sum.y > 0.0f && sum.y <= 3.4028234e38f && best.score > negative_infinity<float>();
  int64_t token = valid ? best.id : -1;
  float x = best.x;
  if (valid && a.forced && a.forced[r] >= 0) {
    token = a.forced[r];
    x = widen(logits[token]);
    if constexpr (kMods) {
      x = modified_called(a, r, *touched, static_cast<int>(token), x);
    } else if (token >= a.limit) {
      x = negative_infinity<float>();
    }
  }
  a.tokens[r] = token;
  a.logprobs[r] = valid ? log_probability(x, per_unit, sum) : nan;
  write_raw(a, r, logits, token, raw);
}

template <typename T, bool kMods>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) sample_rows(const __grid_constant__ SampleArgs a,
                                                                       const RowWorkspace w) {
  const int r = blockIdx.y, splits = gridDim.x;
  const Row row = load_row(a, r);
  if (row.filtered()) return;  // sample_filtered draws it
  __shared__ Touched touched;
  __shared__ Best warp_bests[kRowWarps];
  __shared__ uint32_t block_bound;
  __shared__ bool last;
  extern __shared__ uint4 ahead[];  // a strip a warp
  if (threadIdx.x == 0) block_bound = 0;
  if constexpr (kMods) fill_touched(a, r, touched);
  __syncthreads();

  const T* logits = static_cast<const T*>(a.logits) + r * a.row_stride;
  const float per_unit = row.greedy ? kLog2e : kLog2e / row.temperature;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const StripScan<T, kMods> scan{a, row, &touched, logits, aligned, per_unit};
  const int warp = threadIdx.x / 32, strips = strips_of(a.vocab), stride = splits * kRowWarps;
  // The bound is shared by all warps of the row, through memory that nothing but speed depends on.
  uint32_t* const shared_bound = splits > 1 ? a.arrived + a.rows + r : &block_bound;
  uint4* const place = ahead + warp * (kStrip * static_cast<int>(sizeof(T)) / 16) + threadIdx.x % 32;
  const auto request = [&](int s) {
    if (s < strips && scan.whole(s)) Held<T>::request(logits, scan.first_of(s), place);
  };
  Argmax argmax;
  int s = warp * splits + blockIdx.x;
  request(s);
  uint32_t seen = 0;  // by one lane, a strip ago: a read of global memory takes as long as the strip
  for (; s < strips; s += stride) {
    Held<T> raw;
    if (scan.whole(s)) {
      raw.take(place);
    } else {
      raw.load(logits, scan.first_of(s), a.vocab, false);
    }
    request(s + stride);
    const uint32_t found = __shfl_sync(kAll, seen, 0);
    if (threadIdx.x % 32 == 0) seen = *static_cast<volatile uint32_t*>(shared_bound);
    const StripSum sum = scan.strip(s, raw, argmax, found, shared_bound);
    if (threadIdx.x % 32 == 0) w.strips[static_cast<int64_t>(r) * strips + s] = sum;
  }
  Best mine = row.greedy ? Best{argmax.bound, argmax.id, argmax.x, 0.0f} : warp_best(argmax.best(row));
  if (threadIdx.x % 32 == 0) warp_bests[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Best best = warp_bests[0];
    for (int i = 1; i < kRowWarps; ++i) {
      if (beats(warp_bests[i], best)) best = warp_bests[i];
    }
    w.best[static_cast<int64_t>(r) * kMaxSplits + blockIdx.x] = best;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = splits == 1 || arrive(a.arrived + r) == static_cast<unsigned>(splits) - 1u;
    if (last && splits > 1) a.arrived[r] = 0, *shared_bound = 0;  // ready for the next call, a graph's replay included
  }
  __syncthreads();
  if (last && warp == 0) finish_row<T, kMods>(a, row, &touched, logits, w, splits, per_unit);
}

}  // namespace tlt::cuda
