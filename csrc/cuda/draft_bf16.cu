#include "draft_rows.cuh"

template void tlt::cuda::draft_typed<__nv_bfloat16>(const DraftArgs&, cudaStream_t);
