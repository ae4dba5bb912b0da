#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;

void bind_attention(py::module_& m);
void bind_cuda_noise(py::module_& m);
void bind_kv(py::module_& m);
void bind_linear(py::module_& m);
void bind_elementwise(py::module_& m);
void bind_noise(py::module_& m);
void bind_sample(py::module_& m);
void bind_step(py::module_& m);
void bind_tree(py::module_& m);
void bind_suffix(py::module_& m);

#ifdef TLT_WITH_CUDA
void bind_cuda_attention(py::module_& m);
void bind_cuda_invariant(py::module_& m);
void bind_cuda_kv(py::module_& m);
void bind_cuda_sample(py::module_& m);
void bind_cuda_tree(py::module_& m);
#endif

// Addresses travel as integers: no tensor type crosses the border.
template <typename T>
inline T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
