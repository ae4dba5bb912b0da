#pragma once
#include <cstdint>

namespace tlt::cuda {

// out [rows, vocab] fp32 = g of every id. keys, positions, samples, segments: int64 [rows]. Device pointers.
void gumbel_noise(const int64_t* keys, const int64_t* positions, const int64_t* samples, const int64_t* segments,
                  int64_t rows, int64_t vocab, uint32_t purpose, float* out, uint64_t stream);

}  // namespace tlt::cuda
