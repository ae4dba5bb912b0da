#include "cpu/sample.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/row.h"

namespace tlt {

void sample(const Logits& logits, const NoiseRows& ids, const SampleParams& params, const int64_t* forced, bool skip,
            int threads, int64_t* tokens, float* logprobs, float* raw_logprobs) {
  parallel_for(logits.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Row row(logits, params, r, thread_scratch());
      tokens[r] = -1, logprobs[r] = kNan;
      if (raw_logprobs) raw_logprobs[r] = kNan;
      if (!row.process(raw_logprobs != nullptr) || row.empty()) continue;
      tokens[r] = forced ? forced[r] : row.draw(ids.row(r, 0), skip);
      logprobs[r] = row.logprob(tokens[r]);
      if (raw_logprobs) raw_logprobs[r] = row.raw_logprob(tokens[r]);
    }
  });
}

void process_logits(const Logits& logits, const SampleParams& params, int threads, float* out) {
  parallel_for(logits.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Row row(logits, params, r, thread_scratch());
      float* to = out + r * logits.vocab;
      if (row.process(false)) {
        std::memcpy(to, row.z(), logits.vocab * sizeof(float));
      } else {
        std::fill(to, to + logits.vocab, kNan);
      }
    }
  });
}

}  // namespace tlt
