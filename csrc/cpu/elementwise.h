// The element-wise parts of a decoder layer in fp32, fused so that a pass makes few trips through memory and never wakes
// torch's own thread pool, whose workers would spin on the cores that ours need.
#pragma once
#include <cstdint>

namespace tlt {

// out [rows, width] = x / sqrt(mean(x^2) + eps) * weight. A row's bits depend on that row alone.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out,
              int threads);

// out [rows, width] = silu(gate) * up, of gate_up [rows, 2 * width].
void silu_mul(const float* gate_up, int64_t rows, int64_t width, float* out, int threads);

struct RopeArgs {
  const float* qkv;  // [rows, heads + 2 * kv_heads, head_dim]
  const float *cos, *sin;  // tables [length, rotary]; sin carries the sign of rotate-half in its first half
  const int64_t *positions, *slots;  // [rows]
  const float *q_norm, *k_norm;  // [head_dim] or null: RMSNorm of every head before the rotation (Qwen3)
  float eps;
  int64_t rows, heads, kv_heads, head_dim, rotary, length, num_slots;
  float* q;  // [rows, heads, head_dim]
  float *k_cache, *v_cache;  // [num_slots, kv_heads, head_dim]
};

// Rotates queries into q and keys into k_cache, copies values into v_cache. Returns the first row whose position or slot
// is out of range, before anything is written, or -1.
int64_t rope_write_kv(const RopeArgs& args, int threads);

}  // namespace tlt
