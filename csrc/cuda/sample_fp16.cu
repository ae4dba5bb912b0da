#include "sample_launch.cuh"

template void tlt::cuda::sample_typed<__half>(const SampleArgs&, cudaStream_t);
