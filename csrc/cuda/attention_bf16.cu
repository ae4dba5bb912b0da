#include "attention.cuh"

template void tlt::cuda::tree_attention_typed<__nv_bfloat16>(const AttentionArgs&, uint64_t);
