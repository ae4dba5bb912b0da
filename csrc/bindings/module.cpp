// The Python module tlt_engine._C. Each area binds its own functions in bindings/<area>.cpp; all of them take raw
// addresses (uint64) and sizes. Python owns every check and keeps the tensors alive.
#include "bindings/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ and CUDA backends of tlt_kernels on raw pointers";
#ifdef TLT_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  bind_attention(m);
  bind_kv(m);
  bind_linear(m);
  bind_elementwise(m);
  bind_noise(m);
  bind_sample(m);
  bind_step(m);
  bind_tree(m);
  bind_suffix(m);
#ifdef TLT_WITH_CUDA
  bind_cuda_attention(m);
  bind_cuda_invariant(m);
  bind_cuda_kv(m);
  bind_cuda_noise(m);
  bind_cuda_sample(m);
  bind_cuda_tree(m);
#endif
}
