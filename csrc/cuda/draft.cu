#include "draft_rows.cuh"

namespace tlt::cuda {

// Compiled in files of their own.
extern template void draft_typed<float>(const DraftArgs&, cudaStream_t);
extern template void draft_typed<__half>(const DraftArgs&, cudaStream_t);
extern template void draft_typed<__nv_bfloat16>(const DraftArgs&, cudaStream_t);

int64_t draft_workspace(int32_t rows, int32_t columns) {
  return static_cast<int64_t>(rows) * (slots_of(columns) * sizeof(float) + draft_strips(columns) * sizeof(float2));
}

void noisy_top_k(const DraftArgs& a, uint64_t stream) {
  if (a.rows.rows == 0 || a.k == 0) return;
  count_histories(a.rows, true, stream);
  switch (a.rows.dtype) {
    case Dtype::kFloat32: draft_typed<float>(a, as_stream(stream)); break;
    case Dtype::kFloat16: draft_typed<__half>(a, as_stream(stream)); break;
    case Dtype::kBfloat16: draft_typed<__nv_bfloat16>(a, as_stream(stream)); break;
  }
  count_histories(a.rows, false, stream);
}

}  // namespace tlt::cuda
