// Products and attention whose rows have the same bits whatever else a step holds. Raw device pointers, the caller's
// stream. Legend: R rows, K inner, N outer features.
#pragma once
#include <cstdint>

#include "linear.h"
#include "sample.h"

namespace tlt::cuda {

// Rows of x that one launch takes at most; more are taken in several launches, one after another.
constexpr int32_t kInvariantRows = 256;

// Bytes of Linear::partials and Linear::arrived, for any number of rows.
int64_t invariant_linear_partials(int32_t workers);
int64_t invariant_linear_counters(int32_t outer);

// As `linear` (linear.h), for bf16 and fp16 on compute capability 9.0; other bits than `linear`. With silu_mul N / 2
// must be a multiple of 8.
void invariant_linear(const Linear& product, Dtype dtype, bool overlap, uint64_t stream);

}  // namespace tlt::cuda
