#include "cpu/linear.h"

#include "bindings/bind.h"

void bind_linear(py::module_& m) {
  m.def("linear", [](uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t base, int64_t base_stride,
                     int64_t rows, int64_t out_dim, int64_t in_dim, uint64_t out, int threads) {
    py::gil_scoped_release release;
    tlt::linear({at<float>(x), x_stride, at<float>(weight), at<float>(bias), at<float>(base), base_stride, rows, out_dim,
                 in_dim, at<float>(out), threads});
  });
}
