#include "bindings/bind.h"
#include "cpu/noise.h"

void bind_noise(py::module_& m) {
  m.def("gumbel_noise", [](uint64_t keys, uint64_t positions, uint64_t samples, uint64_t segments, int64_t rows,
                           int64_t vocab, uint32_t purpose, uint64_t out) {
    py::gil_scoped_release release;
    tlt::gumbel_noise(at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments), rows,
                      vocab, purpose, at<float>(out));
  });
}
