// A decode step between Python's lists and the arrays of the kernels (engine/packing.py, engine/layout.py): one call for
// what a pass emitted, one for what the next one takes. Lists are read through the C API: 15 ns a number.
#include <algorithm>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "cpu/step.h"

namespace {

template <typename T>
void read_numbers(py::handle from, std::vector<T>& to) {
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(from.ptr(), "expected a sequence of ints"));
  if (!fast) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr()), known = static_cast<Py_ssize_t>(to.size());
  to.resize(static_cast<size_t>(n));
  for (Py_ssize_t i = known; i < n; ++i) {
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    to[static_cast<size_t>(i)] = static_cast<T>(value);
  }
}

void read_tree(py::handle draft, tlt::Tree& tree) {
  tree.tokens.clear(), tree.parents.clear();
  read_numbers(draft.attr("tokens"), tree.tokens);
  read_numbers(draft.attr("parents"), tree.parents);
}

py::list as_list(const int64_t* numbers, int64_t count) {
  py::list list(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) PyList_SET_ITEM(list.ptr(), i, PyLong_FromLongLong(numbers[i]));
  return list;
}

tlt::StepArrays arrays_at(const std::vector<uint64_t>& p) {
  if (p.size() != 15) throw py::value_error("pack: expected 15 addresses, got " + std::to_string(p.size()));
  return {at<int64_t>(p[0]),  at<int64_t>(p[1]),  at<int64_t>(p[2]),  at<int64_t>(p[3]),  at<int32_t>(p[4]),
          at<int32_t>(p[5]),  at<uint8_t>(p[6]),  at<int64_t>(p[7]),  at<int64_t>(p[8]),  at<int64_t>(p[9]),
          at<int64_t>(p[10]), at<float>(p[11]),   at<int32_t>(p[12]), at<int32_t>(p[13]), at<int32_t>(p[14])};
}

// Where a step's arrays lie; made once a layout.
struct Arrays {
  Arrays(const std::vector<uint64_t>& addresses, int64_t rows, int64_t requests, int64_t page, int64_t width,
         int64_t dummy_page)
      : at(arrays_at(addresses)), sizes{rows, requests, page, width, dummy_page} {}
  tlt::StepArrays at;
  tlt::StepSizes sizes;
};

// The sequences that decode together, from one pass to the next while none of them comes or goes.
class Lanes {
 public:
  void add(py::list pages, int64_t kv_len, int64_t key, int64_t sample, int64_t segment, float temperature,
           int64_t length, int64_t end, py::handle stops) {
    tlt::Lane lane{kv_len, key, sample, segment, temperature, length, end, {}, {}};
    read_numbers(stops, lane.stops);
    lanes_.push_back(std::move(lane));
    pages_.push_back(std::move(pages));
  }

  py::tuple commit(uint64_t accept_lens, uint64_t emitted, int64_t steps) {
    const int32_t* counts = at<int32_t>(accept_lens);
    const int64_t* tokens = at<int64_t>(emitted);
    py::list kept_tokens(lanes_.size()), accepted(lanes_.size()), ended(0);
    for (size_t b = 0; b < lanes_.size(); ++b) {
      const tlt::Kept kept = tlt::keep(lanes_[b], tokens + static_cast<int64_t>(b) * steps, counts[b]);
      kept_tokens[b] = as_list(tokens + static_cast<int64_t>(b) * steps, kept.tokens);
      accepted[b] = py::int_(kept.accepted);
      if (kept.ended) ended.append(b);
    }
    return py::make_tuple(std::move(kept_tokens), std::move(accepted), std::move(ended));
  }

  py::tuple pack(const py::list& trees, const Arrays& arrays) {
    if (trees.size() != lanes_.size() || static_cast<int64_t>(trees.size()) > arrays.sizes.requests) {
      throw py::value_error("pack: expected a tree for each of " + std::to_string(lanes_.size()) +
                            " sequences, at most " + std::to_string(arrays.sizes.requests) + ", got " +
                            std::to_string(trees.size()));
    }
    int64_t next = 0;
    int32_t deepest = 0;
    arrays.at.node_indptr[0] = 0;
    for (size_t b = 0; b < trees.size(); ++b) {
      read_numbers(pages_[b], lanes_[b].pages);  // they only grow: those known are not read again
      read_tree(trees[b], tree_);
      deepest = std::max(
          deepest, tlt::pack_tree(arrays.at, arrays.sizes, lanes_[b], tree_, static_cast<int64_t>(b), next));
      next += tree_.size();
    }
    tlt::pad_step(arrays.at, arrays.sizes, static_cast<int64_t>(trees.size()), next);
    return py::make_tuple(next, deepest);
  }

 private:
  std::vector<tlt::Lane> lanes_;
  std::vector<py::list> pages_;
  tlt::Tree tree_;
};

py::list unfit_trees(const py::list& trees, const py::list& limits, int64_t vocab) {
  py::list unfit;
  tlt::Tree tree;
  for (size_t i = 0; i < trees.size(); ++i) {
    const auto limit = py::reinterpret_borrow<py::tuple>(limits[i]);
    read_tree(trees[i], tree);
    if (!tlt::fits(tree, limit[0].cast<int64_t>(), limit[1].cast<int64_t>(), limit[2].cast<int64_t>(), vocab)) {
      unfit.append(i);
    }
  }
  return unfit;
}

}  // namespace

void bind_step(py::module_& m) {
  py::class_<Arrays>(m, "StepArrays")
      .def(py::init<const std::vector<uint64_t>&, int64_t, int64_t, int64_t, int64_t, int64_t>(), py::arg("addresses"),
           py::kw_only(), py::arg("rows"), py::arg("requests"), py::arg("page"), py::arg("width"),
           py::arg("dummy_page"));
  py::class_<Lanes>(m, "Lanes")
      .def(py::init<>())
      .def("add", &Lanes::add, py::arg("pages"), py::kw_only(), py::arg("kv_len"), py::arg("key"), py::arg("sample"),
           py::arg("segment"), py::arg("temperature"), py::arg("length"), py::arg("end"), py::arg("stops"))
      .def("commit", &Lanes::commit, py::arg("accept_lens"), py::arg("tokens"), py::arg("steps"))
      .def("pack", &Lanes::pack, py::arg("trees"), py::arg("arrays"));
  m.def("unfit_trees", &unfit_trees, py::arg("trees"), py::arg("limits"), py::arg("vocab"));
}
