// One row of the sampler: its parameters, the steps before the temperature, its noise, and the running argmax.
#pragma once
#include <type_traits>

#include "common.cuh"
#include "philox.h"
#include "sample.h"

namespace tlt::cuda {

constexpr float kGreedyBelow = 1e-5f;  // params.GREEDY_BELOW
constexpr float kGumbelLeast = -2.82f;  // proved over all words, csrc/cpu/noise.h
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
  RowWords noise;

  // x / temperature, correctly rounded (Markstein: two corrections of x * RN(1 / t)) where no intermediate over- or
  // underflows; a fraction of the division's instructions, and as many logits as the row has need it.
  __device__ __forceinline__ float z_of(float x) const {
    const float q = x * inverse, better = fmaf(fmaf(-temperature, q, x), inverse, q);
    return fmaf(fmaf(-temperature, better, x), inverse, better);
  }
  __device__ __forceinline__ bool filtered() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  __device__ __forceinline__ Words4 words(int block) const { return noise.words(static_cast<uint32_t>(block)); }
  __device__ __forceinline__ uint32_t word(int id) const {
    const Words4 w = words(id / 4);
    const int i = id % 4;
    return i < 2 ? (i == 0 ? w.x[0] : w.x[1]) : (i == 2 ? w.x[2] : w.x[3]);
  }
};

// A word that all lanes hold alike, told to the compiler: the result of a reduction lives in a uniform register.
__device__ __forceinline__ uint32_t uniform(int64_t x) {
#ifdef __CUDA_ARCH__
  return __reduce_or_sync(kAll, static_cast<uint32_t>(x));
#else
  return static_cast<uint32_t>(x);
#endif
}

__device__ __forceinline__ RowWords row_words(int64_t key, int64_t position, int64_t sample, int64_t segment) {
  const uint64_t both = static_cast<uint64_t>(uniform(key >> 32)) << 32 | uniform(key);
  return RowWords::of(both, uniform(position), uniform(sample), uniform(segment), 0);
}

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
  row.noise = row_words(a.keys[r], a.positions[r], a.samples[r], a.segments[r]);
  return row;
}

__host__ __device__ __forceinline__ bool penalised(const SampleArgs& a) {
  return a.repetition || a.presence || a.frequency;
}

