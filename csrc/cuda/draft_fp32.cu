#include "draft_rows.cuh"

template void tlt::cuda::draft_typed<float>(const DraftArgs&, cudaStream_t);
