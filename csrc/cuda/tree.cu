#include "tree.h"

#include "block.cuh"

namespace tlt::cuda {
namespace {

constexpr int kTreeThreads = 512;  // a thread a candidate, up to so many; at least one a node
constexpr int kTreeWarps = kTreeThreads / 32;

struct Node {
  int jump;           // an ancestor, further up each round; -1 above the root
  uint64_t words[2];  // the ancestors found so far, the node itself among them
};

// Depth and ancestor words of node i of n, by pointer doubling: as many rounds as the depth has bits. All threads of
// the block, i their index; parent >= 0 only for nodes; nodes: room for n in shared memory.
__device__ __forceinline__ Node ancestry(int i, int n, int parent, Node* nodes) {
  Node mine{i < n ? parent : -1, {0, 0}};
  if (i < n) (i < 64 ? mine.words[0] : mine.words[1]) = 1ull << i % 64;
  while (__syncthreads_or(mine.jump >= 0)) {
    if (i < n) nodes[i] = mine;
    __syncthreads();
    if (mine.jump < 0) continue;
    const Node above = nodes[mine.jump];
    mine = {above.jump, {mine.words[0] | above.words[0], mine.words[1] | above.words[1]}};
  }
  return mine;
}

__device__ __forceinline__ void write_ancestry(const Node& node, int64_t row, int32_t* depths, int64_t* ancestors) {
  depths[row] = __popcll(node.words[0]) + __popcll(node.words[1]) - 1;
  ancestors[row * 2] = static_cast<int64_t>(node.words[0]);
  ancestors[row * 2 + 1] = static_cast<int64_t>(node.words[1]);
}

__global__ void __launch_bounds__(kMaxNodes) pack_kernel(const int32_t* parents, const int32_t* node_indptr,
                                                            int32_t* depths, int64_t* ancestors) {
  __shared__ Node nodes[kMaxNodes];
  const int begin = node_indptr[blockIdx.x], n = min(node_indptr[blockIdx.x + 1] - begin, kMaxNodes);
  const int i = threadIdx.x;
  const Node mine = ancestry(i, n, i < n ? parents[begin + i] : -1, nodes);
  if (i < n) write_ancestry(mine, begin + i, depths, ancestors);
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

// One tree's candidates in shared memory, one block at work on them.
struct Selection {
  Candidates c;
  int n;
  uint32_t* table;  // [2 n] candidates by (parent, token); later open [n]
  uint32_t* key;    // [n] order of the scores; those of stand-ins the best of their siblings'
  int32_t *parent, *stand, *place;  // [n] each

  __device__ __forceinline__ Selection(const Candidates& all, int count, void* memory) : c(all), n(count) {
    table = static_cast<uint32_t*>(memory);
    key = table + 2 * n;
    parent = reinterpret_cast<int32_t*>(key + n), stand = parent + n, place = stand + n;
  }

  static constexpr int bytes(int widest) { return widest * (8 + 4 * 4); }
  static int threads(int widest) { return min(max((widest + 31) / 32 * 32, kMaxNodes), kTreeThreads); }

  __device__ __forceinline__ bool live(int i) const { return i < n && stand[i] == i; }

  template <typename F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }

  // How many candidates f(i) holds for. Every thread gets it.
  template <typename F>
  __device__ __forceinline__ int count(F&& f) const {
    int total = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += blockDim.x) {
      const int i = base + static_cast<int>(threadIdx.x);
      total += __syncthreads_count(i < n && f(i));
    }
    return total;
  }

  __device__ __forceinline__ uint32_t token_hash(int i) const {
    return static_cast<uint32_t>(c.tokens[i]) * 0x9E3779B1u + static_cast<uint32_t>(c.tokens[i] >> 32);
  }

  // The place in the table where all candidates with i's parent and token meet; it holds the first of them.
  __device__ __forceinline__ int32_t insert(int i, uint32_t hash) const {
    hash += static_cast<uint32_t>(parent[i]) * 0x85EBCA6Bu;
    hash = (hash ^ hash >> 15) * 0x2C1B3C6Du;
    const uint32_t size = 2 * n, mine = i;
    for (uint32_t at = __umulhi(hash, size);; at = at + 1 == size ? 0 : at + 1) {
      const uint32_t there = atomicCAS(&table[at], kAll, mine);
      if (there == kAll) return at;
      if (parent[there] != parent[i] || c.tokens[there] != c.tokens[i]) continue;
      atomicMin(&table[at], mine);
      return at;
    }
  }

