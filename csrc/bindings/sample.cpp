#include "cpu/sample.h"

#include "bindings/bind.h"
#include "cpu/draft.h"

namespace {

// The address under `name` in a dict of RowParams' tensors; absent = null.
template <typename T>
const T* field(const py::dict& params, const char* name) {
  return params.contains(name) ? at<const T>(params[name].cast<uint64_t>()) : nullptr;
}

tlt::SampleParams sample_params(const py::dict& p, int64_t allowed_words) {
  tlt::SampleParams out;
  out.temperature = field<float>(p, "temperature"), out.top_p = field<float>(p, "top_p");
  out.min_p = field<float>(p, "min_p"), out.top_k = field<int32_t>(p, "top_k");
  out.allowed_row = field<int32_t>(p, "allowed_row"), out.allowed_bits = field<uint32_t>(p, "allowed_bits");
  out.allowed_words = allowed_words;
  out.bias_row = field<int32_t>(p, "bias_row"), out.bias_indptr = field<int32_t>(p, "bias_indptr");
  out.bias_ids = field<int64_t>(p, "bias_ids"), out.bias_values = field<float>(p, "bias_values");
  out.repetition = field<float>(p, "repetition"), out.presence = field<float>(p, "presence");
  out.frequency = field<float>(p, "frequency");
  out.history_row = field<int32_t>(p, "history_row"), out.history_indptr = field<int32_t>(p, "history_indptr");
  out.history_ids = field<int64_t>(p, "history_ids"), out.history_prompt = field<int32_t>(p, "history_prompt");
  out.parent_row = field<int32_t>(p, "parent_row"), out.node_tokens = field<int64_t>(p, "node_tokens");
  out.branch_tokens = field<int64_t>(p, "branch_tokens");
  out.branch_width = p.contains("branch_width") ? p["branch_width"].cast<int64_t>() : 0;
  return out;
}

}  // namespace

void bind_sample(py::module_& m) {
  m.def("sample", [](uint64_t logits, int dtype, int64_t rows, int64_t vocab, int64_t limit, uint64_t keys,
                     uint64_t positions, uint64_t samples, uint64_t segments, const py::dict& params,
                     int64_t allowed_words, uint64_t forced, bool skip, int threads, uint64_t tokens,
                     uint64_t logprobs, uint64_t raw_logprobs) {
    const tlt::SampleParams p = sample_params(params, allowed_words);
    py::gil_scoped_release release;
    tlt::sample({at<void>(logits), static_cast<tlt::Dtype>(dtype), rows, vocab, limit},
                {at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments)}, p,
                at<int64_t>(forced), skip, threads, at<int64_t>(tokens), at<float>(logprobs), at<float>(raw_logprobs));
  });
  m.def("noisy_top_k", [](uint64_t logits, int dtype, int64_t rows, int64_t vocab, int64_t limit, uint64_t keys,
                          uint64_t positions, uint64_t samples, uint64_t segments, const py::dict& params,
                          int64_t allowed_words, uint64_t offsets, bool wide, int64_t columns, int64_t k, bool noise,
                          int threads, uint64_t tokens, uint64_t draft_ids, uint64_t scores, uint64_t logprobs) {
    const tlt::SampleParams p = sample_params(params, allowed_words);
    py::gil_scoped_release release;
    const tlt::DraftIds draft{at<void>(offsets), wide, columns};
    tlt::noisy_top_k({at<void>(logits), static_cast<tlt::Dtype>(dtype), rows, vocab, limit, draft},
                     {at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments)}, p, k,
                     noise, threads,
                     {at<int64_t>(tokens), at<int64_t>(draft_ids), at<float>(scores), at<float>(logprobs)});
  });
  m.def("process_logits", [](uint64_t logits, int dtype, int64_t rows, int64_t vocab, int64_t limit,
                             const py::dict& params, int64_t allowed_words, int threads, uint64_t out) {
    const tlt::SampleParams p = sample_params(params, allowed_words);
    py::gil_scoped_release release;
    tlt::process_logits({at<void>(logits), static_cast<tlt::Dtype>(dtype), rows, vocab, limit}, p, threads,
                        at<float>(out));
  });
}
