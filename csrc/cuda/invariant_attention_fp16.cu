#include "invariant_attention.cuh"

template void tlt::cuda::invariant_attention_typed<__half>(const InvariantStep&, const InvariantPlan&, const InvariantLayer&, uint64_t);
