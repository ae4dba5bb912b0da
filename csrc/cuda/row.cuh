// One row of the sampler: its parameters, the steps before the temperature, its noise, and the running argmax.
#pragma once
#include "common.cuh"
#include "philox.h"
#include "sample.h"

namespace tlt::cuda {

constexpr float kGreedyBelow = 1e-5f;  // params.GREEDY_BELOW
constexpr int kMaxBranch = 128;        // tokens of a node's branch: a draft tree has at most 128 nodes
constexpr int kTouchedBits = 8192;

// Ids that a bias list or the node's own branch may change, as a bitmap over id % 8192 in shared memory: nearly all ids
// skip both lists after one bit test.
struct Touched {
  uint32_t bits[kTouchedBits / 32];
  int32_t branch[kMaxBranch];
  int32_t branch_len;

  __device__ __forceinline__ bool test(int id) const { return bits[(id % kTouchedBits) / 32] >> (id % 32) & 1u; }
};

struct Row {
  int row;
  bool greedy;
  float temperature;  // 1 for greedy rows, whose log-probabilities are those of temperature 1
  float inverse;      // 1 / temperature, correctly rounded
  int top_k;          // 0 = off
  float top_p, min_p; // 1, 0 = off
  uint64_t key;
  uint32_t position, sample, segment;

  // x / temperature, correctly rounded (Markstein: two corrections of x * RN(1 / t)) where no intermediate over- or
  // underflows; a fraction of the division's instructions, and as many logits as the row has need it.
  __device__ __forceinline__ float z_of(float x) const {
    const float q = x * inverse, better = fmaf(fmaf(-temperature, q, x), inverse, q);
    return fmaf(fmaf(-temperature, better, x), inverse, better);
  }
  __device__ __forceinline__ bool filtered() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  __device__ __forceinline__ Words4 words(int block) const {
    return noise_words(key, position, static_cast<uint32_t>(block), 0, sample, segment);
  }
  __device__ __forceinline__ float noise(int id) const {
    const Words4 w = words(id / 4);
    const int i = id % 4;
    return gumbel_from_word(i < 2 ? (i == 0 ? w.x[0] : w.x[1]) : (i == 2 ? w.x[2] : w.x[3]));
  }
};

__device__ __forceinline__ Row load_row(const SampleArgs& a, int r) {
  Row row;
  const float t = a.temperature[r];
  row.row = r;
  row.greedy = t < kGreedyBelow;
  row.temperature = row.greedy ? 1.0f : t;
  row.inverse = __frcp_rn(row.temperature);
  row.top_k = a.top_k && !row.greedy ? a.top_k[r] : 0;
  if (row.top_k >= a.limit) row.top_k = 0;
  row.top_p = a.top_p && !row.greedy ? a.top_p[r] : 1.0f;
  row.min_p = a.min_p && !row.greedy ? a.min_p[r] : 0.0f;
  row.key = static_cast<uint64_t>(a.keys[r]);
  row.position = static_cast<uint32_t>(a.positions[r]);
  row.sample = static_cast<uint32_t>(a.samples[r]);
  row.segment = static_cast<uint32_t>(a.segments[r]);
  return row;
}

__host__ __device__ __forceinline__ bool penalised(const SampleArgs& a) {
  return a.repetition || a.presence || a.frequency;
}

// Whether any logit may change before the temperature; the kernels are compiled with and without.
inline bool has_mods(const SampleArgs& a) {
  return a.allowed_row || a.bias_row || (penalised(a) && (a.history_row || a.parent_row));
}

// All threads of the block; ends with a barrier.
__device__ __forceinline__ void fill_touched(const SampleArgs& a, int r, Touched& touched) {
  for (int i = threadIdx.x; i < kTouchedBits / 32; i += blockDim.x) touched.bits[i] = 0;
  if (threadIdx.x == 0) {
    int n = 0;
    if (a.parent_row && penalised(a)) {
      for (int node = r; a.parent_row[node] >= 0 && n < kMaxBranch; node = a.parent_row[node]) {
        const int64_t id = a.node_tokens[node];
        if (id >= 0 && id < a.limit) touched.branch[n++] = static_cast<int32_t>(id);
      }
    }
    touched.branch_len = n;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < touched.branch_len; i += blockDim.x) {
    const int bit = touched.branch[i] % kTouchedBits;
    atomicOr(&touched.bits[bit / 32], 1u << bit % 32);
  }
  const int list = a.bias_row ? a.bias_row[r] : -1;
  if (list >= 0) {
    for (int i = a.bias_indptr[list] + threadIdx.x; i < a.bias_indptr[list + 1]; i += blockDim.x) {
      if (a.bias_ids[i] < 0) continue;
      const int bit = static_cast<int>(a.bias_ids[i] % kTouchedBits);
      atomicOr(&touched.bits[bit / 32], 1u << bit % 32);
    }
  }
  __syncthreads();
}

// Allowed mask, bias and penalties of one logit: everything before the temperature. -inf = not a candidate.
__device__ __forceinline__ float modified(const SampleArgs& a, int r, const Touched& touched, int id, float x) {
  if (id >= a.limit) return negative_infinity<float>();
  const int mask = a.allowed_row ? a.allowed_row[r] : -1;
  if (mask >= 0 && !(static_cast<uint32_t>(a.allowed_bits[mask * a.allowed_words + id / 32]) >> (id % 32) & 1u)) {
    return negative_infinity<float>();
  }
  const int history = a.history_row && penalised(a) ? a.history_row[r] : -1;
  uint32_t count = history >= 0 ? a.counts[static_cast<int64_t>(history) * a.vocab + id] : 0u;
  if (touched.test(id)) {
    const int list = a.bias_row ? a.bias_row[r] : -1;
    if (list >= 0) {
      for (int i = a.bias_indptr[list]; i < a.bias_indptr[list + 1]; ++i) {
        if (a.bias_ids[i] == id) x += a.bias_values[i];
      }
    }
    for (int i = 0; i < touched.branch_len; ++i) count += touched.branch[i] == id;
  }
  if (count) {
    const float output = static_cast<float>(count & 0x7fffffffu);
    if (a.repetition) x = x > 0.0f ? __fdiv_rn(x, a.repetition[r]) : x * a.repetition[r];
    if (a.frequency && output > 0.0f) x -= a.frequency[r] * output;
    if (a.presence && output > 0.0f) x -= a.presence[r];
  }
  return x;
}

__device__ __forceinline__ float modified_at(const SampleArgs& a, int r, const Touched& touched, bool mods, int id,
                                             float x) {
  if (mods) return modified(a, r, touched, id, x);
  return id < a.limit ? x : negative_infinity<float>();
}

// True when one of the eight is NaN or +inf.
__device__ __forceinline__ bool bad8(const float (&x)[8]) {
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) bad |= !(x[i] <= 3.4028234e38f);
  return bad;
}

