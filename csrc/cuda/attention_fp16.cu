#include "attention.cuh"

template void tlt::cuda::tree_attention_typed<__half>(const AttentionArgs&, uint64_t);
