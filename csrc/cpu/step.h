// The host's part of a decode step on flat arrays: which of the emitted tokens are kept, and draft trees turned into
// the arrays that the kernels read. The GPU waits for both between two verifications.
#pragma once
#include <cstdint>
#include <vector>

namespace tlt {

// One decoding sequence. length: its tokens; end: the length at which it ends for certain. stops: ids that end it,
// ascending. pages: of its KV, look-ahead included.
struct Lane {
  int64_t kv_len, key, sample, segment;
  float temperature;
  int64_t length, end;
  std::vector<int64_t> stops;
  std::vector<int32_t> pages;
};

// tokens: how many of the emitted ones are kept; accepted: how many of these are drafts. ended: a stop id, the end or a
// row without a distribution (-1, not kept) came; what lies behind is not kept.
struct Kept {
  int64_t tokens, accepted;
  bool ended;
};

// Advances the lane by what its pass emitted, up to the first stop.
Kept keep(Lane& lane, const int64_t* emitted, int64_t count);

// Arrays of a step, in the order of tlt_engine/engine/layout.py. R rows, B requests of the layout.
struct StepArrays {
  int64_t *token_ids, *positions, *slots, *ancestors;  // [R], [R], [R], [R, 2]
  int32_t *prefix_lens, *node_indptr;                  // [B], [B + 1]
  uint8_t* causal;                                     // [B]
  int64_t *keys, *draws, *samples, *segments;          // [R]
  float* temperature;                                  // [R]
  int32_t *parents, *depths, *page_table;              // [R], [R], [B, width]
};

struct StepSizes {
  int64_t rows, requests, page, width, dummy_page;
};

struct Tree {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

// Whether a tree can run as it is: that root, within the bounds, ids below vocab, parents before their children.
bool fits(const Tree& tree, int64_t root, int64_t max_nodes, int64_t max_depth, int64_t vocab);

// Request b's rows, from row `first` on. Returns the deepest node's depth. Throws std::invalid_argument for what would
// write elsewhere.
int32_t pack_tree(const StepArrays& a, const StepSizes& sizes, const Lane& lane, const Tree& tree, int64_t b,
                  int64_t first);

// Requests from `requests` on and rows from `rows` on belong to nobody: their K and V go to the dummy page.
void pad_step(const StepArrays& a, const StepSizes& sizes, int64_t requests, int64_t rows);

}  // namespace tlt
