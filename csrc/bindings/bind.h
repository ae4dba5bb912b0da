#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;

void bind_attention(py::module_& m);
void bind_cuda_noise(py::module_& m);
void bind_kv(py::module_& m);
void bind_linear(py::module_& m);
void bind_noise(py::module_& m);
void bind_sample(py::module_& m);
void bind_tree(py::module_& m);
void bind_suffix(py::module_& m);

// Addresses travel as integers: no tensor type crosses the border.
template <typename T>
inline T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
