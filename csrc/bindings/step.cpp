// A decode step's inputs, from the lists that Python keeps to the arrays that the kernels read (engine/layout.py says
// which). One call a step: the GPU waits for it before every verification.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include <pybind11/stl.h>

#include "bindings/bind.h"

namespace {

// Arrays of the step, in the order of layout.frame_sections. R rows, B requests of the layout.
struct Arrays {
  int64_t *token_ids, *positions, *slots, *ancestors;  // [R], [R], [R], [R, 2]
  int32_t *prefix_lens, *node_indptr;                  // [B], [B + 1]
  uint8_t* causal;                                     // [B]
  int64_t *keys, *draws, *samples, *segments;          // [R]
  float* temperature;                                  // [R]
  int32_t *parents, *depths, *page_table;              // [R], [R], [B, width]
};

Arrays arrays_at(const std::vector<uint64_t>& p) {
  if (p.size() != 15) throw py::value_error("pack_decodes: expected 15 addresses, got " + std::to_string(p.size()));
  return {at<int64_t>(p[0]),  at<int64_t>(p[1]),  at<int64_t>(p[2]),  at<int64_t>(p[3]),  at<int32_t>(p[4]),
          at<int32_t>(p[5]),  at<uint8_t>(p[6]),  at<int64_t>(p[7]),  at<int64_t>(p[8]),  at<int64_t>(p[9]),
          at<int64_t>(p[10]), at<float>(p[11]),   at<int32_t>(p[12]), at<int32_t>(p[13]), at<int32_t>(p[14])};
}

// One sequence: its tree's tokens and parents, its pages, and (kv_len, key, sample, segment, temperature).
using Work = std::tuple<std::vector<int64_t>, std::vector<int32_t>, std::vector<int32_t>,
                        std::tuple<int64_t, int64_t, int64_t, int64_t, float>>;

[[noreturn]] void refuse(size_t b, const std::string& what) {
  throw py::value_error("pack_decodes: sequence " + std::to_string(b) + ": " + what);
}

void pack_one(const Arrays& a, const Work& work, size_t b, int64_t first, int64_t page, int64_t width) {
  const auto& [tokens, parents, pages, one] = work;
  const auto& [kv_len, key, sample, segment, temperature] = one;
  const int64_t n = static_cast<int64_t>(tokens.size()), have = static_cast<int64_t>(pages.size());
  if (have > width || (kv_len + n + page - 1) / page > have) {
    refuse(b, "expected pages for " + std::to_string(kv_len + n) + " slots, at most " + std::to_string(width) + ", got " +
                  std::to_string(have));
  }
  std::copy(pages.begin(), pages.end(), a.page_table + static_cast<int64_t>(b) * width);
  a.prefix_lens[b] = static_cast<int32_t>(kv_len);
  a.causal[b] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = first + i, parent = parents[i], slot = kv_len + i;
    if (i == 0 ? parent != -1 : parent < 0 || parent >= i) refuse(b, "expected parents before their children");
    a.token_ids[row] = tokens[i];
    a.parents[row] = static_cast<int32_t>(parent);
    a.depths[row] = i == 0 ? 0 : a.depths[first + parent] + 1;
    for (int word = 0; word < 2; ++word) {
      const uint64_t above = i == 0 ? 0 : static_cast<uint64_t>(a.ancestors[2 * (first + parent) + word]);
      const uint64_t own = i / 64 == word ? uint64_t{1} << (i % 64) : 0;
      a.ancestors[2 * row + word] = static_cast<int64_t>(above | own);
    }
    a.positions[row] = kv_len + a.depths[row];
    a.draws[row] = a.positions[row] + 1;
    a.slots[row] = static_cast<int64_t>(pages[slot / page]) * page + slot % page;
    a.keys[row] = key, a.samples[row] = sample, a.segments[row] = segment, a.temperature[row] = temperature;
  }
}

int64_t pack_decodes(const std::vector<Work>& works, const std::vector<uint64_t>& addresses, int64_t rows,
                     int64_t requests, int64_t page, int64_t width, int64_t dummy_page) {
  const Arrays a = arrays_at(addresses);
  if (static_cast<int64_t>(works.size()) > requests) throw py::value_error("pack_decodes: more sequences than requests");
  int64_t next = 0;
  a.node_indptr[0] = 0;
  for (size_t b = 0; b < works.size(); ++b) {
    const int64_t n = static_cast<int64_t>(std::get<0>(works[b]).size());
    if (n < 1 || n > 128 || n != static_cast<int64_t>(std::get<1>(works[b]).size()) || next + n > rows) {
      refuse(b, "expected 1 to 128 nodes with a parent each, within " + std::to_string(rows) + " rows");
    }
    pack_one(a, works[b], b, next, page, width);
    next += n;
    a.node_indptr[b + 1] = static_cast<int32_t>(next);
  }
  for (int64_t b = static_cast<int64_t>(works.size()); b < requests; ++b) {
    a.prefix_lens[b] = 0, a.causal[b] = 0, a.node_indptr[b + 1] = static_cast<int32_t>(next);
  }
  for (int64_t row = next; row < rows; ++row) {
    a.token_ids[row] = a.positions[row] = a.ancestors[2 * row] = a.ancestors[2 * row + 1] = 0;
    a.keys[row] = a.draws[row] = a.samples[row] = a.segments[row] = 0;
    a.parents[row] = a.depths[row] = 0, a.temperature[row] = 0;
    a.slots[row] = dummy_page * page + row % page;
  }
  return next;
}

}  // namespace

void bind_step(py::module_& m) {
  m.def("pack_decodes", &pack_decodes, py::arg("works"), py::arg("addresses"), py::arg("rows"), py::arg("requests"),
        py::arg("page"), py::arg("width"), py::arg("dummy_page"));
}
