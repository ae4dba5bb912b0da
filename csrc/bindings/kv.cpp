#include "cpu/kv.h"

#include "bindings/bind.h"

void bind_kv(py::module_& m) {
  m.def("write_rows", [](uint64_t rows, int64_t row_stride, uint64_t cache, int64_t page_stride, int64_t slot_stride,
                         int64_t pages, int64_t page, int64_t row_bytes, uint64_t slots, int64_t count) {
    py::gil_scoped_release release;
    tlt::write_rows(at<char>(rows), row_stride, at<char>(cache), page_stride, slot_stride, pages, page, row_bytes,
                    at<int64_t>(slots), count);
  });
  m.def("commit_kv", [](uint64_t kv, int64_t planes, int64_t pages, int64_t page, int64_t slot_bytes,
                        uint64_t page_table, int64_t table_width, uint64_t prefix_lens, uint64_t accept_lens,
                        uint64_t paths, int64_t path_width, int64_t batch, int threads) {
    py::gil_scoped_release release;
    tlt::commit_kv(at<char>(kv), planes, pages, page, slot_bytes, at<int32_t>(page_table), table_width,
                   at<int32_t>(prefix_lens), at<int32_t>(accept_lens), at<int32_t>(paths), path_width, batch, threads);
  });
  m.def("copy_pages", [](uint64_t kv, int64_t planes, int64_t pages, int64_t page_bytes, uint64_t src, uint64_t dst,
                         int64_t count) {
    py::gil_scoped_release release;
    tlt::copy_pages(at<char>(kv), planes, pages, page_bytes, at<int64_t>(src), at<int64_t>(dst), count);
  });
}