  // Siblings with one token become one: stand[i] is the first of them, parent[i] the stand-in of i's parent, key[stand]
  // the best of their scores. Stand-ins settle level by level, one round each; one is enough where no two are alike.
  __device__ __forceinline__ void merge_siblings() const {
    each([&](int i) {  // all reads of memory at once
      parent[i] = i == 0 ? -1 : c.parents[i];
      place[i] = token_hash(i);
      key[i] = ordered_key(c.scores[i]);
      stand[i] = i, table[i] = table[n + i] = kAll;
    });
    __syncthreads();
    for (int round = 0; round <= n; ++round) {
      bool moved = false;
      if (round > 0) each([&](int i) {
        const int above = i == 0 ? -1 : stand[c.parents[i]];
        moved |= above != parent[i];
        parent[i] = above;
        table[i] = table[n + i] = kAll;
      });
      if (round > 0 && !__syncthreads_or(moved)) break;
      each([&](int i) { if (i > 0) place[i] = insert(i, round == 0 ? place[i] : token_hash(i)); });
      __syncthreads();
      bool alike = false;
      each([&](int i) {
        if (i > 0) stand[i] = static_cast<int32_t>(table[place[i]]);
        alike |= stand[i] != i;
      });
      if (!__syncthreads_or(alike)) break;
    }
    each([&](int i) {
      if (stand[i] != i) atomicMax(&key[stand[i]], key[i]);
    });
    __syncthreads();
  }

  // A key that just `wanted` of the live ones reach; where equal ones leave none, the `wanted`-th largest. Bit by bit.
  __device__ __forceinline__ uint32_t least_key(int wanted) const {
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
      const uint32_t higher = found | bit;
      const int reaching = count([&](int i) { return stand[i] == i && key[i] >= higher; });
      if (reaching >= wanted) found = higher;
      if (reaching == wanted) break;
    }
    return found;
  }

  // Takes the best open candidate (its parent taken) `wanted` - 1 times; in the end the keys of the taken are all ones,
  // of others 0. For scores that rise from parent to child, where the best `wanted` need not be a tree.
  __device__ __forceinline__ void grow(int wanted, uint64_t (&winners)[2][kTreeWarps]) const {
    uint64_t* const open = reinterpret_cast<uint64_t*>(table);  // (score, lower index first), 0 = closed, ~0 = taken
    each([&](int i) { open[i] = 0; });
    int winner = 0;
    for (int taken = 1; taken < wanted; ++taken) {
      uint64_t best = 0;
      each([&](int i) {
        if (i == winner) open[i] = ~0ull;
        if (stand[i] == i && i > 0 && parent[i] == winner) {
          open[i] = static_cast<uint64_t>(key[i]) << 32 | (kAll - static_cast<uint32_t>(i));
        }
        if (open[i] != ~0ull) best = max(best, open[i]);
      });
      best = warp_max64(best);
      if (threadIdx.x % 32 == 0) winners[taken % 2][threadIdx.x / 32] = best;
      __syncthreads();  // one is enough: the next round writes the other half
#pragma unroll 1
      for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) best = max(best, winners[taken % 2][w]);
      winner = static_cast<int>(kAll - static_cast<uint32_t>(best));
    }
    each([&](int i) { key[i] = i == winner || open[i] == ~0ull ? kAll : 0u; });
    __syncthreads();
  }

  // Nodes in the order of their candidates: those with keys above `least`, and the first `ties` equal to it. `place`
  // becomes a kept candidate's node, node_of[node] its candidate.
  __device__ __forceinline__ void number(uint32_t least, int ties, int32_t* node_of,
                                         uint32_t (&sums)[kTreeWarps]) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    uint32_t before = 0;  // equal ones above 16 bits, larger ones below, as in sums
#pragma unroll 1
    for (int base = 0; base < n; base += blockDim.x) {
      const int i = base + static_cast<int>(threadIdx.x);
      const unsigned lower = (1u << lane) - 1u;
      const bool larger = live(i) && key[i] > least, same = live(i) && key[i] == least;
      const unsigned larger_bits = __ballot_sync(kAll, larger), same_bits = __ballot_sync(kAll, same);
      if (lane == 0) sums[warp] = __popc(larger_bits) + (__popc(same_bits) << 16);
      __syncthreads();
      const uint32_t sum = lane < warps ? sums[lane] : 0u;
      const uint32_t mine = before + __reduce_add_sync(kAll, lane < warp ? sum : 0u);
      before += __reduce_add_sync(kAll, sum);
      const int here = (mine & 0xffffu) + __popc(larger_bits & lower), alike = (mine >> 16) + __popc(same_bits & lower);
      if (larger || (same && alike < ties)) place[i] = here + min(alike, ties), node_of[place[i]] = i;
      __syncthreads();
    }
  }
};

// Requests in the order in which their blocks start, so that a block waits only for blocks that run: the ticket counts
// launches above 16 bits, started blocks below; sizes[b] is request b's number of nodes beside the launch's number.
// All zero before the first launch; nothing needs to be set back between launches.
struct Queue {
  unsigned long long* ticket;
  unsigned long long* sizes;
};

