#include "cuda/noise.h"

#include "cuda/common.cuh"
#include "philox.h"

namespace tlt::cuda {
namespace {

constexpr int kThreads = 256;

// A thread owns one Philox counter, that is four neighbouring ids of one row. Grid-stride over all counters.
__global__ void noise_kernel(const int64_t* keys, const int64_t* positions, const int64_t* samples,
                             const int64_t* segments, int64_t rows, int64_t vocab, uint32_t purpose, float* out) {
  const int64_t counters = (vocab + 3) / 4;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < rows * counters; i += step) {
    const int64_t r = i / counters, first = i % counters * 4;
    const Words4 words = noise_words(static_cast<uint64_t>(keys[r]), static_cast<uint32_t>(positions[r]),
                                     static_cast<uint32_t>(first / 4), purpose, static_cast<uint32_t>(samples[r]),
                                     static_cast<uint32_t>(segments[r]));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first + j < vocab) out[r * vocab + first + j] = gumbel_from_word(words.x[j]);
    }
  }
}

}  // namespace

void gumbel_noise(const int64_t* keys, const int64_t* positions, const int64_t* samples, const int64_t* segments,
                  int64_t rows, int64_t vocab, uint32_t purpose, float* out, uint64_t stream) {
  if (rows == 0) return;
  const int64_t blocks = (rows * ((vocab + 3) / 4) + kThreads - 1) / kThreads;
  const int grid = static_cast<int>(blocks < 65536 ? blocks : 65536);
  noise_kernel<<<grid, kThreads, 0, as_stream(stream)>>>(keys, positions, samples, segments, rows, vocab, purpose, out);
  check_launch("gumbel_noise");
}

}  // namespace tlt::cuda
