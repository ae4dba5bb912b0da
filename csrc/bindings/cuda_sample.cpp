#ifdef TLT_WITH_CUDA
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "cuda/draft.h"
#include "cuda/sample.h"

namespace {

using Addresses = std::vector<uint64_t>;  // in the order of tlt_kernels.cuda.SAMPLE_ADDRESSES; 0 = null

tlt::cuda::SampleArgs sample_args(const Addresses& p) {
  if (p.size() != 31) throw py::value_error("cuda_sample: expected 31 addresses, got " + std::to_string(p.size()));
  tlt::cuda::SampleArgs a{};
  size_t i = 0;
  const auto next = [&](auto& field) { field = at<std::remove_pointer_t<std::remove_reference_t<decltype(field)>>>(p[i++]); };
  next(a.logits), next(a.keys), next(a.positions), next(a.samples), next(a.segments);
  next(a.temperature), next(a.top_k), next(a.top_p), next(a.min_p), next(a.allowed_row), next(a.allowed_bits);
  next(a.bias_row), next(a.bias_indptr), next(a.bias_ids), next(a.bias_values);
  next(a.repetition), next(a.presence), next(a.frequency);
  next(a.history_row), next(a.history_indptr), next(a.history_ids), next(a.history_prompt);
  next(a.parent_row), next(a.node_tokens), next(a.counts), next(a.forced);
  next(a.tokens), next(a.logprobs), next(a.raw_logprobs), next(a.arrived), next(a.workspace);
  return a;
}

}  // namespace

void bind_cuda_sample(py::module_& m) {
  m.def("cuda_sample_workspace", &tlt::cuda::sample_workspace);
  m.def(
      "cuda_sample",
      [](const Addresses& addresses, int dtype, int64_t row_stride, int rows, int vocab, int limit,
         int64_t allowed_words, int histories, int processors, uint64_t stream) {
        tlt::cuda::SampleArgs a = sample_args(addresses);
        a.dtype = static_cast<tlt::cuda::Dtype>(dtype);
        a.row_stride = row_stride, a.rows = rows, a.vocab = vocab, a.limit = limit;
        a.allowed_words = allowed_words, a.histories = histories, a.processors = processors;
        py::gil_scoped_release release;
        tlt::cuda::sample(a, stream);
      },
      py::arg("addresses"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"),
      py::arg("vocab"), py::arg("limit"), py::arg("allowed_words"), py::arg("histories"), py::arg("processors"),
      py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_noisy_top_k",
      [](uint64_t logits, int dtype, int64_t row_stride, int rows, int vocab, int k, uint64_t keys, uint64_t positions,
         uint64_t samples, uint64_t segments, uint64_t temperature, uint64_t d2t, uint64_t tokens, uint64_t scores,
         uint64_t logprobs, uint64_t stream) {
        py::gil_scoped_release release;
        tlt::cuda::noisy_top_k({at<void>(logits), static_cast<tlt::cuda::Dtype>(dtype), row_stride, rows, vocab, k,
                                at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments),
                                at<float>(temperature), at<int64_t>(d2t), at<int64_t>(tokens), at<float>(scores),
                                at<float>(logprobs)},
                               stream);
      },
      py::arg("logits"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("vocab"), py::arg("k"),
      py::arg("keys"), py::arg("positions"), py::arg("samples"), py::arg("segments"), py::arg("temperature"),
      py::arg("d2t"), py::arg("tokens"), py::arg("scores"), py::arg("logprobs"), py::kw_only(), py::arg("stream"));
}
#endif
