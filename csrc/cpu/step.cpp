#include "cpu/step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/tree.h"

namespace tlt {
namespace {

[[noreturn]] void refuse(int64_t b, const std::string& what) {
  throw std::invalid_argument("pack: sequence " + std::to_string(b) + ": " + what);
}

}  // namespace

Kept keep(Lane& lane, const int64_t* emitted, int64_t count) {
  Kept kept{0, 0, false};
  while (kept.tokens < count && !kept.ended) {
    const int64_t token = emitted[kept.tokens];
    if (token < 0) {
      kept.ended = true;
      break;
    }
    ++kept.tokens;
    kept.ended = std::binary_search(lane.stops.begin(), lane.stops.end(), token) ||
                 lane.length + kept.tokens >= lane.end;
  }
  kept.accepted = std::min(kept.tokens, count - 1);  // the last one emitted is the bonus token
  lane.length += kept.tokens;
  lane.kv_len += kept.tokens;
  return kept;
}

bool fits(const Tree& tree, int64_t root, int64_t max_nodes, int64_t max_depth, int64_t vocab) {
  const int64_t n = tree.size();
  if (n < 1 || n > std::min(max_nodes, kMaxTreeNodes) || n != static_cast<int64_t>(tree.parents.size())) return false;
  if (tree.tokens[0] != root || tree.parents[0] != -1) return false;
  int32_t depths[kMaxTreeNodes] = {0};
  for (int64_t i = 0; i < n; ++i) {
    const int32_t parent = tree.parents[i];
    if (tree.tokens[i] < 0 || tree.tokens[i] >= vocab || (i > 0 && (parent < 0 || parent >= i))) return false;
    if (i > 0) depths[i] = depths[parent] + 1;
    if (depths[i] > max_depth) return false;
  }
  return true;
}

int32_t pack_tree(const StepArrays& a, const StepSizes& sizes, const Lane& lane, const Tree& tree, int64_t b,
                  int64_t first) {
  const int64_t n = tree.size(), have = static_cast<int64_t>(lane.pages.size());
  if (n < 1 || n > kMaxTreeNodes || n != static_cast<int64_t>(tree.parents.size()) || first + n > sizes.rows) {
    refuse(b, "expected 1 to 128 nodes with a parent each, within " + std::to_string(sizes.rows) + " rows, got " +
                  std::to_string(n) + " from row " + std::to_string(first) + " on");
  }
  if (have > sizes.width || (lane.kv_len + n + sizes.page - 1) / sizes.page > have) {
    refuse(b, "expected pages for " + std::to_string(lane.kv_len + n) + " slots, at most " +
                  std::to_string(sizes.width) + ", got " + std::to_string(have));
  }
  std::copy(lane.pages.begin(), lane.pages.end(), a.page_table + b * sizes.width);
  a.prefix_lens[b] = static_cast<int32_t>(lane.kv_len);
  a.causal[b] = 0;
  a.node_indptr[b + 1] = static_cast<int32_t>(first + n);
  int32_t deepest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = first + i, parent = tree.parents[i], slot = lane.kv_len + i;
    if (i == 0 ? parent != -1 : parent < 0 || parent >= i) refuse(b, "expected parents before their children");
    a.token_ids[row] = tree.tokens[i];
    a.parents[row] = static_cast<int32_t>(parent);
    a.depths[row] = i == 0 ? 0 : a.depths[first + parent] + 1;
    deepest = std::max(deepest, a.depths[row]);
    for (int word = 0; word < 2; ++word) {
      const uint64_t above = i == 0 ? 0 : static_cast<uint64_t>(a.ancestors[2 * (first + parent) + word]);
      const uint64_t own = i / 64 == word ? uint64_t{1} << (i % 64) : 0;
      a.ancestors[2 * row + word] = static_cast<int64_t>(above | own);
    }
    a.positions[row] = lane.kv_len + a.depths[row];
    a.draws[row] = a.positions[row] + 1;
    a.slots[row] = static_cast<int64_t>(lane.pages[slot / sizes.page]) * sizes.page + slot % sizes.page;
    a.keys[row] = lane.key, a.samples[row] = lane.sample, a.segments[row] = lane.segment;
    a.temperature[row] = lane.temperature;
  }
  return deepest;
}

void pad_step(const StepArrays& a, const StepSizes& sizes, int64_t requests, int64_t rows) {
  for (int64_t b = requests; b < sizes.requests; ++b) {
    a.prefix_lens[b] = 0, a.causal[b] = 0, a.node_indptr[b + 1] = static_cast<int32_t>(rows);
  }
  for (int64_t row = rows; row < sizes.rows; ++row) {
    a.token_ids[row] = a.positions[row] = a.ancestors[2 * row] = a.ancestors[2 * row + 1] = 0;
    a.keys[row] = a.draws[row] = a.samples[row] = a.segments[row] = 0;
    a.parents[row] = a.depths[row] = 0, a.temperature[row] = 0;
    a.slots[row] = sizes.dummy_page * sizes.page + row % sizes.page;
  }
}

}  // namespace tlt
