// The fused sampler's launchers. Raw device pointers, the caller's stream; no allocation, no synchronization.
// Legend: R rows, V vocabulary, H histories, S strips of a row.
#pragma once
#include <cstdint>

namespace tlt::cuda {

enum class Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };  // as csrc/cpu/row_kernels.h

// Null pointers mean that no row uses the step. Shapes and types as kernels/tlt_kernels/params.py says.
struct SampleArgs {
  const void* logits;
  Dtype dtype;
  int64_t row_stride;  // elements
  int32_t rows, vocab, limit;
  const int64_t *keys, *positions, *samples, *segments;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int32_t *allowed_row, *allowed_bits;
  int64_t allowed_words;
  const int32_t *bias_row, *bias_indptr;
  const int64_t* bias_ids;
  const float* bias_values;
  const float *repetition, *presence, *frequency;
  const int32_t *history_row, *history_indptr;
  const int64_t* history_ids;
  const int32_t *history_prompt, *parent_row;
  const int64_t *node_tokens, *branch_tokens;  // branch_tokens [R, branch_width]
  int32_t branch_width;
  int32_t histories;
  uint32_t* counts;  // [H, V], all zero between calls: output count, bit 31 = seen in the prompt
  const int64_t* forced;
  int64_t* tokens;
  float *logprobs, *raw_logprobs;
  uint32_t* arrived;  // [2, R], all zero between calls: blocks of the row done, the row's bound on the best score
  void* workspace;    // sample_workspace bytes, any content
  const void* d2t;  // drafters only: column i stands for target id i + d2t[i]
  bool d2t_wide;    // int64, else int32
  int32_t columns;  // of the draft logits; `vocab` and `limit` count target ids
  int32_t processors;  // multiprocessors of the device: only how the work is split, never what comes out
};

int64_t sample_workspace(int32_t rows, int32_t vocab);
void sample(const SampleArgs& args, uint64_t stream);

// The histories' counts before the row kernels and their return to zero after.
void count_histories(const SampleArgs& args, bool add, uint64_t stream);

}  // namespace tlt::cuda
