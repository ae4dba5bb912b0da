#include "draft.h"

#include "row.cuh"

namespace tlt::cuda {

template <typename T>
void draft_typed(const DraftArgs& a, cudaStream_t stream);

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
