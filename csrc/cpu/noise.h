#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"

namespace tlt {

// keys, positions, samples, segments: int64 [rows].
struct NoiseRows {
  const int64_t *keys, *positions, *samples, *segments;

  NoiseId row(int64_t r, uint32_t purpose) const {
    return {static_cast<uint64_t>(keys[r]), static_cast<uint32_t>(positions[r]), static_cast<uint32_t>(samples[r]),
            static_cast<uint32_t>(segments[r]), purpose};
  }
};

// out [rows, vocab] fp32.
void gumbel_noise(const NoiseRows& ids, int64_t rows, int64_t vocab, uint32_t purpose, int threads, float* out);

// out [rows] fp32: the noise of tokens[r] at row r.
void gumbel_noise_at(const NoiseRows& ids, const int64_t* tokens, int64_t rows, uint32_t purpose, float* out);

// g of every 32-bit word: finite, never above its neighbour for a larger word, never above the argmax's bound.
WordReport check_all_words(int threads);

struct TailReport {
  int64_t count, not_finite;
  float lowest, highest;
  std::vector<int64_t> above;  // how many values exceed each threshold
};

// The noise of positions 0 .. rows - 1 over `vocab` ids, summarised without being stored.
TailReport noise_tail(uint64_t key, int64_t rows, int64_t vocab, const std::vector<float>& thresholds, int threads);

}  // namespace tlt
