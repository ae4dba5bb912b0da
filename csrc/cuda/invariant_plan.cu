// The schedule of batch-invariant attention, made once a step on the device, read by every layer.
#include "common.cuh"
#include "invariant.h"

namespace tlt::cuda {
namespace {

constexpr int kChunkRows = 16;  // a chunk of fewer rows is taken as a tree is
constexpr int kRecentWork = -1, kAllSplits = -2;  // as invariant_attention.cuh

__device__ __forceinline__ int border_of(int t) { return t >= 128 ? (t - 128) / 64 * 64 : 0; }
__device__ __forceinline__ int splits_before(int key) { return (key + kSplitKeys - 1) / kSplitKeys; }
__device__ __forceinline__ int first_split(int t, int window) {
  return window > 0 ? max(t - window + 1, 0) / kSplitKeys : 0;
}

__device__ __forceinline__ bool is_chunk(const InvariantStep& s, int request, int nodes) {
  return s.chunk_nodes > 0 && nodes >= kChunkRows && s.causal[request];
}

// What a request needs. splits: those that any of its nodes may have in its prefix, from `first` on.
struct Needs {
  int row, nodes, prefix, tiles, first, splits, chunks;

  __device__ Needs(const InvariantStep& s, int request) {
    row = s.node_indptr[request], nodes = s.node_indptr[request + 1] - row, prefix = s.prefix_lens[request];
    tiles = first = splits = chunks = 0;
    if (nodes == 0) return;
    if (is_chunk(s, request, nodes)) {
      chunks = (prefix + nodes - 1) / s.chunk_nodes - prefix / s.chunk_nodes + 1;
      return;
    }
    tiles = (nodes + s.nodes_per_tile - 1) / s.nodes_per_tile;
    first = first_split(prefix, s.window);
    splits = max(0, splits_before(border_of(prefix + nodes - 1)) - first);
  }
};

__device__ __forceinline__ void put(int32_t* records, int index, int4 a, int4 b) {
  reinterpret_cast<int4*>(records)[index * 2] = a;
  reinterpret_cast<int4*>(records)[index * 2 + 1] = b;
}

// Block b writes the records of request b; it adds up by itself what stands in front of them.
__global__ void __launch_bounds__(128) plan_works(const InvariantStep s, const InvariantPlan plan) {
  enum { kParts, kTiles, kNodes, kChunks, kKinds };
  __shared__ int before[kKinds], all[kKinds];
  const int b = blockIdx.x, tid = threadIdx.x;
  if (tid < kKinds) before[tid] = all[tid] = 0;
  __syncthreads();
  for (int i = tid; i < s.requests; i += blockDim.x) {
    const Needs needs(s, i);
    const int counts[kKinds] = {needs.tiles * needs.splits, needs.splits ? needs.tiles : 0,
                                needs.chunks ? 0 : needs.nodes, needs.chunks};
    for (int kind = 0; kind < kKinds; ++kind) {
      if (counts[kind] == 0) continue;
      atomicAdd(&all[kind], counts[kind]);
      if (i < b) atomicAdd(&before[kind], counts[kind]);
    }
  }
  __syncthreads();
  const bool folded = all[kParts] > s.part_slots;
  const int prefix_works = folded ? all[kTiles] : all[kParts];
  int4* const rows = reinterpret_cast<int4*>(plan.rows);
  if (b == 0) {
    for (int row = s.node_indptr[s.requests] + tid; row < s.rows; row += blockDim.x) rows[row] = int4{};
    if (tid == 0) {
      plan.header[0] = prefix_works + all[kNodes], plan.header[1] = s.workers;
      plan.header[2] = all[kChunks], plan.header[3] = s.chunk_workers;
    }
  }

  const Needs own(s, b);
  for (int i = tid; i < own.chunks; i += blockDim.x) {  // the longest, the last, in front
    const int begin = (own.prefix / s.chunk_nodes + i) * s.chunk_nodes;
    const int t = max(begin, own.prefix), end = min(begin + s.chunk_nodes, own.prefix + own.nodes);
    put(plan.chunks, before[kChunks] + own.chunks - 1 - i, {b, own.row + t - own.prefix, end - t, 0},
        {t, border_of(t), 0, 0});
  }
  if (own.chunks > 0) {
    for (int i = tid; i < own.nodes; i += blockDim.x) rows[own.row + i] = int4{};
    return;
  }

  const int base = folded ? before[kTiles] : before[kParts], each = folded ? 1 : own.splits;
  for (int i = tid; own.splits > 0 && i < own.tiles * each; i += blockDim.x) {
    const int node = i / each * s.nodes_per_tile, count = min(s.nodes_per_tile, own.nodes - node);
    int low = 0x7fffffff, high = 0;
    for (int j = 0; j < count; ++j) {
      const int border = border_of(static_cast<int>(s.positions[own.row + node + j]));
      low = min(low, border), high = max(high, border);
    }
    put(plan.items, base + i, {b, own.row + node, count, folded ? kAllSplits : own.first + i % each},
        {own.first, high, low, 0});
  }
  for (int i = tid; i < own.nodes; i += blockDim.x) {
    const int t = static_cast<int>(s.positions[own.row + i]), tile = i / s.nodes_per_tile;
    const int first = first_split(t, s.window), end = splits_before(border_of(t)), merged = end > first;
    put(plan.items, prefix_works + before[kNodes] + i, {b, own.row + i, 1, kRecentWork},
        {own.prefix, border_of(t), t, merged});
    rows[own.row + i] = {folded ? base + tile : base + tile * each - own.first, i % s.nodes_per_tile * s.group,
                         folded ? 1 << 16 : first | end << 16, merged};
  }
}

// A warp writes the slots of one row's recent keys in path order.
__global__ void __launch_bounds__(128) plan_recent(const InvariantStep s, const InvariantPlan plan) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (row >= s.rows || row >= s.node_indptr[s.requests]) return;
  int request = 0;
  for (int i = 0; i < s.requests; i += 32)
    request += __popc(__ballot_sync(kAll, i + lane < s.requests && s.node_indptr[min(i + lane + 1, s.requests)] <= row));
  const int nodes = s.node_indptr[request + 1] - s.node_indptr[request];
  if (is_chunk(s, request, nodes)) return;
  const int t = static_cast<int>(s.positions[row]), border = border_of(t), prefix = s.prefix_lens[request];
  const bool causal = s.causal[request];
  const int32_t* table = s.page_table + request * s.table_stride;
  int32_t* const to = plan.recent + static_cast<int64_t>(row) * kRecentKeys - border;
  const auto slot_of = [&](int place) { return table[place / s.page] * s.page + place % s.page; };
  for (int key = border + lane; key <= t && (causal || key < prefix); key += 32) to[key] = slot_of(key);
  if (causal) return;
  int depth = 0;  // of the path's next node
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool on_path = static_cast<uint64_t>(s.ancestors[row * 2ll + i / 2]) >> (i % 2 * 32 + lane) & 1;
    const unsigned path = __ballot_sync(kAll, on_path);
    const int key = prefix + depth + __popc(path & ((1u << lane) - 1u));
    if (on_path && key <= t) to[key] = slot_of(prefix + i * 32 + lane);
    depth += __popc(path);
  }
}

}  // namespace

void invariant_plan(const InvariantStep& step, const InvariantPlan& plan, uint64_t stream) {
  plan_works<<<step.requests, 128, 0, as_stream(stream)>>>(step, plan);
  check_launch("invariant plan: works");
  plan_recent<<<(step.rows + 3) / 4, 128, 0, as_stream(stream)>>>(step, plan);
  check_launch("invariant plan: recent keys");
}

void invariant_attention(const InvariantStep& step, const InvariantPlan& plan, const InvariantLayer& layer,
                         uint64_t stream) {
  switch (layer.dtype) {
    case Dtype::kBfloat16: return invariant_attention_typed<__nv_bfloat16>(step, plan, layer, stream);
    case Dtype::kFloat16: return invariant_attention_typed<__half>(step, plan, layer, stream);
    case Dtype::kFloat32: break;
  }
  throw std::invalid_argument("dtype: expected bf16 or fp16, got fp32; its kernel is Triton's");
}

}  // namespace tlt::cuda
