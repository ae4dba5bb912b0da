#include "cpu/linear.h"

#include "bindings/bind.h"
#ifdef TLT_HOPPER
#include "cuda/linear.h"

namespace {

void bind_cuda(py::module_& m) {
  m.def(
      "cuda_linear",
      [](int dtype, uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t base, int64_t base_stride,
         uint64_t out, int rows, int outer, int inner, bool silu_mul, uint64_t partials, uint64_t arrived, int workers,
         bool overlap, uint64_t stream) {
        tlt::cuda::linear({at<void>(x), x_stride, at<void>(weight), at<void>(bias), at<void>(base), base_stride,
                           at<void>(out), rows, outer, inner, silu_mul, at<float>(partials), at<uint32_t>(arrived),
                           workers},
                          dtype, overlap, stream);
      },
      py::arg("dtype"), py::arg("x"), py::arg("x_stride"), py::arg("weight"), py::arg("bias"), py::arg("base"),
      py::arg("base_stride"), py::arg("out"), py::arg("rows"), py::arg("outer"), py::arg("inner"), py::arg("silu_mul"),
      py::arg("partials"), py::arg("arrived"), py::arg("workers"), py::arg("overlap"), py::kw_only(),
      py::arg("stream"));
  m.def("cuda_linear_partials", &tlt::cuda::linear_partials, py::arg("rows"), py::arg("workers"));
  m.def("cuda_linear_counters", &tlt::cuda::linear_counters, py::arg("outer"));
}

}  // namespace
#endif

void bind_linear(py::module_& m) {
  m.def("linear", [](uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t base, int64_t base_stride,
                     int64_t rows, int64_t out_dim, int64_t in_dim, uint64_t out, int threads) {
    py::gil_scoped_release release;
    tlt::linear({at<float>(x), x_stride, at<float>(weight), at<float>(bias), at<float>(base), base_stride, rows, out_dim,
                 in_dim, at<float>(out), threads});
  });
#ifdef TLT_HOPPER
  bind_cuda(m);
#endif
}
