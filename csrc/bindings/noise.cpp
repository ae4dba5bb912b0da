#include "cpu/noise.h"

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "philox.h"

void bind_noise(py::module_& m) {
  m.def("gumbel_noise", [](uint64_t keys, uint64_t positions, uint64_t samples, uint64_t segments, int64_t rows,
                           int64_t vocab, uint32_t purpose, int threads, uint64_t out) {
    py::gil_scoped_release release;
    tlt::gumbel_noise({at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments)}, rows,
                      vocab, purpose, threads, at<float>(out));
  });
  m.def("gumbel_noise_at", [](uint64_t keys, uint64_t positions, uint64_t samples, uint64_t segments, uint64_t tokens,
                              int64_t rows, uint32_t purpose, uint64_t out) {
    py::gil_scoped_release release;
    tlt::gumbel_noise_at({at<int64_t>(keys), at<int64_t>(positions), at<int64_t>(samples), at<int64_t>(segments)},
                         at<int64_t>(tokens), rows, purpose, at<float>(out));
  });
  m.def("philox4x32_10", [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    const tlt::Words4 words = tlt::philox4x32_10(c0, c1, c2, c3, key);
    return py::make_tuple(words.x[0], words.x[1], words.x[2], words.x[3]);
  });
  m.def("gumbel_from_words", [](uint64_t words, int64_t count, uint64_t out) {
    const uint32_t* in = at<uint32_t>(words);
    for (int64_t i = 0; i < count; ++i) at<float>(out)[i] = tlt::gumbel_from_word(in[i]);
  });
  m.def("check_all_words", [](int threads) {
    tlt::WordReport report;
    {
      py::gil_scoped_release release;
      report = tlt::check_all_words(threads);
    }
    py::dict out;
    out["count"] = report.count, out["not_finite"] = report.not_finite;
    out["increases"] = report.increases, out["not_bounded"] = report.not_bounded;
    out["min"] = report.lowest, out["max"] = report.highest;
    return out;
  });
  m.def("noise_tail", [](uint64_t key, int64_t rows, int64_t vocab, const std::vector<float>& thresholds, int threads) {
    tlt::TailReport report;
    {
      py::gil_scoped_release release;
      report = tlt::noise_tail(key, rows, vocab, thresholds, threads);
    }
    py::dict out;
    out["count"] = report.count, out["not_finite"] = report.not_finite, out["above"] = report.above;
    out["min"] = report.lowest, out["max"] = report.highest;
    return out;
  });
  m.def("isa", [] { return tlt::row_kernels().isa; });
  m.def("use_isa", &tlt::use_isa);
}
