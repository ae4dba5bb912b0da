#include "tree.h"

#include "block.cuh"

namespace tlt::cuda {
namespace {

constexpr int kTreeThreads = 128;  // a thread a node
constexpr int kTreeWarps = kTreeThreads / 32;

// parents [n] in shared memory. Writes node i's depth and ancestor words.
__device__ __forceinline__ void write_ancestry(const int32_t* parents, int i, int64_t row, int32_t* depths,
                                               int64_t* ancestors) {
  uint64_t words[2] = {0, 0};
  int depth = -1;
  for (int node = i; node >= 0 && depth < kMaxNodes; node = parents[node], ++depth) {
    const uint64_t bit = 1ull << node % 64;
    if (node < 64) {
      words[0] |= bit;
    } else {
      words[1] |= bit;
    }
  }
  depths[row] = depth;
  ancestors[row * 2] = static_cast<int64_t>(words[0]);
  ancestors[row * 2 + 1] = static_cast<int64_t>(words[1]);
}

__global__ void pack_kernel(const int32_t* parents, const int32_t* node_indptr, int32_t* depths, int64_t* ancestors) {
  __shared__ int32_t local[kMaxNodes];
  const int begin = node_indptr[blockIdx.x], n = min(node_indptr[blockIdx.x + 1] - begin, kMaxNodes);
  const int i = threadIdx.x;
  if (i < n) local[i] = parents[begin + i];
  __syncthreads();
  if (i < n) write_ancestry(local, i, begin + i, depths, ancestors);
}

// What the selection leaves for the packing: kept candidates in order, [B, 128], and how many, [B].
struct Kept {
  int32_t *counts, *candidates, *parents;
};

inline Kept kept_workspace(void* workspace, int batch) {
  int32_t* at = static_cast<int32_t*>(workspace);
  return {at, at + batch, at + batch + static_cast<int64_t>(batch) * kMaxNodes};
}

struct Candidates {
  const int64_t* tokens;
  const int32_t* parents;
  const float* scores;
};

__device__ __forceinline__ uint64_t warp_max64(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kAll, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kAll, static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// Siblings with one token become one: stand[i] is the first of them, parent[i] the stand-in of i's parent, key[stand]
// the best of their scores. Level by level, since the stand-ins of a level depend on those above.
__device__ __forceinline__ void merge_siblings(const Candidates& c, int n, int32_t* stand, int32_t* parent,
                                               int32_t* depth, uint32_t* key) {
  int deepest = 0;
  for (int i = threadIdx.x; i < n; i += kTreeThreads) {
    int d = 0;
    for (int node = c.parents[i]; node >= 0 && d < n; node = c.parents[node]) ++d;
    depth[i] = d;
    stand[i] = i;
    parent[i] = -1;
    key[i] = ordered_key(c.scores[i]);
    deepest = max(deepest, d);
  }
  for (int level = 1; __syncthreads_or(level <= deepest); ++level) {
    for (int i = threadIdx.x; i < n; i += kTreeThreads) {
      if (depth[i] == level) parent[i] = stand[c.parents[i]];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kTreeThreads) {
      if (depth[i] != level) continue;
      for (int j = 1; j < i; ++j) {
        if (depth[j] == level && parent[j] == parent[i] && c.tokens[j] == c.tokens[i]) {
          stand[i] = j;
          atomicMax(&key[j], ordered_key(c.scores[i]));
          break;
        }
      }
    }
  }
  __syncthreads();
}

// One block a request. Takes the best open candidate (its parent kept) until the budget is full.
__global__ void __launch_bounds__(kTreeThreads) select_kernel(const Candidates all, const int32_t* cand_indptr,
                                                              const int32_t* budgets, const Kept kept) {
  extern __shared__ uint64_t memory[];
  __shared__ uint64_t winners[2][kTreeWarps];
  const int b = blockIdx.x, begin = cand_indptr[b], n = cand_indptr[b + 1] - begin;
  uint64_t* open = memory;  // (score, lower index first) of open candidates, else 0
  int32_t* stand = reinterpret_cast<int32_t*>(open + n);
  int32_t *parent = stand + n, *place = parent + n;
  uint32_t* key = reinterpret_cast<uint32_t*>(place + n);
  const Candidates c{all.tokens + begin, all.parents + begin, all.scores + begin};
  merge_siblings(c, n, stand, parent, place, key);

  for (int i = threadIdx.x; i < n; i += kTreeThreads) open[i] = 0, place[i] = i == 0;
  const int budget = min(budgets[b], kMaxNodes);
  int winner = 0, count = 1;
  while (count < budget) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += kTreeThreads) {
      if (i == winner) open[i] = 0;
      if (stand[i] == i && i > 0 && parent[i] == winner) {
        open[i] = static_cast<uint64_t>(key[i]) << 32 | (0xffffffffu - static_cast<uint32_t>(i));
      }
      best = max(best, open[i]);
    }
    best = warp_max64(best);
    if (threadIdx.x % 32 == 0) winners[count % 2][threadIdx.x / 32] = best;
    __syncthreads();  // one is enough: the next round writes the other half
    for (int w = 0; w < kTreeWarps; ++w) best = max(best, winners[count % 2][w]);
    if (best == 0) break;
    winner = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    if (winner % kTreeThreads == static_cast<int>(threadIdx.x)) place[winner] = 1;
    ++count;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  // Kept candidates in their order; `place` turns from a mark into the node's index.
  int before = 0;
  for (int base = 0; base < n; base += 32) {
    const int i = base + threadIdx.x;
    const bool mine = i < n && place[i] != 0;
    const unsigned marks = __ballot_sync(kAll, mine);
    const int at = before + __popc(marks & ((1u << threadIdx.x) - 1u));
    if (mine) place[i] = at;
    __syncwarp();  // a parent may stand in the same 32
    if (mine) {
      kept.candidates[b * kMaxNodes + at] = i;
      kept.parents[b * kMaxNodes + at] = i == 0 ? -1 : place[parent[i]];
    }
    before += __popc(marks);
    __syncwarp();
  }
  if (threadIdx.x == 0) kept.counts[b] = before;
}

// One block a request: its rows stand after those of the requests before it.
__global__ void __launch_bounds__(kTreeThreads) place_kernel(const Candidates all, const int32_t* cand_indptr,
                                                             const Kept kept, const PackedOut out) {
  __shared__ int32_t local[kMaxNodes];
  __shared__ int32_t partial[kTreeWarps];
  const int b = blockIdx.x, i = threadIdx.x, n = kept.counts[b];
  int earlier = 0;
  for (int j = i; j < b; j += kTreeThreads) earlier += kept.counts[j];
  for (int offset = 16; offset > 0; offset >>= 1) earlier += __shfl_xor_sync(kAll, earlier, offset);
  if (i % 32 == 0) partial[i / 32] = earlier;
  if (i < n) local[i] = kept.parents[b * kMaxNodes + i];
  __syncthreads();
  int first = 0;
  for (int w = 0; w < kTreeWarps; ++w) first += partial[w];
  if (i == 0) {
    if (b == 0) out.node_indptr[0] = 0;
    out.node_indptr[b + 1] = first + n;
  }
  if (i >= n) return;
  out.tokens[first + i] = all.tokens[cand_indptr[b] + kept.candidates[b * kMaxNodes + i]];
  out.parents[first + i] = local[i];
  write_ancestry(local, i, first + i, out.depths, out.ancestors);
}

// One warp a request. Children stand after their parent, so each step looks only behind the current node.
__global__ void verify_kernel(const int64_t* sampled, const int64_t* tokens, const int32_t* parents,
                              const int32_t* node_indptr, int32_t steps, int32_t* accept_lens, int32_t* paths,
                              int64_t* emitted) {
  const int b = blockIdx.x, lane = threadIdx.x, begin = node_indptr[b], n = node_indptr[b + 1] - begin;
  int node = n > 0 ? 0 : -1, length = 0;
  while (node >= 0 && length < steps) {
    const int64_t drawn = sampled[begin + node];
    if (lane == 0) {
      paths[static_cast<int64_t>(b) * steps + length] = node;
      emitted[static_cast<int64_t>(b) * steps + length] = drawn;
    }
    ++length;
    int next = -1;
    for (int base = node + 1; base < n && next < 0; base += 32) {
      const int i = base + lane;
      const bool child = i < n && parents[begin + i] == node && tokens[begin + i] == drawn;
      const unsigned hits = __ballot_sync(kAll, child);
      if (hits) next = base + __ffs(static_cast<int>(hits)) - 1;
    }
    node = next;
  }
  for (int d = length + lane; d < steps; d += 32) {
    paths[static_cast<int64_t>(b) * steps + d] = -1;
    emitted[static_cast<int64_t>(b) * steps + d] = -1;
  }
  if (lane == 0) accept_lens[b] = length;
}

}  // namespace

void pack_trees(const int32_t* parents, const int32_t* node_indptr, int32_t batch, int32_t* depths, int64_t* ancestors,
                uint64_t stream) {
  if (batch == 0) return;
  pack_kernel<<<batch, kTreeThreads, 0, as_stream(stream)>>>(parents, node_indptr, depths, ancestors);
  check_launch("pack_trees");
}

int64_t tree_workspace(int32_t batch) { return static_cast<int64_t>(batch) * (1 + 2 * kMaxNodes) * 4; }

void tree_from_candidates(const int64_t* tokens, const int32_t* parents, const float* scores, const int32_t* cand_indptr,
                          const int32_t* budgets, int32_t batch, int32_t widest, void* workspace, const PackedOut& out,
                          uint64_t stream) {
  if (batch == 0) return;
  const Candidates all{tokens, parents, scores};
  const Kept kept = kept_workspace(workspace, batch);
  const int bytes = widest * (8 + 4 * 4);
  check(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "tree_from_candidates: shared memory for the candidates of one tree");
  select_kernel<<<batch, kTreeThreads, bytes, as_stream(stream)>>>(all, cand_indptr, budgets, kept);
  check_launch("tree_from_candidates: select");
  place_kernel<<<batch, kTreeThreads, 0, as_stream(stream)>>>(all, cand_indptr, kept, out);
  check_launch("tree_from_candidates: place");
}

void verify_tree(const int64_t* sampled, const int64_t* tokens, const int32_t* parents, const int32_t* node_indptr,
                 int32_t batch, int32_t steps, int32_t* accept_lens, int32_t* paths, int64_t* emitted,
                 uint64_t stream) {
  if (batch == 0) return;
  verify_kernel<<<batch, 32, 0, as_stream(stream)>>>(sampled, tokens, parents, node_indptr, steps, accept_lens, paths,
                                                     emitted);
  check_launch("verify_tree");
}

}  // namespace tlt::cuda
