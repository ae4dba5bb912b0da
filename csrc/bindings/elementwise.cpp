#include "cpu/elementwise.h"

#include "bindings/bind.h"

void bind_elementwise(py::module_& m) {
  m.def("rms_norm", [](uint64_t x, int64_t x_stride, uint64_t weight, float eps, int64_t rows, int64_t width,
                       uint64_t out, int threads) {
    py::gil_scoped_release release;
    tlt::rms_norm(at<float>(x), x_stride, at<float>(weight), eps, rows, width, at<float>(out), threads);
  });
  m.def("silu_mul", [](uint64_t gate_up, int64_t rows, int64_t width, uint64_t out, int threads) {
    py::gil_scoped_release release;
    tlt::silu_mul(at<float>(gate_up), rows, width, at<float>(out), threads);
  });
  m.def("rope_write_kv", [](uint64_t qkv, uint64_t cos, uint64_t sin, uint64_t positions, uint64_t slots,
                            uint64_t q_norm, uint64_t k_norm, float eps, int64_t rows, int64_t heads, int64_t kv_heads,
                            int64_t head_dim, int64_t rotary, int64_t length, int64_t num_slots, uint64_t q,
                            uint64_t k_cache, uint64_t v_cache, int threads) {
    py::gil_scoped_release release;
    return tlt::rope_write_kv({at<float>(qkv), at<float>(cos), at<float>(sin), at<int64_t>(positions),
                               at<int64_t>(slots), at<float>(q_norm), at<float>(k_norm), eps, rows, heads, kv_heads,
                               head_dim, rotary, length, num_slots, at<float>(q), at<float>(k_cache),
                               at<float>(v_cache)},
                              threads);
  });
}
