// Products of few rows with a large weight, bound by reading the weight once. Raw device pointers, the caller's stream.
// Legend: R rows of x, K inner, N outer features.
#pragma once
#include <cstdint>

namespace tlt::cuda {

struct Linear {
  const void* x;  // [R, K], rows x_stride elements apart, 16-byte aligned
  int64_t x_stride;
  const void* weight;  // [N, K], 16-byte aligned, K a multiple of 8
  const void* bias;    // [N] or null
  const void* base;    // [R, N] or null, rows base_stride elements apart, each 4-byte aligned
  int64_t base_stride;
  void* out;  // [R, N], with silu_mul [R, N / 2]; 4-byte aligned
  int32_t rows, outer, inner;  // outer is even, with silu_mul a multiple of 16
  bool silu_mul;      // rows 0 .. N / 2 - 1 of the weight are gates, the others what they scale
  float* partials;    // linear_partials() bytes
  uint32_t* arrived;  // linear_counters() bytes, zero; left zero
  int32_t workers;    // blocks of threads, at most one a multiprocessor
};

// Rows of x that one launch takes at most; more are taken in several launches, one after another.
constexpr int32_t kRowsPerLaunch = 256;

int64_t linear_partials(int32_t rows, int32_t workers);
int64_t linear_counters(int32_t outer);

// out = base + (x weight^T + bias), or silu(gate) * up; sums in fp32, each step rounded to the dtype. dtype 1: bf16,
// 2: fp16. overlap: start while the kernel before still runs (programmatic dependent launch). The weight and nothing
// else is read before that kernel has finished, so it must not be one that writes the weight. Compute capability 9.0.
// A row has the same bits however many there are.
void linear(const Linear& product, int32_t dtype, bool overlap, uint64_t stream);

}  // namespace tlt::cuda
