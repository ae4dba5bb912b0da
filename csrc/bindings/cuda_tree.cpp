#ifdef TLT_WITH_CUDA
#include "bindings/bind.h"
#include "cuda/tree.h"

void bind_cuda_tree(py::module_& m) {
  m.def(
      "cuda_pack_trees",
      [](uint64_t parents, uint64_t node_indptr, int batch, uint64_t depths, uint64_t ancestors, uint64_t stream) {
        tlt::cuda::pack_trees(at<int32_t>(parents), at<int32_t>(node_indptr), batch, at<int32_t>(depths),
                              at<int64_t>(ancestors), stream);
      },
      py::arg("parents"), py::arg("node_indptr"), py::arg("batch"), py::arg("depths"), py::arg("ancestors"),
      py::kw_only(), py::arg("stream"));
  m.def("cuda_tree_workspace", &tlt::cuda::tree_workspace);
  m.def(
      "cuda_tree_from_candidates",
      [](uint64_t tokens, uint64_t parents, uint64_t scores, uint64_t cand_indptr, uint64_t budgets, int batch,
         int widest, uint64_t workspace, uint64_t out_tokens, uint64_t out_parents, uint64_t depths,
         uint64_t ancestors, uint64_t node_indptr, uint64_t stream) {
        tlt::cuda::tree_from_candidates(at<int64_t>(tokens), at<int32_t>(parents), at<float>(scores),
                                        at<int32_t>(cand_indptr), at<int32_t>(budgets), batch, widest,
                                        at<void>(workspace),
                                        {at<int64_t>(out_tokens), at<int32_t>(out_parents), at<int32_t>(depths),
                                         at<int64_t>(ancestors), at<int32_t>(node_indptr)},
                                        stream);
      },
      py::arg("tokens"), py::arg("parents"), py::arg("scores"), py::arg("cand_indptr"), py::arg("budgets"),
      py::arg("batch"), py::arg("widest"), py::arg("workspace"), py::arg("out_tokens"), py::arg("out_parents"),
      py::arg("depths"), py::arg("ancestors"), py::arg("node_indptr"), py::kw_only(), py::arg("stream"));
  m.def(
      "cuda_verify_tree",
      [](uint64_t sampled, uint64_t tokens, uint64_t parents, uint64_t node_indptr, int batch, int steps,
         uint64_t accept_lens, uint64_t paths, uint64_t emitted, uint64_t stream) {
        tlt::cuda::verify_tree(at<int64_t>(sampled), at<int64_t>(tokens), at<int32_t>(parents),
                               at<int32_t>(node_indptr), batch, steps, at<int32_t>(accept_lens), at<int32_t>(paths),
                               at<int64_t>(emitted), stream);
      },
      py::arg("sampled"), py::arg("tokens"), py::arg("parents"), py::arg("node_indptr"), py::arg("batch"),
      py::arg("steps"), py::arg("accept_lens"), py::arg("paths"), py::arg("emitted"), py::kw_only(), py::arg("stream"));
}
#endif
