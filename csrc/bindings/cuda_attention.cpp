#ifdef TLT_WITH_CUDA
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "bindings/bind.h"
#include "cuda/attention.h"

void bind_cuda_attention(py::module_& m) {
#ifdef TLT_HOPPER
  m.attr("with_hopper") = true;
#else
  m.attr("with_hopper") = false;
#endif
  m.def(
      "cuda_tree_attention",
      [](const std::vector<uint64_t>& addresses, const std::vector<int64_t>& sizes, float scale_log2, int dtype,
         uint64_t stream) {
        if (addresses.size() != 11 || sizes.size() != 17) {
          throw py::value_error("cuda_tree_attention: expected 11 addresses and 17 sizes, got " +
                                std::to_string(addresses.size()) + " and " + std::to_string(sizes.size()));
        }
        tlt::cuda::AttentionArgs a{};  // the order of tlt_kernels.triton.attention.TreeAttention._run_cuda
        a.q = at<void>(addresses[0]), a.k_cache = at<void>(addresses[1]), a.v_cache = at<void>(addresses[2]);
        a.page_table = at<int32_t>(addresses[3]), a.ancestors = at<int64_t>(addresses[4]);
        a.items = at<int32_t>(addresses[5]), a.tiles = at<int32_t>(addresses[6]), a.out = at<void>(addresses[7]);
        a.part = at<float>(addresses[8]), a.stats = at<float>(addresses[9]);
        a.arrivals = at<int32_t>(addresses[10]);
        a.q_row = sizes[0], a.page_stride = sizes[1], a.slot_stride = sizes[2], a.head_stride = sizes[3];
        a.table_stride = sizes[4];
        const auto size = [&](int i) { return static_cast<int32_t>(sizes[i]); };
        a.page = size(5), a.group = size(6), a.kv_heads = size(7), a.nodes_per_tile = size(8), a.max_items = size(9);
        a.max_tiles = size(10), a.block_m = size(11), a.stages = size(12), a.early = size(13);
        a.hopper = size(14), a.pages = size(15), a.cluster = size(16);
        a.scale_log2 = scale_log2, a.dtype = static_cast<tlt::cuda::Dtype>(dtype);
        tlt::cuda::tree_attention(a, stream);
      },
      py::arg("addresses"), py::arg("sizes"), py::arg("scale_log2"), py::arg("dtype"), py::kw_only(),
      py::arg("stream"));
  m.def("cuda_attention_clusters", &tlt::cuda::attention_clusters, py::arg("block_m"), py::arg("stages"),
        py::arg("cluster"));
}
#endif
