// A drafter's proposals under a request's own parameters: the best k of z + g, with g the target's own noise.
#pragma once
#include <cstdint>

#include "cpu/sample.h"

namespace tlt {

// [rows, k] each, best first. tokens: target ids, draft_ids: columns of the logits; -1 and scores -inf where nothing is
// left, all through a row with NaN or +inf.
struct DraftTop {
  int64_t *tokens, *draft_ids;
  float *scores, *logprobs;  // logprob + g (logprob without noise), log softmax of the processed row
};

// noise = false: the best k of z. Ties go to the lower id.
void noisy_top_k(const Logits& logits, const NoiseRows& ids, const SampleParams& params, int64_t k, bool noise,
                 int threads, const DraftTop& out);

}  // namespace tlt
