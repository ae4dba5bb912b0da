#ifdef TLT_WITH_CUDA
#include "bindings/bind.h"
#include "cuda/noise.h"

void bind_cuda_noise(py::module_& m) {
  m.def(
      "cuda_gumbel_noise",
      [](uint64_t keys, uint64_t positions, uint64_t samples, uint64_t segments, int64_t rows, int64_t vocab,
         uint32_t purpose, uint64_t out, uint64_t stream) {
        tlt::cuda::gumbel_noise(at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments),
                                rows, vocab, purpose, at<float>(out), stream);
      },
      py::arg("keys"), py::arg("positions"), py::arg("samples"), py::arg("segments"), py::arg("rows"),
      py::arg("vocab"), py::arg("purpose"), py::arg("out"), py::kw_only(), py::arg("stream"));
}
#endif
