#ifdef TLT_WITH_CUDA
#include "bindings/bind.h"
#include "cuda/invariant.h"

void bind_cuda_invariant(py::module_& m) {
#ifdef TLT_HOPPER
  m.def(
      "cuda_invariant_linear",
      [](int dtype, uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t base, int64_t base_stride,
         uint64_t out, int rows, int outer, int inner, bool silu_mul, uint64_t partials, uint64_t arrived, int workers,
         bool overlap, uint64_t stream) {
        tlt::cuda::Linear p{};
        p.x = at<void>(x), p.x_stride = x_stride, p.weight = at<void>(weight), p.bias = at<void>(bias);
        p.base = at<void>(base), p.base_stride = base_stride, p.out = at<void>(out);
        p.rows = rows, p.outer = outer, p.inner = inner, p.silu_mul = silu_mul;
        p.partials = at<float>(partials), p.arrived = at<uint32_t>(arrived), p.workers = workers;
        tlt::cuda::invariant_linear(p, static_cast<tlt::cuda::Dtype>(dtype), overlap, stream);
      },
      py::arg("dtype"), py::arg("x"), py::arg("x_stride"), py::arg("weight"), py::arg("bias"), py::arg("base"),
      py::arg("base_stride"), py::arg("out"), py::arg("rows"), py::arg("outer"), py::arg("inner"), py::arg("silu_mul"),
      py::arg("partials"), py::arg("arrived"), py::arg("workers"), py::arg("overlap"), py::kw_only(),
      py::arg("stream"));
  m.def("cuda_invariant_linear_partials", &tlt::cuda::invariant_linear_partials, py::arg("workers"));
  m.def("cuda_invariant_linear_counters", &tlt::cuda::invariant_linear_counters, py::arg("outer"));
#endif
}
#endif
