// The drafter's proposals: the best k of log q + g, with g the target's own noise at target ids.
#pragma once
#include <cstdint>

#include "sample.h"

namespace tlt::cuda {

struct DraftArgs {
  SampleArgs rows;  // logits [R, columns] of the draft vocabulary, everything else in target ids; draws nothing
  int32_t k;
  bool noise;  // false: the best k of log q
  // [R, k] each, best first, ties to the lower id. tokens: target ids, draft_ids: columns; -1 where nothing is left.
  int64_t *tokens, *draft_ids;
  float *scores, *logprobs;  // log q + g (log q without noise), log q; -inf beside -1
};

void noisy_top_k(const DraftArgs& args, uint64_t stream);

}  // namespace tlt::cuda
