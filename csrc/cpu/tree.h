// Draft trees of a batch, packed: ancestor words, reranking, the equality walk. One call serves the whole batch.
// Local node 0 of each tree is its root (parent -1); a parent stands before its children.
#pragma once
#include <cstdint>

namespace tlt {

constexpr int64_t kMaxTreeNodes = 128;

// depths [rows], ancestors [rows, 2]. Throws std::invalid_argument for trees of other shapes.
void pack_trees(const int32_t* parents, const int32_t* indptr, int64_t batch, int64_t rows, int32_t* depths,
                int64_t* ancestors);

// Writes the kept nodes' tokens and parents and indptr [batch + 1]; returns their number. out_tokens and out_parents
// hold the sum of the budgets. Throws std::invalid_argument for candidates that are not trees.
int64_t tree_from_candidates(const int64_t* tokens, const int32_t* parents, const float* scores, const int32_t* indptr,
                             const int32_t* budgets, int64_t batch, int64_t rows, int64_t* out_tokens,
                             int32_t* out_parents, int32_t* out_indptr);

// accept_lens [batch], paths and out_tokens [batch, steps] with -1 behind each path. Throws std::invalid_argument when
// a path is longer than steps, or the bounds are not those of `rows` nodes.
void verify_tree(const int64_t* sampled, const int64_t* tokens, const int32_t* parents, const int32_t* indptr,
                 int64_t batch, int64_t rows, int64_t steps, int32_t* accept_lens, int32_t* paths, int64_t* out_tokens);

}  // namespace tlt