constexpr unsigned long long kLaunch = 1ull << 16;

// (launch, request) for thread 0.
__device__ __forceinline__ unsigned long long take_ticket(const Queue& queue, int batch) {
  if (batch == 1) return 0;
  const unsigned long long got = atomicAdd(queue.ticket, 1ull);
  if (static_cast<int>(got % kLaunch) == batch - 1) atomicAdd(queue.ticket, kLaunch - batch);
  return got;
}

// Nodes of the requests before b. Every thread gets it.
__device__ __forceinline__ int rows_before(const Queue& queue, unsigned long long launch, int b, int* total) {
  if (threadIdx.x == 0) *total = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < b; j += blockDim.x) {
    unsigned long long size;
    do size = *const_cast<volatile unsigned long long*>(queue.sizes + j);
    while (size / kLaunch != launch + 1);
    atomicAdd(total, static_cast<int>(size % kLaunch));
  }
  __syncthreads();
  return *total;
}

// One block a request.
__global__ void __launch_bounds__(kTreeThreads) select_kernel(const Candidates all, const int32_t* cand_indptr,
                                                              const int32_t* budgets, const Queue queue,
                                                              const PackedOut out) {
  extern __shared__ uint64_t memory[];
  __shared__ uint64_t winners[2][kTreeWarps];
  __shared__ uint32_t sums[kTreeWarps];
  __shared__ int32_t node_of[kMaxNodes];
  __shared__ Node nodes[kMaxNodes];
  __shared__ int total;
  __shared__ unsigned long long ticket;
  const int batch = gridDim.x, i = threadIdx.x;
  if (i == 0) ticket = take_ticket(queue, batch);
  __syncthreads();
  const unsigned long long launch = ticket / kLaunch;
  const int b = static_cast<int>(ticket % kLaunch), begin = cand_indptr[b], n = cand_indptr[b + 1] - begin;
  const int budget = max(min(budgets[b], kMaxNodes), 1);
  const Selection tree({all.tokens + begin, all.parents + begin, all.scores + begin}, n, memory);
  tree.merge_siblings();
  const int wanted = min(budget, tree.count([&](int at) { return tree.live(at); }));
  if (i == 0 && b + 1 < batch) atomicExch(queue.sizes + b, (launch + 1) * kLaunch + wanted);
  if (n > 0 && i == 0) tree.key[0] = kAll;  // the root, whatever its score
  __syncthreads();
  uint32_t least = kAll - 1;
  int ties = 0;
  if (tree.count([&](int at) { return at > 0 && tree.live(at) && tree.key[at] > tree.key[tree.parent[at]]; }) > 0) {
    tree.grow(wanted, winners);
  } else if (wanted > 0) {
    least = tree.least_key(wanted);
    ties = wanted - tree.count([&](int at) { return tree.live(at) && tree.key[at] > least; });
  }
  tree.number(least, ties, node_of, sums);
  const int candidate = i < wanted ? node_of[i] : 0;
  const int parent = i < wanted && i > 0 ? tree.place[tree.parent[candidate]] : -1;
  const Node mine = ancestry(i, wanted, parent, nodes);
  const int first = rows_before(queue, launch, b, &total);
  if (i == 0) {
    if (b == 0) out.node_indptr[0] = 0;
    out.node_indptr[b + 1] = first + wanted;
  }
  if (i >= wanted) return;
  out.tokens[first + i] = tree.c.tokens[candidate];
  out.parents[first + i] = parent;
  write_ancestry(mine, first + i, out.depths, out.ancestors);
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
  pack_kernel<<<batch, kMaxNodes, 0, as_stream(stream)>>>(parents, node_indptr, depths, ancestors);
  check_launch("pack_trees");
}

int64_t tree_workspace(int32_t batch) { return static_cast<int64_t>(batch + 1) * sizeof(unsigned long long); }

void tree_from_candidates(const int64_t* tokens, const int32_t* parents, const float* scores, const int32_t* cand_indptr,
                          const int32_t* budgets, int32_t batch, int32_t widest, void* workspace, const PackedOut& out,
                          uint64_t stream) {
  if (batch == 0) return;
  const Candidates all{tokens, parents, scores};
  unsigned long long* const words = static_cast<unsigned long long*>(workspace);
  const int bytes = Selection::bytes(widest), threads = Selection::threads(widest);
  check(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "tree_from_candidates: shared memory for the candidates of one tree");
  select_kernel<<<batch, threads, bytes, as_stream(stream)>>>(all, cand_indptr, budgets, {words, words + 1}, out);
  check_launch("tree_from_candidates");
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
