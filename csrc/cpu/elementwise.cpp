#include "cpu/elementwise.h"

#include <cmath>
#include <cstring>

#include "cpu/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TLT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TLT_CLONES
#endif

namespace tlt {
namespace {

constexpr int kLanes = 16;  // partial sums of a row, folded in a fixed order: the same bits on every instruction set
constexpr int64_t kParallelFrom = 1 << 16;  // elements: below it waking a second thread costs more than it saves

int threads_for(int64_t elements, int threads) { return elements < kParallelFrom ? 1 : threads; }

TLT_CLONES float square_sum(const float* x, int64_t width) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  for (int lane = 0; i < width; ++i, ++lane) sums[lane] += x[i] * x[i];
  for (int span = kLanes / 2; span > 0; span /= 2)
    for (int lane = 0; lane < span; ++lane) sums[lane] += sums[lane + span];
  return sums[0];
}

TLT_CLONES void scale_row(const float* x, const float* weight, float scale, int64_t width, float* out) {
  for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
}

void norm_row(const float* x, const float* weight, float eps, int64_t width, float* out) {
  scale_row(x, weight, 1.0f / std::sqrt(square_sum(x, width) / static_cast<float>(width) + eps), width, out);
}

// e^x, x held to [-87.3, 88] (so silu(-1e4) is -6e-35 where it should be 0): 2^n * e^r with |r| <= ln2 / 2 and a polynomial of degree 6, relative error < 3e-7.
inline float exp_clamped(float x) {
  x = x < -87.3f ? -87.3f : (x > 88.0f ? 88.0f : x);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

TLT_CLONES void silu_row(const float* gate, const float* up, int64_t width, float* out) {
  for (int64_t i = 0; i < width; ++i) out[i] = gate[i] / (1.0f + exp_clamped(-gate[i])) * up[i];
}

TLT_CLONES void rotate_head(const float* x, const float* cos, const float* sin, int64_t rotary, int64_t head_dim,
                            float* out) {
  const int64_t half = rotary / 2;
  for (int64_t j = 0; j < half; ++j) out[j] = x[j] * cos[j] + x[j + half] * sin[j];
  for (int64_t j = half; j < rotary; ++j) out[j] = x[j] * cos[j] + x[j - half] * sin[j];
  for (int64_t j = rotary; j < head_dim; ++j) out[j] = x[j];
}

void rotate_row(const RopeArgs& a, int64_t row) {
  const int64_t d = a.head_dim;
  const float* x = a.qkv + row * (a.heads + 2 * a.kv_heads) * d;
  const float* cos = a.cos + a.positions[row] * a.rotary;
  const float* sin = a.sin + a.positions[row] * a.rotary;
  float* k = a.k_cache + a.slots[row] * a.kv_heads * d;
  float normed[1024];
  for (int64_t h = 0; h < a.heads + a.kv_heads; ++h) {
    const bool query = h < a.heads;
    const float* head = x + h * d;
    if (const float* weight = query ? a.q_norm : a.k_norm) {
      norm_row(head, weight, a.eps, d, normed);
      head = normed;
    }
    rotate_head(head, cos, sin, a.rotary, d, query ? a.q + (row * a.heads + h) * d : k + (h - a.heads) * d);
  }
  std::memcpy(a.v_cache + a.slots[row] * a.kv_heads * d, x + (a.heads + a.kv_heads) * d,
              static_cast<size_t>(a.kv_heads * d) * sizeof(float));
}

}  // namespace

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out,
              int threads) {
  parallel_for(rows, threads_for(rows * width, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) norm_row(x + r * x_stride, weight, eps, width, out + r * width);
  });
}

void silu_mul(const float* gate_up, int64_t rows, int64_t width, float* out, int threads) {
  // An exponential costs about as much as eight plain elements.
  parallel_for(rows, threads_for(rows * width * 8, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      silu_row(gate_up + r * 2 * width, gate_up + r * 2 * width + width, width, out + r * width);
  });
}

int64_t rope_write_kv(const RopeArgs& a, int threads) {
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.positions[r] < 0 || a.positions[r] >= a.length || a.slots[r] < 0 || a.slots[r] >= a.num_slots) return r;
  const int64_t elements = a.rows * (a.heads + 2 * a.kv_heads) * a.head_dim;
  parallel_for(a.rows, threads_for(elements, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) rotate_row(a, r);
  });
  return -1;
}

}  // namespace tlt
