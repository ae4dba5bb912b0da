#include "bindings/bind.h"
#include "cpu/attention.h"

void bind_attention(py::module_& m) {
  m.def("tree_attention",
        [](int32_t dtype, uint64_t q, int64_t q_stride, uint64_t k_cache, uint64_t v_cache, int64_t pages, int64_t page,
           int64_t kv_heads, int64_t page_stride, int64_t slot_stride, int64_t head_stride, uint64_t page_table,
           int64_t table_width, uint64_t prefix_lens, uint64_t node_indptr, uint64_t ancestors, uint64_t causal,
           uint64_t positions, int64_t batch, int64_t rows, int64_t heads, int64_t dim, float scale, int64_t window,
           int threads, uint64_t out) {
          py::gil_scoped_release release;
          tlt::AttentionArgs args{static_cast<tlt::Float>(dtype),
                                  at<void>(q),
                                  q_stride,
                                  at<void>(k_cache),
                                  at<void>(v_cache),
                                  pages,
                                  page,
                                  kv_heads,
                                  page_stride,
                                  slot_stride,
                                  head_stride,
                                  at<int32_t>(page_table),
                                  table_width,
                                  at<int32_t>(prefix_lens),
                                  at<int32_t>(node_indptr),
                                  at<int64_t>(ancestors),
                                  at<uint8_t>(causal),
                                  at<int64_t>(positions),
                                  batch,
                                  rows,
                                  heads,
                                  dim,
                                  scale,
                                  window,
                                  threads,
                                  at<void>(out)};
          tlt::tree_attention(args);
        });
}
