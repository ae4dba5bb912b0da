#include "cpu/draft.h"

#include "cpu/parallel.h"
#include "cpu/row.h"
#include "philox.h"

namespace tlt {
namespace {

constexpr int64_t kSpan = 1024;  // ids between two looks at the k-th best: 16 blocks of words

bool before(const Entry& a, const Entry& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

// The k best of the first `count` stand first, the k-th of them last.
void keep_best(std::vector<Entry>& entries, int64_t count, int64_t k) {
  if (count >= k) std::nth_element(entries.begin(), entries.begin() + (k - 1), entries.begin() + count, before);
}

// The column of target id `token`: offsets ascend, so target ids do.
int64_t column_of(const DraftIds& draft, int64_t token) {
  if (draft.offsets == nullptr) return token;
  int64_t low = 0, high = draft.columns - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (draft.target(middle) < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

void write(const DraftTop& out, int64_t at, float logprob, const Entry& entry, const NoiseId* id,
           const DraftIds& draft) {
  float g = 0.0f;
  if (id) {
    const Words4 words = noise_words(id->key, id->position, entry.id / 4, id->purpose, id->sample, id->segment);
    g = gumbel_from_word(words.x[entry.id % 4]);
  }
  out.tokens[at] = entry.id;
  out.draft_ids[at] = column_of(draft, entry.id);
  out.logprobs[at] = logprob;
  out.scores[at] = out.logprobs[at] + g;
}

}  // namespace

// The k-th largest z plus the least noise bounds the k-th best score from below; each span of ids raises the bound.
const std::vector<Entry>& Row::top(const NoiseId* id, int64_t k) {
  std::vector<Entry>& entries = scratch_.select.entries;
  const float kth = top_k_cut(z_, padded_, k, scratch_.select).z;
  entries.resize(std::max<int64_t>(padded_, k + kSpan));
  int64_t count = 0;
  if (id == nullptr) {
    count = kernels_.collect(z_, padded_, kth, entries.data());
    keep_best(entries, count, k);
  } else {
    float bound = kth + kGumbelMin;
    for (int64_t start = 0; start < padded_; start += kSpan) {
      const int64_t n = std::min(kSpan, padded_ - start);
      count += kernels_.collect_noise(z_, start, n, *id, bound, entries.data() + count);
      if (count < k) continue;
      keep_best(entries, count, k);
      count = std::min(count, k);
      bound = std::max(bound, entries[k - 1].z);
    }
  }
  entries.resize(std::min(count, k));
  std::sort(entries.begin(), entries.end(), before);
  return entries;
}

void noisy_top_k(const Logits& logits, const NoiseRows& ids, const SampleParams& params, int64_t k, bool noise,
                 int threads, const DraftTop& out) {
  parallel_for(logits.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Row row(logits, params, r, thread_scratch());
      int64_t n = 0;
      if (row.process(false) && !row.empty()) {
        const NoiseId id = ids.row(r, 0);
        const NoiseId* used = noise && !row.greedy() ? &id : nullptr;
        const double lse = row.log_sum_exp();
        for (const Entry& entry : row.top(used, k)) {
          write(out, r * k + n++, static_cast<float>(row.z()[entry.id] - lse), entry, used, logits.draft);
        }
      }
      for (; n < k; ++n) {
        const int64_t at = r * k + n;
        out.tokens[at] = out.draft_ids[at] = -1;
        out.scores[at] = out.logprobs[at] = -kInf;
      }
    }
  });
}

}  // namespace tlt
