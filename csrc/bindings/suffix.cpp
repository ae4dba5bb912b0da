#include "bindings/bind.h"
#include "cpu/suffix.h"

// Every array is an address of int64 (chances: double) that Python keeps alive; handles are plain integers.
void bind_suffix(py::module_& m) {
  using tlt::DraftRequest;
  using tlt::SuffixPool;
  m.attr("suffix_request_words") = sizeof(DraftRequest) / sizeof(int64_t);
  m.attr("suffix_context") = tlt::kContext;
  py::class_<SuffixPool>(m, "SuffixPool")
      .def(py::init([](int64_t byte_budget, float sharpness, float unseen_noise, bool across_prompts) {
        return new SuffixPool(byte_budget, {sharpness, unseen_noise}, across_prompts);
      }))
      .def("open",
           [](SuffixPool& pool, const std::string& key, uint64_t prompt, int64_t prompt_len, uint64_t stops,
              int64_t num_stops, uint64_t allowed, int64_t num_allowed) {
             py::gil_scoped_release release;
             return pool.open(key, at<int64_t>(prompt), prompt_len, at<int64_t>(stops), num_stops, at<int64_t>(allowed),
                              num_allowed);
           })
      .def("append",
           [](SuffixPool& pool, uint64_t handles, uint64_t indptr, int64_t count, uint64_t tokens) {
             py::gil_scoped_release release;
             pool.append(at<int64_t>(handles), at<int64_t>(indptr), count, at<int64_t>(tokens));
           })
      .def("propose",
           [](SuffixPool& pool, uint64_t requests, int64_t count, double min_chance, uint64_t indptr, uint64_t tokens,
              uint64_t parents, uint64_t chances) {
             py::gil_scoped_release release;
             pool.propose(at<DraftRequest>(requests), count, min_chance, at<int64_t>(indptr), at<int64_t>(tokens),
                          at<int64_t>(parents), at<double>(chances));
           })
      .def("close", &SuffixPool::close)
      .def("bytes", &SuffixPool::bytes)
      .def("groups", &SuffixPool::groups)
      .def("samples", &SuffixPool::samples)
      .def("occurrences", [](const SuffixPool& pool, const std::string& key, uint64_t tokens, int64_t count) {
        return pool.occurrences(key, at<int64_t>(tokens), count);
      });
}
