// Draft trees on the device: reranking, packing, the equality walk. Raw device pointers, the caller's stream.
// Legend: R packed nodes of B trees, N candidates, D columns of the walk.
#pragma once
#include <cstdint>

namespace tlt::cuda {

constexpr int kMaxNodes = 128;

struct PackedOut {
  int64_t* tokens;     // [R]
  int32_t* parents;    // [R], local
  int32_t* depths;     // [R]
  int64_t* ancestors;  // [R, 2]
  int32_t* node_indptr;  // [B + 1]
};

// depths and ancestors of given trees. Trees of more than 128 nodes are cut off: Python refuses them.
void pack_trees(const int32_t* parents, const int32_t* node_indptr, int32_t batch, int32_t* depths, int64_t* ancestors,
                uint64_t stream);

// Bytes; all zero before the first call, one call at a time.
int64_t tree_workspace(int32_t batch);

// The best budgets[b] candidates of each tree, as kernels/tlt_kernels/tree.py says. widest: the most candidates of one
// tree. out has room for the sum of the budgets; rows beyond node_indptr[B] keep what they held.
void tree_from_candidates(const int64_t* tokens, const int32_t* parents, const float* scores, const int32_t* cand_indptr,
                          const int32_t* budgets, int32_t batch, int32_t widest, void* workspace, const PackedOut& out,
                          uint64_t stream);

// accept_lens [B], paths [B, steps], emitted [B, steps]: -1 beyond accept_lens. steps >= the largest depth + 1.
void verify_tree(const int64_t* sampled, const int64_t* tokens, const int32_t* parents, const int32_t* node_indptr,
                 int32_t batch, int32_t steps, int32_t* accept_lens, int32_t* paths, int64_t* emitted, uint64_t stream);

}  // namespace tlt::cuda
