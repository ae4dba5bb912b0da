#include "attention.h"

#include "common.cuh"

namespace tlt::cuda {

void tree_attention(const AttentionArgs& args, uint64_t stream) {
  switch (args.dtype) {
    case Dtype::kBfloat16: return tree_attention_typed<__nv_bfloat16>(args, stream);
    case Dtype::kFloat16: return tree_attention_typed<__half>(args, stream);
    case Dtype::kFloat32: break;
  }
  throw std::invalid_argument("dtype: expected bf16 or fp16, got fp32; its kernel is Triton's");
}

#ifndef TLT_HOPPER
namespace {

[[noreturn]] void refuse_hopper() {
  throw std::invalid_argument(
      "hopper: expected a build for compute capability 9.0; rebuild with 90 among TLT_CUDA_ARCHITECTURES");
}

}  // namespace

void attend_hopper(const AttentionArgs&, uint64_t) { refuse_hopper(); }

int attention_clusters(int, int, int) { refuse_hopper(); }
#endif

}  // namespace tlt::cuda