// Whether any logit may change before the temperature; the kernels are compiled with and without.
inline bool has_mods(const SampleArgs& a) {
  return a.allowed_row || a.bias_row || (penalised(a) && (a.history_row || a.parent_row || a.branch_tokens)) ||
         (a.d2t && a.limit < a.vocab);
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
    if (a.branch_tokens && penalised(a)) {
      for (int i = 0; i < a.branch_width && n < kMaxBranch; ++i) {
        const int64_t id = a.branch_tokens[static_cast<int64_t>(r) * a.branch_width + i];
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

// The target id of a column; of none beyond the columns.
__device__ __forceinline__ int target_of(const SampleArgs& a, int column) {
  if (!a.d2t) return column;
  if (column >= a.columns) return a.limit;
  return column + static_cast<int>(a.d2t_wide ? static_cast<const int64_t*>(a.d2t)[column]
                                              : static_cast<const int32_t*>(a.d2t)[column]);
}

// The targets of a group of 8 columns.
__device__ __forceinline__ void targets8(const SampleArgs& a, int group, int (&targets)[8]) {
  if (group * 8 + 8 > a.columns || reinterpret_cast<uintptr_t>(a.d2t) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) targets[i] = target_of(a, group * 8 + i);
    return;
  }
  const int4* from = static_cast<const int4*>(a.d2t) + group * (a.d2t_wide ? 4 : 2);
  if (a.d2t_wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int4 two = __ldg(from + i);  // the lower halves of two of int64
      targets[2 * i] = group * 8 + 2 * i + two.x, targets[2 * i + 1] = group * 8 + 2 * i + 1 + two.z;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int4 four = __ldg(from + i);
      targets[4 * i] = group * 8 + 4 * i + four.x, targets[4 * i + 1] = group * 8 + 4 * i + 1 + four.y;
      targets[4 * i + 2] = group * 8 + 4 * i + 2 + four.z, targets[4 * i + 3] = group * 8 + 4 * i + 3 + four.w;
    }
  }
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

// Out of line: inlined at every place and id, ptxas took two minutes for one kernel.
static __device__ __noinline__ float modified_called(const SampleArgs& a, int r, const Touched& touched, int id,
                                                      float x) {
  return modified(a, r, touched, id, x);
}

__device__ __forceinline__ float modified_at(const SampleArgs& a, int r, const Touched& touched, bool mods, int id,
                                             float x) {
  if (mods) return modified_called(a, r, touched, target_of(a, id), x);
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
    for (int i = 0; i < 8; ++i) x[i] = modified_called(a, r, *touched, target_of(a, group * 8 + i), x[i]);
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

__device__ __forceinline__ float bound_of(uint32_t key) {
  return key == 0 ? negative_infinity<float>() : from_key(key);
}

// One lane reads for all: lanes that read apart might differ, and with them the branches around collectives.
__device__ __forceinline__ uint32_t read_bound(const volatile uint32_t* shared) {
  return __shfl_sync(kAll, threadIdx.x % 32 == 0 ? *shared : 0u, 0);
}

// Raises a bound that warps share and returns it. The bound decides what is skipped, never what comes out.
__device__ __forceinline__ float share_bound(uint32_t* shared, float bound) {
  uint32_t key = ordered_key(bound);
  if (threadIdx.x % 32 == 0) key = max(key, atomicMax(shared, key));
  return from_key(__shfl_sync(kAll, key, 0));
}

// The running argmax. A lane keeps the best id offered to it; a warp keeps a bound that the row's best score reaches.
// Which ids are offered: g = -log(E) <= -log(w), so a win needs w <= exp(z - bound), tested on the raw words with the
// exponentials that the log-sum-exp takes anyway: first 8 ids at a time, the least word against the sum of the
// exponentials, then one by one. Scores are compared by fast logs; double ones settle what lies too close for them.
struct Argmax {
  float near = negative_infinity<float>();  // the lane's best score by fast logs
  float x = 0.0f;                           // its logit before the temperature
  uint32_t word = 0;
  int32_t id = 0x7fffffff;
  float bound = negative_infinity<float>();

  // What `near` may be off: 1e-4 of the logs; the roundings of x / T, of g and of the sum.
  static __device__ __forceinline__ float error(float near) { return 1.2e-4f + 3e-7f * (fabsf(near) + 23.0f); }

  // Words w with (float) w <= p * scale(y_max) may win, p = 2^(y - y_max). The slack covers the fast exp and the
  // roundings: 2 ulp of either operand and 1e-3. At most 2^126; below 1/2 no word may.
  __device__ __forceinline__ float scale(float y_max) const {
    const float best = bound * kLog2e;
    const float slack = 1e-3f + 0x1p-21f * (fabsf(y_max) + fminf(fabsf(best), 1e30f));
    return exp2_fast(fminf(y_max - best + slack + 32.0f, 126.0f));
  }

  // The id of the largest z of all reaches this much.
  static __device__ __forceinline__ float least_of_max(float y_max) {
    const float z = y_max * kLn2;
    return z + kGumbelLeast - error(z);
  }

  __device__ __forceinline__ void take(float score, float logit, uint32_t bits, int32_t at) {
    near = score, x = logit, word = bits, id = at;
  }

  __device__ __forceinline__ void offer(const Row& row, float logit, uint32_t bits, int32_t at) {
    const float score = fmaf(logit, row.inverse, gumbel_fast(bits)), apart = 2.0f * error(score);
    if (score > near + apart) {
      take(score, logit, bits, at);
    } else if (score >= near - apart && at != id) {
      const float mine = row.z_of(x) + gumbel(word), other = row.z_of(logit) + gumbel(bits);
      if (other > mine || (other == mine && at < id)) take(score, logit, bits, at);
    }
  }

  // Lanes whose bit 32 j / 32 of `hot` is set look at group first + 32 j; logits_of(group, x[8]) gives its logits, -inf
  // for what is no candidate; take_up(logit, word, id) those that may win. Whole warps; the bound rises.
  template <typename F, typename O>
  __device__ __forceinline__ void consider(const Row& row, uint32_t hot, int first, float per_unit, float y_max,
                                           float most, F&& logits_of, O&& take_up) {
    while (hot) {
      const int group = first + 32 * (__ffs(static_cast<int>(hot)) - 1);
      hot &= hot - 1;
      float logits[8];
      logits_of(group, logits);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Words4 w = row.words(group * 2 + half);
        uint32_t candidates = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(fmaf(logits[4 * half + i], per_unit, -y_max));
          if (static_cast<float>(w.x[i]) <= p * most && p > 0.0f) candidates |= 1u << i;
        }
        while (candidates) {
          const int i = __ffs(static_cast<int>(candidates)) - 1;
          candidates &= candidates - 1;
          const uint32_t bits = i < 2 ? (i == 0 ? w.x[0] : w.x[1]) : (i == 2 ? w.x[2] : w.x[3]);
          take_up(pick8(logits, 4 * half + i), bits, group * 8 + 4 * half + i);
        }
      }
    }
    __syncwarp();
    bound = fmaxf(bound, warp_max(near - error(near)));
  }

  // Something to begin with: each lane offers the one id of its first group that is likeliest to win.
  template <typename F>
  __device__ __forceinline__ void begin(const Row& row, int group, float per_unit, float y_max, F&& logits_of) {
    float logits[8], least = 3.4028234e38f, logit = 0.0f;
    uint32_t bits = 0;
    int32_t at = -1;
    logits_of(group, logits);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Words4 w = row.words(group * 2 + half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // w / p: the least of these is the largest score, but for -log1p(-w) being more than w
        const float ratio = static_cast<float>(w.x[i]) * exp2_fast(fmaf(-logits[4 * half + i], per_unit, y_max));
        if (!(ratio < least)) continue;
        least = ratio, logit = logits[4 * half + i], bits = w.x[i], at = group * 8 + 4 * half + i;
      }
    }
    if (at >= 0) offer(row, logit, bits, at);
    __syncwarp();
    bound = fmaxf(bound, warp_max(near - error(near)));
  }

  // The noise of a strip: groups first + 32 j of each lane, s8[j] the sum of p over group j. share(bound) tells the
  // row's other warps and returns the best bound of all: without it, all of them would look closely at most of their
  // first strips (56 % more instructions at 24 warps a row). What may win goes to take_up; what begins is offered, and
  // comes from sure_of.
  template <int kGroups, typename F, typename G, typename S, typename O>
  __device__ __forceinline__ void strip(const Row& row, int first, const float (&s8)[kGroups], float per_unit,
                                        float y_max, F&& logits_of, G&& sure_of, S&& share, O&& take_up) {
    if (!(bound > negative_infinity<float>())) {
      begin(row, first, per_unit, y_max, sure_of);
      bound = share(bound);
    }
    bound = fmaxf(bound, least_of_max(y_max));
    const float most = scale(y_max);
    if (!(most >= 0.5f)) return;
    uint32_t hot = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const Words4 low = row.words((first + 32 * j) * 2), high = row.words((first + 32 * j) * 2 + 1);
      const uint32_t least = min(min(min(low.x[0], low.x[1]), min(low.x[2], low.x[3])),
                                 min(min(high.x[0], high.x[1]), min(high.x[2], high.x[3])));
      if (static_cast<float>(least) <= s8[j] * most) hot |= 1u << j;
    }
    if (__any_sync(kAll, hot != 0)) consider(row, hot, first, per_unit, y_max, most, logits_of, take_up);
  }

  // The lane's best with its exact score.
  __device__ __forceinline__ Best best(const Row& row) const {
    if (id == 0x7fffffff) return no_best();
    return {row.z_of(x) + gumbel(word), id, x, 0.0f};
  }
};

// The largest of a lane's logits. NaN is passed over (it reaches the sum of exponentials), or with kNan the result.
template <bool kNan, int kGroups>
__device__ __forceinline__ float max_raw(const Raw8<float> (&raw)[kGroups]) {
  float top = negative_infinity<float>();
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const float* x = reinterpret_cast<const float*>(&raw[j]);
#pragma unroll
    for (int i = 0; i < 8; ++i) top = kNan && x[i] != x[i] ? x[i] : top != top ? top : fmaxf(top, x[i]);
  }
  return top;
}

template <bool kNan, typename T, int kGroups>
__device__ __forceinline__ float max_raw(const Raw8<T> (&raw)[kGroups]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair top = *reinterpret_cast<const Pair*>(&raw[0]);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const Pair* x = reinterpret_cast<const Pair*>(&raw[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) top = kNan ? __hmax2_nan(top, x[i]) : __hmax2(top, x[i]);
  }
  const float low = widen(top.x), high = widen(top.y);
  return kNan && low != low ? low : kNan && high != high ? high : fmaxf(low, high);
}

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