template <bool kMods>
__device__ __forceinline__ void modify8(const SampleArgs& a, int r, const Touched* touched, int group, float (&x)[8]) {
  if constexpr (kMods) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = modified(a, r, *touched, group * 8 + i, x[i]);
  } else if (group * 8 + 8 > a.limit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (group * 8 + i >= a.limit) x[i] = negative_infinity<float>();
    }
  }
}

// Out of line: taken a few times a warp, and inlined its doubles would cost every kernel registers.
static __device__ __noinline__ float gumbel(uint32_t word) { return gumbel_from_word(word); }

struct Best {
  float score;
  int32_t id;
  float x;  // the winner's logit before the temperature
  float unused;
};

__device__ __forceinline__ Best no_best() { return {negative_infinity<float>(), 0x7fffffff, 0.0f, 0.0f}; }

__device__ __forceinline__ bool beats(const Best& a, const Best& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    Best other;
    other.score = __shfl_xor_sync(kAll, best.score, offset);
    other.id = __shfl_xor_sync(kAll, best.id, offset);
    other.x = __shfl_xor_sync(kAll, best.x, offset);
    if (beats(other, best)) best = other;
  }
  return best;
}

// The running argmax of a warp. A score needs its two logs only where the token can still win: g = -log(E) <= -log(w),
// so a win needs w <= exp(z - best), tested on the raw word with the exp that the log-sum-exp takes anyway.
struct Argmax {
  Best lane = no_best();
  float warp = negative_infinity<float>();  // the best score of any lane so far
  float scale = 0.0f;

  // y_max: z over the temperature in powers of two, the base of p in consider(). The slack covers the fast exp and the
  // rounding of scores: 2 ulp of either operand and 1e-3.
  __device__ __forceinline__ void rescale(float y_max) {
    const float best = warp * kLog2e;
    const float slack = 1e-3f + 0x1p-21f * (fabsf(y_max) + fminf(fabsf(best), 1e30f));
    scale = exp2_fast(fminf(y_max - best + slack + 32.0f, 126.0f));
  }

  // x[8]: logits of `group`; p[i] = 2^(y_i - y_max), top the largest p of this lane's eight.
  __device__ __forceinline__ void consider(const Row& row, int group, const float (&x)[8], const float (&p)[8],
                                           float top, float y_max) {
    if (!__any_sync(kAll, top * scale >= 0.5f)) return;  // even the luckiest word, w = 2^-33, cannot win
    uint32_t words[8];
    const Words4 low = row.words(group * 2), high = row.words(group * 2 + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = low.x[i], words[i + 4] = high.x[i];
    uint32_t candidates = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) candidates |= (static_cast<float>(words[i]) <= p[i] * scale) ? 1u << i : 0u;
    if (!__any_sync(kAll, candidates != 0)) return;
    while (candidates) {
      const int i = __ffs(static_cast<int>(candidates)) - 1;
      candidates &= candidates - 1;
      const float logit = pick8(x, i);
      const float score = row.z_of(logit) + gumbel(pick8(words, i));
      if (score > lane.score) lane = {score, group * 8 + i, logit, 0.0f};
    }
    __syncwarp();
    warp = warp_max(lane.score);
    rescale(y_max);
  }

  // Greedy: the logit is the score. top: the largest of x.
  __device__ __forceinline__ void consider_greedy(int group, const float (&x)[8], float top) {
    if (!__any_sync(kAll, top > warp)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (x[i] > lane.score) lane = {x[i], group * 8 + i, x[i], 0.0f};
    }
    warp = warp_max(lane.score);
  }
};

__device__ __forceinline__ float max8(const float (&x)[8]) {
  float m = x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) m = fmaxf(m, x[i]);
  return m;
}

// Sum of 2^(y - y_max) with y_max the running maximum of all lanes: lanes agree on y_max, so that the bound above needs
// one scale a warp. Base and order depend on the row's logits only. NaN and +inf make the sum NaN.
struct RunningSum {
  float x_max = -1e37f;  // finite, so that a run of -inf sums to 0
  float y_max = -1e37f;
  float sum = 0.0f;

  __device__ __forceinline__ bool raise(float top, float per_unit) {
    if (!__any_sync(kAll, top > x_max)) return false;
    x_max = fmaxf(x_max, warp_max(top));
    const float raised = x_max * per_unit;
    sum *= exp2_fast(y_max - raised);
    y_max = raised;
    return true;
  }
};

}  // namespace tlt::cuda
