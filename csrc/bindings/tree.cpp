#include "cpu/tree.h"

#include "bindings/bind.h"

void bind_tree(py::module_& m) {
  m.def("pack_trees", [](uint64_t parents, uint64_t indptr, int64_t batch, int64_t rows, uint64_t depths,
                         uint64_t ancestors) {
    py::gil_scoped_release release;
    tlt::pack_trees(at<int32_t>(parents), at<int32_t>(indptr), batch, rows, at<int32_t>(depths), at<int64_t>(ancestors));
  });
  m.def("tree_from_candidates", [](uint64_t tokens, uint64_t parents, uint64_t scores, uint64_t indptr, uint64_t budgets,
                                   int64_t batch, int64_t rows, uint64_t out_tokens, uint64_t out_parents,
                                   uint64_t out_indptr) {
    py::gil_scoped_release release;
    return tlt::tree_from_candidates(at<int64_t>(tokens), at<int32_t>(parents), at<float>(scores), at<int32_t>(indptr),
                                     at<int32_t>(budgets), batch, rows, at<int64_t>(out_tokens),
                                     at<int32_t>(out_parents), at<int32_t>(out_indptr));
  });
  m.def("verify_tree", [](uint64_t sampled, uint64_t tokens, uint64_t parents, uint64_t indptr, int64_t batch,
                          int64_t rows, int64_t steps, uint64_t accept_lens, uint64_t paths, uint64_t out_tokens) {
    py::gil_scoped_release release;
    tlt::verify_tree(at<int64_t>(sampled), at<int64_t>(tokens), at<int32_t>(parents), at<int32_t>(indptr), batch, rows,
                     steps, at<int32_t>(accept_lens), at<int32_t>(paths), at<int64_t>(out_tokens));
  });
}
