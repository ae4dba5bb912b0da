#include "cpu/tree.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tlt {
namespace {

void check_bounds(const int32_t* indptr, int64_t batch, int64_t rows, int64_t most) {
  if (indptr[0] != 0 || indptr[batch] != rows)
    throw std::invalid_argument("indptr: expected to run from 0 to " + std::to_string(rows) + ", got " +
                                std::to_string(indptr[0]) + " to " + std::to_string(indptr[batch]) +
                                "; give each tree's bounds");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t nodes = static_cast<int64_t>(indptr[b + 1]) - indptr[b];
    if (nodes < 1 || nodes > most)
      throw std::invalid_argument("indptr: expected 1 to " + std::to_string(most) + " nodes a tree, got " +
                                  std::to_string(nodes) + " in tree " + std::to_string(b) + "; verify fewer");
  }
}

void check_parents(const int32_t* parents, int64_t nodes, int64_t tree) {
  for (int64_t i = 0; i < nodes; ++i)
    if (i == 0 ? parents[i] != -1 : parents[i] < 0 || parents[i] >= i)
      throw std::invalid_argument("parents: expected -1 for node 0, an earlier node for others, got " +
                                  std::to_string(parents[i]) + " for node " + std::to_string(i) + " of tree " +
                                  std::to_string(tree) + "; order parents first");
}

struct EdgeHash {
  size_t operator()(const std::pair<int64_t, int64_t>& edge) const {
    return std::hash<int64_t>()(edge.first * 0x9e3779b97f4a7c15 ^ edge.second);
  }
};

// One tree's candidates, siblings with one token merged into the first of them.
struct Candidates {
  std::vector<int64_t> parents;  // stand-in of the parent; of merged candidates too
  std::vector<float> scores;     // best of those that a candidate stands for
  std::vector<std::vector<int64_t>> children;

  Candidates(const int64_t* tokens, const int32_t* given, const float* given_scores, int64_t n)
      : parents(n, -1), scores(given_scores, given_scores + n), children(n) {
    std::vector<int64_t> stands(n, 0);
    std::unordered_map<std::pair<int64_t, int64_t>, int64_t, EdgeHash> first;
    for (int64_t i = 1; i < n; ++i) {
      parents[i] = stands[given[i]];
      const auto found = first.emplace(std::make_pair(parents[i], tokens[i]), i);
      stands[i] = found.first->second;
      if (found.second)
        children[parents[i]].push_back(i);
      else
        scores[stands[i]] = std::max(scores[stands[i]], scores[i]);
    }
  }

  // Ascending.
  std::vector<int64_t> keep(int64_t budget) const {
    const auto worse = [this](int64_t a, int64_t b) {
      return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
    };
    std::priority_queue<int64_t, std::vector<int64_t>, decltype(worse)> open(worse);
    std::vector<int64_t> kept;
    open.push(0);
    while (!open.empty() && static_cast<int64_t>(kept.size()) < budget) {
      const int64_t best = open.top();
      open.pop();
      kept.push_back(best);
      for (int64_t child : children[best]) open.push(child);
    }
    std::sort(kept.begin(), kept.end());
    return kept;
  }
};

}  // namespace

void pack_trees(const int32_t* parents, const int32_t* indptr, int64_t batch, int64_t rows, int32_t* depths,
                int64_t* ancestors) {
  check_bounds(indptr, batch, rows, kMaxTreeNodes);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = indptr[b], nodes = indptr[b + 1] - start;
    check_parents(parents + start, nodes, b);
    for (int64_t i = 0; i < nodes; ++i) {
      const int64_t row = start + i, parent = start + parents[row];
      depths[row] = i == 0 ? 0 : depths[parent] + 1;
      for (int64_t word = 0; word < 2; ++word) {
        const uint64_t own = i / 64 == word ? uint64_t{1} << (i % 64) : 0;
        const uint64_t above = i == 0 ? 0 : static_cast<uint64_t>(ancestors[parent * 2 + word]);
        ancestors[row * 2 + word] = static_cast<int64_t>(own | above);
      }
    }
  }
}

int64_t tree_from_candidates(const int64_t* tokens, const int32_t* parents, const float* scores, const int32_t* indptr,
                             const int32_t* budgets, int64_t batch, int64_t rows, int64_t* out_tokens,
                             int32_t* out_parents, int32_t* out_indptr) {
  check_bounds(indptr, batch, rows, rows);
  int64_t count = 0;
  out_indptr[0] = 0;
  std::vector<int32_t> place;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = indptr[b], n = indptr[b + 1] - start;
    check_parents(parents + start, n, b);
    const Candidates candidates(tokens + start, parents + start, scores + start, n);
    place.assign(n, -1);
    int32_t next = 0;
    for (int64_t node : candidates.keep(budgets[b])) {
      place[node] = next++;
      out_tokens[count] = tokens[start + node];
      out_parents[count++] = node == 0 ? -1 : place[candidates.parents[node]];
    }
    out_indptr[b + 1] = static_cast<int32_t>(count);
  }
  return count;
}

void verify_tree(const int64_t* sampled, const int64_t* tokens, const int32_t* parents, const int32_t* indptr,
                 int64_t batch, int64_t rows, int64_t steps, int32_t* accept_lens, int32_t* paths, int64_t* out_tokens) {
  check_bounds(indptr, batch, rows, kMaxTreeNodes);
  std::fill(paths, paths + batch * steps, -1);
  std::fill(out_tokens, out_tokens + batch * steps, -1);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = indptr[b], nodes = indptr[b + 1] - start;
    int64_t node = 0, depth = 0;
    while (node < nodes) {
      if (depth == steps)
        throw std::invalid_argument("trees.depths: expected the depths of trees.parents, got fewer than tree " +
                                    std::to_string(b) + " has; build the trees with pack_trees");
      const int64_t drawn = sampled[start + node];
      paths[b * steps + depth] = static_cast<int32_t>(node);
      out_tokens[b * steps + depth++] = drawn;
      int64_t child = node + 1;
      while (child < nodes && !(parents[start + child] == node && tokens[start + child] == drawn)) ++child;
      node = child;
    }
    accept_lens[b] = static_cast<int32_t>(depth);
  }
}

}  // namespace tlt
