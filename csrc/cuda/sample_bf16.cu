#include "sample_launch.cuh"

template void tlt::cuda::sample_typed<__nv_bfloat16>(const SampleArgs&, cudaStream_t);
