// The drafter's proposals: the best k of log q + g, with g the target's own noise at target ids.
#pragma once
#include <cstdint>

#include "sample.h"

namespace tlt::cuda {

struct DraftArgs {
  // logits [R, columns] of the draft vocabulary, everything else in target ids; draws nothing. arrived [R], all zero
  // between calls; workspace: draft_workspace bytes, any content.
  SampleArgs rows;
  int32_t k;
  bool noise;  // false: the best k of log q
  // [R, k] each, best first, ties to the lower id. tokens: target ids, draft_ids: columns; -1 where nothing is left.
  int64_t *tokens, *draft_ids;
  float *scores, *logprobs;  // log q + g (log q without noise), log q; -inf beside -1
};

int64_t draft_workspace(int32_t rows, int32_t columns);
void noisy_top_k(const DraftArgs& args, uint64_t stream);

}  // namespace tlt::cuda
