// Cuts in the order (z descending, id ascending): the last entry that top-k or top-p keeps.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"

namespace tlt {

// Scratch of one thread, reused for all its rows.
struct SelectScratch {
  std::vector<float> groups;
  std::vector<Entry> entries;
};

// The k-th entry; {-inf, last id} when fewer survive. k >= 1.
Entry top_k_cut(const float* z, int64_t padded, int64_t k, SelectScratch& scratch);

// The last entry of the smallest set whose mass reaches p of that of all survivors. max = the largest z, finite.
Entry top_p_cut(const float* z, int64_t padded, float p, float max, SelectScratch& scratch);

}  // namespace tlt
