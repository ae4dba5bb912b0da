#ifdef TLT_WITH_CUDA
#include <pybind11/stl.h>

#include <vector>

#include "bindings/bind.h"
#include "cuda/invariant.h"

namespace {

using Addresses = std::vector<uint64_t>;
using Sizes = std::vector<int64_t>;

void expect_count(const char* name, size_t expected, size_t got) {
  if (expected != got) {
    throw py::value_error(std::string(name) + ": expected " + std::to_string(expected) + " entries, got " +
                          std::to_string(got));
  }
}

// The orders of tlt_kernels.triton.invariant_cuda.CudaInvariantAttention.
tlt::cuda::InvariantStep step_of(const Addresses& addresses, const Sizes& sizes) {
  expect_count("step", 6, addresses.size());
  expect_count("step_sizes", 11, sizes.size());
  const auto size = [&](int i) { return static_cast<int32_t>(sizes[i]); };
  tlt::cuda::InvariantStep s{};
  s.page_table = at<int32_t>(addresses[0]), s.prefix_lens = at<int32_t>(addresses[1]);
  s.node_indptr = at<int32_t>(addresses[2]), s.ancestors = at<int64_t>(addresses[3]);
  s.causal = at<uint8_t>(addresses[4]), s.positions = at<int64_t>(addresses[5]);
  s.table_stride = sizes[0], s.rows = size(1), s.requests = size(2), s.page = size(3), s.group = size(4);
  s.window = size(5), s.nodes_per_tile = size(6), s.chunk_nodes = size(7), s.part_slots = size(8);
  s.workers = size(9), s.chunk_workers = size(10);
  return s;
}

tlt::cuda::InvariantPlan plan_of(const Addresses& addresses) {
  expect_count("plan", 5, addresses.size());
  return {at<int32_t>(addresses[0]), at<int32_t>(addresses[1]), at<int32_t>(addresses[2]), at<int32_t>(addresses[3]),
          at<int32_t>(addresses[4])};
}

tlt::cuda::InvariantLayer layer_of(const Addresses& addresses, const Sizes& sizes, float scale_log2, int dtype) {
  expect_count("layer", 8, addresses.size());
  expect_count("layer_sizes", 7, sizes.size());
  const auto size = [&](int i) { return static_cast<int32_t>(sizes[i]); };
  tlt::cuda::InvariantLayer l{};
  l.q = at<void>(addresses[0]), l.k_cache = at<void>(addresses[1]), l.v_cache = at<void>(addresses[2]);
  l.out = at<void>(addresses[3]), l.parts = at<float>(addresses[4]), l.stats = at<float>(addresses[5]);
  l.recent_parts = at<float>(addresses[6]), l.recent_stats = at<float>(addresses[7]);
  l.q_row = sizes[0], l.slot_stride = sizes[1], l.head_stride = sizes[2];
  l.kv_heads = size(3), l.head_dim = size(4), l.block_m = size(5), l.early = size(6);
  l.scale_log2 = scale_log2, l.dtype = static_cast<tlt::cuda::Dtype>(dtype);
  return l;
}

}  // namespace

void bind_cuda_invariant(py::module_& m) {
  m.def(
      "cuda_invariant_plan",
      [](const Addresses& step, const Sizes& step_sizes, const Addresses& plan, uint64_t stream) {
        tlt::cuda::invariant_plan(step_of(step, step_sizes), plan_of(plan), stream);
      },
      py::arg("step"), py::arg("step_sizes"), py::arg("plan"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_invariant_attention",
      [](const Addresses& step, const Sizes& step_sizes, const Addresses& plan, const Addresses& layer,
         const Sizes& layer_sizes, float scale_log2, int dtype, uint64_t stream) {
        tlt::cuda::invariant_attention(step_of(step, step_sizes), plan_of(plan),
                                       layer_of(layer, layer_sizes, scale_log2, dtype), stream);
      },
      py::arg("step"), py::arg("step_sizes"), py::arg("plan"), py::arg("layer"), py::arg("layer_sizes"),
      py::arg("scale_log2"), py::arg("dtype"), py::kw_only(), py::arg("stream"));
}
#endif
