// Processing of logits and the perturbed argmax (docs/design.md, "Ops"; kernels/tlt_kernels/params.py has the fields).
#pragma once
#include <cstdint>

#include "cpu/noise.h"

namespace tlt {

// The fields of RowParams; null = no row uses the step.
struct SampleParams {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int32_t* allowed_row;
  const uint32_t* allowed_bits;
  int64_t allowed_words;  // words in a row of allowed_bits
  const int32_t *bias_row, *bias_indptr;
  const int64_t* bias_ids;
  const float* bias_values;
  const float *repetition, *presence, *frequency;
  const int32_t *history_row, *history_indptr, *history_prompt, *parent_row;
  const int64_t *history_ids, *node_tokens;
  const int64_t* branch_tokens;  // [rows, branch_width]
  int64_t branch_width;
};

// Ids of a reduced vocabulary: id i stands for target id i + offset(i), ascending. Null: the target's own ids.
struct DraftIds {
  const void* offsets = nullptr;
  bool wide = false;    // int64, else int32
  int64_t columns = 0;  // how many there are

  int64_t target(int64_t i) const {
    return i + (wide ? static_cast<const int64_t*>(offsets)[i] : static_cast<const int32_t*>(offsets)[i]);
  }
};

struct Logits {
  const void* data;
  Dtype dtype;
  int64_t rows, vocab, limit;  // ids >= limit do not exist
  DraftIds draft = {};         // of its columns, where those are not the vocabulary's

  int64_t columns() const { return draft.offsets ? draft.columns : vocab; }
};

// tokens int64 [rows], logprobs fp32 [rows], raw_logprobs fp32 [rows] or null. forced int64 [rows] or null.
// skip = false takes every log (tests of the bounds).
void sample(const Logits& logits, const NoiseRows& ids, const SampleParams& params, const int64_t* forced, bool skip,
            int threads, int64_t* tokens, float* logprobs, float* raw_logprobs);

// out fp32 [rows, vocab]: z over the temperature, -inf = filtered; NaN throughout where the row holds NaN or +inf.
void process_logits(const Logits& logits, const SampleParams& params, int threads, float* out);

}  // namespace tlt
