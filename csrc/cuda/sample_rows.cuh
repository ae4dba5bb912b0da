// The unfiltered sampler: rows without min-p, top-k and top-p, greedy rows among them.
//
// A row is cut into strips of kStrip ids. A warp handles whole strips; each strip's sum of exponentials depends on the
// strip alone, and the last block of a row adds the strips in order: the result does not depend on how many blocks
// share a row, nor on the batch. Logits are read once; nothing of the row's size is written.
#pragma once
#include "row.cuh"

namespace tlt::cuda {

constexpr int kStrip = 2048;  // 8 steps of 32 lanes x 8 logits: 75 strips for a vocabulary of 151,936
constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;
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

template <typename T, bool kMods>
struct StripScan {
  const SampleArgs& a;
  const Row& row;
  const Touched* touched;
  const T* logits;
  bool aligned;
  bool want_raw;
  float per_unit;  // log2(e) / temperature

  __device__ __forceinline__ void group(int g, const Raw8<T>& raw, RunningSum& sum, RunningSum& raw_sum,
                                        Argmax& argmax) const {
    float x[8], p[8];
    unpack8(raw, x);
    if (want_raw) {
      raw_sum.raise(max8(x), kLog2e);
#pragma unroll
      for (int i = 0; i < 8; ++i) raw_sum.sum += exp2_fast(fmaf(x[i], kLog2e, -raw_sum.y_max));
    }
    // Elsewhere NaN and +inf reach the sum by themselves.
    if ((kMods || g * 8 + 8 > a.limit) && bad8(x)) sum.sum = __uint_as_float(0x7fc00000u);
    modify8<kMods>(a, row.row, touched, g, x);
    const float top = max8(x);
    if (sum.raise(top, per_unit)) argmax.rescale(sum.y_max);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[i] = exp2_fast(fmaf(x[i], per_unit, -sum.y_max));
      sum.sum += p[i];
    }
    if (row.greedy) {
      argmax.consider_greedy(g, x, top);
    } else {
      argmax.consider(row, g, x, p, exp2_fast(fmaf(top, per_unit, -sum.y_max)), sum.y_max);
    }
  }

  // Two loads are in flight while a third is worked on: 48 bytes a lane hide the latency of HBM at 50 % occupancy.
  __device__ __forceinline__ StripSum strip(int s, Argmax& argmax) const {
    constexpr int kSteps = kStrip / 256;
    const int first = s * (kStrip / 8) + static_cast<int>(threadIdx.x % 32);
    RunningSum sum, raw_sum;
    Raw8<T> next = load8(logits, first, a.vocab, aligned), after = load8(logits, first + 32, a.vocab, aligned);
#pragma unroll 1  // eight copies of the body would not fit the instruction cache
    for (int step = 0; step < kSteps; ++step) {
      const Raw8<T> raw = next;
      next = after;
      if (step + 2 < kSteps) after = load8(logits, first + (step + 2) * 32, a.vocab, aligned);
      group(first + step * 32, raw, sum, raw_sum, argmax);
    }
    return {sum.y_max, warp_sum(sum.sum), raw_sum.y_max, want_raw ? warp_sum(raw_sum.sum) : 0.0f};
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
      x = modified(a, r, *touched, static_cast<int>(token), x);
    } else if (token >= a.limit) {
      x = negative_infinity<float>();
    }
  }
  a.tokens[r] = token;
  a.logprobs[r] = valid ? log_probability(x, per_unit, sum) : nan;
  write_raw(a, r, logits, token, raw);
}

template <typename T, bool kMods>
__global__ void __launch_bounds__(kRowThreads, 4) sample_rows(const SampleArgs a, const RowWorkspace w) {
  const int r = blockIdx.y, splits = gridDim.x;
  const Row row = load_row(a, r);
  if (row.filtered()) return;  // sample_filtered draws it
  __shared__ Touched touched;
  __shared__ Best warp_bests[kRowWarps];
  __shared__ bool last;
  if constexpr (kMods) fill_touched(a, r, touched);

  const T* logits = static_cast<const T*>(a.logits) + r * a.row_stride;
  const float per_unit = row.greedy ? kLog2e : kLog2e / row.temperature;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  const StripScan<T, kMods> scan{a, row, &touched, logits, aligned, a.raw_logprobs != nullptr, per_unit};
  const int warp = threadIdx.x / 32, strips = strips_of(a.vocab), stride = splits * kRowWarps;
  Argmax argmax;
  for (int s = warp * splits + blockIdx.x; s < strips; s += stride) {
    const StripSum sum = scan.strip(s, argmax);
    if (threadIdx.x % 32 == 0) w.strips[static_cast<int64_t>(r) * strips_of(a.vocab) + s] = sum;
  }
  const Best mine = warp_best(argmax.lane);
  if (threadIdx.x % 32 == 0) warp_bests[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Best best = warp_bests[0];
    for (int i = 1; i < kRowWarps; ++i) {
      if (beats(warp_bests[i], best)) best = warp_bests[i];
    }
    w.best[static_cast<int64_t>(r) * kMaxSplits + blockIdx.x] = best;
  }
  __threadfence();  // the strips and the best are visible before the arrival is
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(a.arrived + r, 1u) == static_cast<unsigned>(splits) - 1u;
    if (last) a.arrived[r] = 0;  // ready for the next call, a graph's replay included
  }
  __syncthreads();
  if (last && warp == 0) {
    __threadfence();
    finish_row<T, kMods>(a, row, &touched, logits, w, splits, per_unit);
  }
}

}  // namespace tlt::cuda
