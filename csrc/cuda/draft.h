// The drafter's proposals: top-K of log q / T + g, with g the target's own noise at target ids.
#pragma once
#include <cstdint>

#include "sample.h"

namespace tlt::cuda {

struct DraftArgs {
  const void* logits;  // [R, V] of the draft vocabulary
  Dtype dtype;
  int64_t row_stride;  // elements
  int32_t rows, vocab, k;
  const int64_t *keys, *positions, *samples, *segments;
  const float* temperature;  // below 1e-5: no noise, temperature 1
  const int64_t* d2t;        // [V] offsets to target ids, or null
  int64_t* tokens;           // [R, k] target ids, best first, ties to the lower draft id; -1 where nothing is left
  float* scores;             // [R, k] log softmax(logits / T) + g
  float* logprobs;           // [R, k] log softmax(logits / T)
};

void noisy_top_k(const DraftArgs& args, uint64_t stream);

}  // namespace tlt::cuda
