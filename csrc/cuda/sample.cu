// Launches of the fused sampler: history counts, the two row kernels, and the counts' return to zero.
#include "sample_rows.cuh"

namespace tlt::cuda {

template <typename T>
void sample_typed(const SampleArgs& a, cudaStream_t stream);

namespace {

// One block a history. add = false undoes it, so that the counts are zero between calls.
__global__ void count_history(const SampleArgs a, bool add) {
  const int h = blockIdx.y, begin = a.history_indptr[h], end = a.history_indptr[h + 1];
  const int prompt_end = begin + a.history_prompt[h];
  uint32_t* counts = a.counts + static_cast<int64_t>(h) * a.vocab;
  for (int i = begin + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const int64_t id = a.history_ids[i];
    if (id < 0 || id >= a.vocab) continue;
    if (!add) {
      atomicExch(&counts[id], 0u);
    } else if (i < prompt_end) {
      atomicOr(&counts[id], 0x80000000u);
    } else {
      atomicAdd(&counts[id], 1u);
    }
  }
}

}  // namespace

int64_t sample_workspace(int32_t rows, int32_t vocab) {
  return static_cast<int64_t>(rows) * (kMaxSplits * sizeof(Best) + strips_of(vocab) * sizeof(StripSum));
}

void count_histories(const SampleArgs& a, bool add, uint64_t stream) {
  if (!a.history_row || a.histories == 0 || !penalised(a)) return;
  count_history<<<dim3(4, a.histories), 256, 0, as_stream(stream)>>>(a, add);
  check_launch("count_history");
}

void sample(const SampleArgs& a, uint64_t stream) {
  if (a.rows == 0) return;
  count_histories(a, true, stream);
  switch (a.dtype) {
    case Dtype::kFloat32: sample_typed<float>(a, as_stream(stream)); break;
    case Dtype::kFloat16: sample_typed<__half>(a, as_stream(stream)); break;
    case Dtype::kBfloat16: sample_typed<__nv_bfloat16>(a, as_stream(stream)); break;
  }
  count_histories(a, false, stream);
}

}  // namespace tlt::cuda
