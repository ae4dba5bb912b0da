#include "sample_launch.cuh"

template void tlt::cuda::sample_typed<float>(const SampleArgs&, cudaStream_t);
