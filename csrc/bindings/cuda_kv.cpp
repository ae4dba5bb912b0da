#ifdef TLT_WITH_CUDA
#include "bindings/bind.h"
#include "cuda/kv.h"

void bind_cuda_kv(py::module_& m) {
  m.def(
      "cuda_commit_kv",
      [](uint64_t kv, int planes, int64_t pages, int page, int64_t row_bytes, uint64_t page_table, int table_width,
         uint64_t prefix_lens, uint64_t accept_lens, uint64_t paths, int steps, int batch, uint64_t stream) {
        tlt::cuda::commit_kv({at<void>(kv), planes, pages, page, row_bytes}, {at<int32_t>(page_table), table_width},
                             at<int32_t>(prefix_lens), at<int32_t>(accept_lens), at<int32_t>(paths), steps, batch,
                             stream);
      },
      py::arg("kv"), py::arg("planes"), py::arg("pages"), py::arg("page"), py::arg("row_bytes"), py::arg("page_table"),
      py::arg("table_width"), py::arg("prefix_lens"), py::arg("accept_lens"), py::arg("paths"), py::arg("steps"),
      py::arg("batch"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_copy_pages",
      [](uint64_t kv, int planes, int64_t pages, int page, int64_t row_bytes, uint64_t src, uint64_t dst, int count,
         uint64_t stream) {
        tlt::cuda::copy_pages({at<void>(kv), planes, pages, page, row_bytes}, at<int64_t>(src), at<int64_t>(dst), count,
                              stream);
      },
      py::arg("kv"), py::arg("planes"), py::arg("pages"), py::arg("page"), py::arg("row_bytes"), py::arg("src"),
      py::arg("dst"), py::arg("count"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_gather_accepted",
      [](uint64_t rows, int64_t row_bytes, uint64_t node_indptr, uint64_t accept_lens, uint64_t paths, int steps,
         int batch, uint64_t out, uint64_t stream) {
        tlt::cuda::gather_accepted(at<void>(rows), row_bytes, at<int32_t>(node_indptr), at<int32_t>(accept_lens),
                                   at<int32_t>(paths), steps, batch, at<void>(out), stream);
      },
      py::arg("rows"), py::arg("row_bytes"), py::arg("node_indptr"), py::arg("accept_lens"), py::arg("paths"),
      py::arg("steps"), py::arg("batch"), py::arg("out"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_advance",
      [](uint64_t accept_lens, uint64_t emitted, int steps, int batch, uint64_t prefix_lens, uint64_t roots,
         uint64_t stream) {
        tlt::cuda::advance(at<int32_t>(accept_lens), at<int64_t>(emitted), steps, batch, at<int32_t>(prefix_lens),
                           at<int64_t>(roots), stream);
      },
      py::arg("accept_lens"), py::arg("emitted"), py::arg("steps"), py::arg("batch"), py::arg("prefix_lens"),
      py::arg("roots"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_step_inputs",
      [](uint64_t node_indptr, uint64_t depths, uint64_t prefix_lens, uint64_t page_table, int table_width, int page,
         int64_t pad_slot, int batch, int rows, uint64_t positions, uint64_t draws, uint64_t slots, uint64_t stream) {
        tlt::cuda::step_inputs(at<int32_t>(node_indptr), at<int32_t>(depths), at<int32_t>(prefix_lens),
                               {at<int32_t>(page_table), table_width}, page, pad_slot, batch, rows,
                               at<int64_t>(positions), at<int64_t>(draws), at<int64_t>(slots), stream);
      },
      py::arg("node_indptr"), py::arg("depths"), py::arg("prefix_lens"), py::arg("page_table"), py::arg("table_width"),
      py::arg("page"), py::arg("pad_slot"), py::arg("batch"), py::arg("rows"), py::arg("positions"), py::arg("draws"),
      py::arg("slots"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_copy",
      [](uint64_t to, uint64_t from, int64_t bytes, uint64_t stream) {
        tlt::cuda::copy_async(at<void>(to), at<void>(from), bytes, stream);
      },
      py::arg("to"), py::arg("from_"), py::arg("bytes"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_copy_block",
      [](uint64_t to, uint64_t from, int64_t pitch, int64_t bytes, int64_t rows, uint64_t stream) {
        tlt::cuda::copy_block_async(at<void>(to), at<void>(from), pitch, bytes, rows, stream);
      },
      py::arg("to"), py::arg("from_"), py::arg("pitch"), py::arg("bytes"), py::arg("rows"), py::kw_only(),
      py::arg("stream"));
}
#endif
