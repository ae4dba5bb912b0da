// Batch-invariant attention of the rows of a chunk (invariant_attention.cuh): streams one after another.
#pragma once
#include "invariant_stream.cuh"

namespace tlt::cuda {
namespace {

// Streams one after another: eight warps of 16 rows read every block of 64 keys together.
template <typename T, int D, int STAGES>
__global__ void __launch_bounds__(256, 1) invariant_chunk(const InvariantStep s, const InvariantPlan plan, const InvariantLayer l) {
  constexpr int kChunksOf = D / 8, kThreads = 256, kKeys = 64, kRows = kThreads / kChunksOf;
  constexpr int kCellSize = 2 * kCellKeys * D * 2, kBlockSize = kKeys / kCellKeys * kCellSize;
  constexpr int kStreamBlocks = kStreamKeys / kKeys, kSplitBlocks = kSplitKeys / kKeys;
  static_assert(kRecentStream == kKeys);
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int next_work;
  float4* const run = reinterpret_cast<float4*>(shared + STAGES * kBlockSize) + threadIdx.x;  // [D / 8][256]
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int own_row = threadIdx.x / kChunksOf, chunk = threadIdx.x % kChunksOf;
  const int cells_shift = __ffs(s.page / kCellKeys) - 1, stride = static_cast<int>(l.slot_stride);
  let_next_kernel_start();
  wait_for_kernel_in_front();
  const int works = plan.header[2] * l.kv_heads;
  int index = blockIdx.x;
  while (index < works) {
    int after = 0;
    if (threadIdx.x == 0) after = atomicAdd(plan.header + 3, 1);
    const Work work = read_work(plan.chunks, index / l.kv_heads);
    const int head = index % l.kv_heads;
    const int last = work.first + work.nodes - 1;  // t of the last node
    const int begin = s.window > 0 ? max(work.first - s.window + 1, 0) / kSplitKeys * kSplitBlocks : 0;
    const int border = work.border / kKeys, count = last / kKeys + 1 - begin;
    const int32_t* table = s.page_table + work.request * s.table_stride;
    const int64_t own = head * l.head_stride + chunk * 8;
    const T *own_k = static_cast<const T*>(l.k_cache) + own, *own_v = static_cast<const T*>(l.v_cache) + own;
    // Lane: the first slot of a cell of eight blocks.
    const auto page_of = [&](int i) {
      const int cell = (begin + i) * (kKeys / kCellKeys) + lane;
      return cell * kCellKeys <= last ? table[cell >> cells_shift] : 0;
    };
    const auto slot_of = [&](int i, int page) {
      return page * s.page + (((begin + i) * (kKeys / kCellKeys) + lane) & ((1 << cells_shift) - 1)) * kCellKeys;
    };
    int slots = slot_of(0, page_of(0)), next_pages = count > 8 ? page_of(8) : 0;
    const auto load_block = [&](int i) {
      if (i >= count) return;
      if (i > 0 && i % 8 == 0) {
        slots = slot_of(i, next_pages);
        if (i + 8 < count) next_pages = page_of(i + 8);
      }
      const int left = last + 1 - (begin + i) * kKeys;
#pragma unroll
      for (int row = 0; row < kKeys; row += kRows) {
        const int key = row + own_row;
        const int place = __shfl_sync(kAll, slots, i % 8 * 4 + key / kCellKeys) + key % kCellKeys;
        const int64_t at = static_cast<int64_t>(place) * stride;
        const uint32_t to = ring + i % STAGES * kBlockSize + key / kCellKeys * kCellSize + key % kCellKeys * (D * 2) +
                            (chunk ^ (key & 7)) * 16;
        copy16(to, own_k + at, key < left);
        copy16(to + kCellKeys * D * 2, own_v + at, key < left);
      }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load_block(i), commit_copies();
    uint32_t q[1][D / 16][4];
    load_q<T, D, 1>(q, l, work, s.group, head, warp * 16, lane);
    int t[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) t[h] = work.first + (warp * 16 + 8 * h + lane / 4) / s.group;
    const int low = work.first + warp * 16 / s.group;  // t of the warp's first row and last
    const int high = min(work.first + (warp * 16 + 15) / s.group, last);
    Stream<D, 1> stream, split;
    stream.clear(), split.clear();
    float top[2] = {kNone, kNone}, total[2] = {};
#pragma unroll
    for (int j = 0; j < kChunksOf; ++j) run[j * kThreads] = float4{};
    for (int i = 0; i < count; ++i) {
      wait_copies<STAGES - 2>();
      __syncthreads();  // the block is there for all, and all have left the one before it
      load_block(i + STAGES - 1);
      commit_copies();
      const int block = begin + i;
      if (low > last) continue;  // no rows: this warp only helps to load
#pragma unroll 1
      for (int cell = 0; cell < kKeys / kCellKeys; ++cell) {
        const int key = block * kKeys + cell * kCellKeys;
        if (key > high) break;
        fold_cell<T, D, 1>(
            stream, q, ring + i % STAGES * kBlockSize + cell * kCellSize, lane, l.scale_log2,
            key + kCellKeys > low + 1 || s.window > 0,
            [&](int, int h, int x) { return key + x <= t[h] && (s.window == 0 || key + x > t[h] - s.window); });
      }
      const bool prefix = block < border, split_ends = block + 1 == border || i + 1 == count;
      if (!prefix || split_ends || block % kStreamBlocks == kStreamBlocks - 1) {
        stream.end();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Fold fold(split.top[0][h], split.total[0][h], stream.top[0][h], stream.total[0][h]);
#pragma unroll
          for (int j = 0; j < kChunksOf; ++j)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; ++e) split.acc[0][j][e] = fold(split.acc[0][j][e], stream.acc[0][j][e]);
        }
        stream.clear();
      }
      if (split_ends || (prefix && block % kSplitBlocks == kSplitBlocks - 1)) {
        const Fold upper(top[0], total[0], split.top[0][0], split.total[0][0]);
        const Fold lower(top[1], total[1], split.top[0][1], split.total[0][1]);
#pragma unroll
        for (int j = 0; j < kChunksOf; ++j) {
          float4 x = run[j * kThreads];
          const float(&y)[4] = split.acc[0][j];
          x.x = upper(x.x, y[0]), x.y = upper(x.y, y[1]), x.z = lower(x.z, y[2]), x.w = lower(x.w, y[3]);
          run[j * kThreads] = x;
        }
        split.clear();
      }
    }
    wait_copies<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int place = warp * 16 + 8 * h + lane / 4, node = place / s.group;
      if (node >= work.nodes) continue;
      const int64_t row = (work.row + node) * static_cast<int64_t>(l.kv_heads) * s.group + head * s.group + place % s.group;
      T* const to = static_cast<T*>(l.out) + row * D + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kChunksOf; ++j) {
        const float4 x = run[j * kThreads];
        put_pair(to + j * 8, h ? x.z : x.x, h ? x.w : x.y, 1.0f / total[h]);
      }
    }
    if (threadIdx.x == 0) next_work = after;
    __syncthreads();  // the ring is free
    index = next_work;
    __syncthreads();
  }
}

}  // namespace
}  // namespace tlt::cuda
