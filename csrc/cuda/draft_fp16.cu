#include "draft_rows.cuh"

template void tlt::cuda::draft_typed<__half>(const DraftArgs&, cudaStream_t);
