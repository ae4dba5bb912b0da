// One row of logits on its way to a draw: processed in a thread's scratch, all ids of the target side by side.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/sample.h"
#include "cpu/select.h"

namespace tlt {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kGreedyBelow = 1e-5f;

// One thread's memory, kept between calls: about 12 bytes an id.
struct Scratch {
  std::vector<float> z;       // the row, padded with -inf
  std::vector<float> drafted;  // the row over a reduced vocabulary
  std::vector<int32_t> seen;  // all zero between rows; else 1 + occurrences in the output
  SelectScratch select;
};

inline Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

class Row {
 public:
  Row(const Logits& logits, const SampleParams& params, int64_t row, Scratch& scratch)
      : logits_(logits), p_(params), r_(row), scratch_(scratch) {
    padded_ = (logits.vocab + kPad - 1) / kPad * kPad;
    if (static_cast<int64_t>(scratch.z.size()) < padded_) {
      scratch.z.resize(padded_);
      scratch.seen.resize(padded_, 0);
    }
    z_ = scratch.z.data();
    bytes_ = logits.dtype == Dtype::f32 ? 4 : 2;
    source_ = static_cast<const char*>(logits.data) + row * logits.columns() * bytes_;
    greedy_ = params.temperature[row] < kGreedyBelow;
  }

  // Leaves the processed row in z. False when it holds NaN or +inf.
  bool process(bool want_raw) {
    if (!load()) return false;
    if (want_raw) raw_lse_ = log_sum_exp();
    bool changed = logits_.limit < logits_.vocab;
    std::fill(z_ + logits_.limit, z_ + logits_.vocab, -kInf);
    changed |= allow();
    changed |= add_bias();
    changed |= penalise();
    const float temperature = greedy_ ? 1.0f : p_.temperature[r_];
    if (changed || temperature != 1.0f) max_ = kernels_.divide(z_, padded_, temperature);
    if (max_ == kInf) return false;
    if (max_ > -kInf && !greedy_) filter();
    return true;
  }

  bool empty() const { return max_ == -kInf; }
  const float* z() const { return z_; }
  bool greedy() const { return greedy_; }
  double log_sum_exp() const { return max_ + std::log(kernels_.exp_sum(z_, padded_, max_)); }

  int64_t draw(const NoiseId& id, bool skip) const {
    const int64_t best = kernels_.find(z_, padded_, max_);
    return greedy_ ? best : kernels_.argmax_noise(z_, padded_, id, max_, best, skip);
  }

  // The k best of z + g (of z where `id` is null) with their scores, best first, ties to the lower id.
  const std::vector<Entry>& top(const NoiseId* id, int64_t k);

  float logprob(int64_t token) const { return static_cast<float>(z_[token] - log_sum_exp()); }

  float raw_logprob(int64_t token) const {
    float one[kPad], unused;
    kernels_.load(source_ + token * bytes_, logits_.dtype, 1, one, &unused);
    return static_cast<float>(one[0] - raw_lse_);
  }

 private:
  bool load() {
    const DraftIds& draft = logits_.draft;
    if (draft.offsets == nullptr) return kernels_.load(source_, logits_.dtype, logits_.vocab, z_, &max_);
    scratch_.drafted.resize(std::max<size_t>(scratch_.drafted.size(), (draft.columns + kPad - 1) / kPad * kPad));
    float* drafted = scratch_.drafted.data();
    if (!kernels_.load(source_, logits_.dtype, draft.columns, drafted, &max_)) return false;
    std::fill(z_, z_ + padded_, -kInf);
    for (int64_t i = 0; i < draft.columns; ++i) z_[draft.target(i)] = drafted[i];
    return true;
  }

  bool allow() {
    if (p_.allowed_row == nullptr || p_.allowed_row[r_] < 0) return false;
    kernels_.mask(z_, logits_.limit, p_.allowed_bits + p_.allowed_row[r_] * p_.allowed_words);
    return true;
  }

  bool add_bias() {
    if (p_.bias_row == nullptr || p_.bias_row[r_] < 0) return false;
    const int32_t list = p_.bias_row[r_];
    for (int32_t i = p_.bias_indptr[list]; i < p_.bias_indptr[list + 1]; ++i) {
      const int64_t id = p_.bias_ids[i];
      if (id >= 0 && id < logits_.limit) z_[id] += p_.bias_values[i];
    }
    return true;
  }

  // Calls visit(id, in_output) for the request's history, then for the row's own branch below the root.
  template <typename Visit>
  void for_history(Visit visit) const {
    const auto checked = [&](int64_t id, bool output) {
      if (id >= 0 && id < logits_.limit) visit(id, output);
    };
    if (p_.history_row != nullptr && p_.history_row[r_] >= 0) {
      const int32_t list = p_.history_row[r_];
      const int32_t begin = p_.history_indptr[list], end = p_.history_indptr[list + 1];
      const int32_t output = begin + p_.history_prompt[list];
      for (int32_t i = begin; i < end; ++i) checked(p_.history_ids[i], i >= output);
    }
    for (int64_t i = 0; i < p_.branch_width; ++i) checked(p_.branch_tokens[r_ * p_.branch_width + i], true);
    if (p_.parent_row == nullptr) return;
    for (int64_t node = r_; p_.parent_row[node] >= 0; node = p_.parent_row[node]) checked(p_.node_tokens[node], true);
  }

  bool penalise() {
    const float repetition = p_.repetition ? p_.repetition[r_] : 1.0f;
    const float presence = p_.presence ? p_.presence[r_] : 0.0f, frequency = p_.frequency ? p_.frequency[r_] : 0.0f;
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return false;
    int32_t* seen = scratch_.seen.data();
    for_history([&](int64_t id, bool output) { seen[id] = std::max(seen[id], 1) + output; });
    for_history([&](int64_t id, bool) {
      if (seen[id] == 0) return;  // applied already
      const int32_t count = seen[id] - 1;
      seen[id] = 0;
      float x = z_[id] > 0.0f ? z_[id] / repetition : z_[id] * repetition;
      if (count > 0) x = (x - frequency * static_cast<float>(count)) - presence;
      z_[id] = x;
    });
    return true;
  }

  // min-p, top-k, top-p, each on what the one before has left. The largest z always stays, so max_ holds.
  void filter() {
    const float min_p = p_.min_p ? p_.min_p[r_] : 0.0f, top_p = p_.top_p ? p_.top_p[r_] : 1.0f;
    const int64_t top_k = p_.top_k ? p_.top_k[r_] : 0;
    if (min_p > 0.0f) {
      const double cut = static_cast<double>(max_) + std::log(static_cast<double>(min_p));
      kernels_.cut(z_, padded_, static_cast<float>(cut), padded_ - 1);
    }
    if (top_k > 0 && top_k < logits_.limit) apply(top_k_cut(z_, padded_, top_k, scratch_.select));
    if (top_p < 1.0f) apply(top_p_cut(z_, padded_, top_p, max_, scratch_.select));
  }

  void apply(const Entry& last) { kernels_.cut(z_, padded_, last.z, last.id); }

  const RowKernels& kernels_ = row_kernels();
  const Logits& logits_;
  const SampleParams& p_;
  const int64_t r_;
  Scratch& scratch_;
  const char* source_;
  int64_t bytes_, padded_;
  float* z_;
  float max_ = -kInf;
  double raw_lse_ = 0;
  bool greedy_;
};

}  // namespace tlt
