#ifdef TLT_WITH_CUDA
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "cuda/draft.h"
#include "cuda/sample.h"

namespace {

using Addresses = std::vector<uint64_t>;  // 0 = null

// Addresses in order, each into a field of its own type.
class Reader {
 public:
  Reader(const Addresses& addresses, size_t count, const char* op) : addresses_(addresses) {
    if (addresses.size() == count) return;
    throw py::value_error(std::string(op) + ": expected " + std::to_string(count) + " addresses, got " +
                          std::to_string(addresses.size()));
  }

  template <typename T>
  void operator()(T*& field) {
    field = at<T>(addresses_[next_++]);
  }

 private:
  const Addresses& addresses_;
  size_t next_ = 0;
};

// The logits, identities, parameters and counts that both ops take: 26 addresses, as tlt_kernels.cuda lists them.
tlt::cuda::SampleArgs read_rows(Reader& next) {
  tlt::cuda::SampleArgs a{};
  next(a.logits), next(a.keys), next(a.positions), next(a.samples), next(a.segments);
  next(a.temperature), next(a.top_k), next(a.top_p), next(a.min_p), next(a.allowed_row), next(a.allowed_bits);
  next(a.bias_row), next(a.bias_indptr), next(a.bias_ids), next(a.bias_values);
  next(a.repetition), next(a.presence), next(a.frequency);
  next(a.history_row), next(a.history_indptr), next(a.history_ids), next(a.history_prompt);
  next(a.parent_row), next(a.node_tokens), next(a.branch_tokens), next(a.counts);
  return a;
}

}  // namespace

void bind_cuda_sample(py::module_& m) {
  m.def("cuda_sample_workspace", &tlt::cuda::sample_workspace);
  m.def(
      "cuda_sample",
      [](const Addresses& addresses, int dtype, int64_t row_stride, int rows, int vocab, int limit,
         int64_t allowed_words, int branch_width, int histories, int processors, uint64_t stream) {
        Reader next(addresses, 32, "cuda_sample");
        tlt::cuda::SampleArgs a = read_rows(next);
        next(a.forced), next(a.tokens), next(a.logprobs), next(a.raw_logprobs), next(a.arrived), next(a.workspace);
        a.dtype = static_cast<tlt::cuda::Dtype>(dtype);
        a.row_stride = row_stride, a.rows = rows, a.vocab = vocab, a.limit = limit, a.columns = vocab;
        a.allowed_words = allowed_words, a.branch_width = branch_width, a.histories = histories;
        a.processors = processors;
        py::gil_scoped_release release;
        tlt::cuda::sample(a, stream);
      },
      py::arg("addresses"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("vocab"),
      py::arg("limit"), py::arg("allowed_words"), py::arg("branch_width"), py::arg("histories"),
      py::arg("processors"), py::kw_only(), py::arg("stream"));
  m.def("cuda_draft_workspace", &tlt::cuda::draft_workspace, py::arg("rows"), py::arg("columns"));
  m.def(
      "cuda_noisy_top_k",
      [](const Addresses& addresses, int dtype, int64_t row_stride, int rows, int columns, int vocab, int limit,
         int64_t allowed_words, int branch_width, int histories, bool d2t_wide, int k, bool noise, int processors,
         uint64_t stream) {
        Reader next(addresses, 33, "cuda_noisy_top_k");
        tlt::cuda::DraftArgs a{};
        a.rows = read_rows(next);
        next(a.rows.d2t), next(a.tokens), next(a.draft_ids), next(a.scores), next(a.logprobs);
        next(a.rows.arrived), next(a.rows.workspace);
        a.rows.dtype = static_cast<tlt::cuda::Dtype>(dtype);
        a.rows.row_stride = row_stride, a.rows.rows = rows, a.rows.vocab = vocab, a.rows.limit = limit;
        a.rows.columns = columns, a.rows.d2t_wide = d2t_wide;
        a.rows.allowed_words = allowed_words, a.rows.branch_width = branch_width, a.rows.histories = histories;
        a.k = k, a.noise = noise, a.rows.processors = processors;
        py::gil_scoped_release release;
        tlt::cuda::noisy_top_k(a, stream);
      },
      py::arg("addresses"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("columns"),
      py::arg("vocab"), py::arg("limit"), py::arg("allowed_words"), py::arg("branch_width"), py::arg("histories"),
      py::arg("d2t_wide"), py::arg("k"), py::arg("noise"), py::arg("processors"), py::kw_only(), py::arg("stream"));
}
#endif
