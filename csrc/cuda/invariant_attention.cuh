// Batch-invariant attention: a row's bits depend on its own q, keys and values, in path order, alone.
//
// A row at absolute position t sees t + 1 keys, its path: committed keys, then its ancestors and itself. The path is cut
// at places that depend on t alone:
//
//   border  = 64 * floor((t - 128) / 64), 0 for t < 128
//   prefix  keys before it, in splits of 512, each four streams of 128 keys folded in order
//   recent  the other 1 to 192 keys: three streams of 64, folded in order
//   result  the splits folded in order, then the recent keys
//
// A stream is an online softmax over cells of 16 keys at multiples of 16 of the absolute position. A tree has at most
// 128 nodes, so a tree node is never a prefix key, and the prefix is read once for a tile of rows. Recent keys are
// gathered for each row: a key then stands in the same place of the same product whether it is a tree slot, a chunk's
// row or a committed key. A row of m16n8k16 does not see the other rows of its tile, so tiles of any height agree; a
// weight of 0 adds exactly 0, and a cell of which a row sees nothing multiplies its sums by exactly 1.
//
// Two kernels share all arithmetic. invariant_attend: four streams at once, a warp (or two) each, for few rows; its
// splits and recent keys are merged by invariant_merge. invariant_chunk: the streams one after another, eight warps of
// 16 rows each, for the rows of a chunk, whose recent keys lie in a row and are shared by the tile.
#pragma once
#include "attention_common.cuh"
#include "invariant.h"

namespace tlt::cuda {
namespace {

constexpr int kCellKeys = 16, kStreams = kSplitKeys / kStreamKeys;

__device__ __forceinline__ int border_of(int t) { return t >= 128 ? (t - 128) / 64 * 64 : 0; }

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What a thread holds of its warp's 16 * MT rows, in the layout of mma's accumulators: half h of fragment m is row
// 16 * m + 8 * h + lane / 4, elements 2 * h and 2 * h + 1 of its four. totals are of the thread's own columns until
// the stream has ended.
template <int D, int MT>
struct Stream {
  float acc[MT][D / 8][4], top[MT][2], total[MT][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[m][h] = kNone, total[m][h] = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) acc[m][j][2 * h] = acc[m][j][2 * h + 1] = 0.0f;
      }
  }
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) total[m][h] = quad_sum(total[m][h]);
  }
};

// How a running state (top, total, sums) takes in the next one in order. One that saw nothing changes no bit.
struct Fold {
  float decay, weight;

  __device__ __forceinline__ Fold(float& top, float& total, float other_top, float other_total) {
    const float raised = fmaxf(top, other_top), shift = finite(raised);
    decay = exp2_fast(top - shift), weight = exp2_fast(other_top - shift);
    total = fmaf(total, decay, other_total * weight);
    top = raised;
  }
  Fold() = default;
  __device__ __forceinline__ float operator()(float sum, float other) const { return fmaf(sum, decay, other * weight); }
};

// One cell of the online softmax. cell: shared address of its K rows, its V rows behind them; 16-byte chunks of a row
// permuted by row % 8. masked: ask visible(m, h, key within the cell) of every score.
template <typename T, int D, int MT, typename Visible>
__device__ __forceinline__ void fold_cell(Stream<D, MT>& s, const uint32_t (&q)[MT][D / 16][4], uint32_t cell, int lane,
                                          float scale, bool masked, const Visible& visible) {
  float scores[MT][2][4] = {};
  const int k_row = (lane >> 4) * 8 + (lane & 7);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t k[4];
    load_matrix(k, cell + k_row * (D * 2) + (((2 * step + ((lane >> 3) & 1)) ^ (k_row & 7)) * 16));
#pragma unroll
    for (int m = 0; m < MT; ++m) mma<T>(scores[m][0], q[m][step], k[0], k[1]), mma<T>(scores[m][1], q[m][step], k[2], k[3]);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[m][n][x] *= scale;
  if (masked) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x)
          if (!visible(m, x / 2, n * 8 + lane % 4 * 2 + x % 2)) scores[m][n][x] = kNone;
  }
  float tops[MT][2];
  bool raised = false;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float here = quad_max(fmaxf(fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]),
                                        fmaxf(scores[m][1][2 * h], scores[m][1][2 * h + 1])));
      tops[m][h] = fmaxf(s.top[m][h], here);
      raised |= tops[m][h] > s.top[m][h];
    }
  if (__any_sync(kAll, raised)) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = exp2_fast(s.top[m][h] - finite(tops[m][h]));
        s.top[m][h] = tops[m][h], s.total[m][h] *= factor;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) s.acc[m][j][2 * h] *= factor, s.acc[m][j][2 * h + 1] *= factor;
      }
  }
  uint32_t weights[MT][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = finite(s.top[m][h]);
        const float x = exp2_fast(scores[m][n][2 * h] - shift), y = exp2_fast(scores[m][n][2 * h + 1] - shift);
        s.total[m][h] += x + y;
        weights[m][2 * n + h] = pack<T>(x, y);
      }
  const uint32_t values = cell + kCellKeys * D * 2;
  const int v_row = ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    uint32_t v[4];
    load_matrix_transposed(v, values + v_row * (D * 2) + (((2 * j + (lane >> 4)) ^ (v_row & 7)) * 16));
#pragma unroll
    for (int m = 0; m < MT; ++m)
      mma<T>(s.acc[m][2 * j], weights[m], v[0], v[1]), mma<T>(s.acc[m][2 * j + 1], weights[m], v[2], v[3]);
  }
}

// A record of the plan: query heads of `nodes` nodes of a request from packed row `row` on.
struct Work {
  int request, row, nodes;
  int split;   // of the prefix; kRecentWork: the recent keys of one node; kAllSplits: all from `first` on, folded
  int first;   // the tile's first split (of a window), with kRecentWork: committed keys; of a chunk: t of its first node
  int border;  // the largest of the tile
  int low;     // the smallest; with kRecentWork: t
  int merged;  // kRecentWork: does invariant_merge take the result?
};
constexpr int kRecentWork = -1, kAllSplits = -2;

__device__ __forceinline__ Work read_work(const int32_t* records, int index) {
  const int4 a = reinterpret_cast<const int4*>(records)[index * 2], b = reinterpret_cast<const int4*>(records)[index * 2 + 1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

template <typename T, int D, int MT>
__device__ __forceinline__ void load_q(uint32_t (&q)[MT][D / 16][4], const InvariantLayer& l, const Work& work,
                                       int group, int head, int first_row, int lane) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int place = first_row + 16 * m + 8 * h + lane / 4, node = place / group;
      const bool used = node < work.nodes;
      const int64_t at = used ? (work.row + node) * l.q_row + (head * group + place % group) * D : 0;
      const T* from = static_cast<const T*>(l.q) + at + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < D / 16; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          q[m][step][2 * side + h] = used ? *reinterpret_cast<const uint32_t*>(from + step * 16 + side * 8) : 0u;
    }
}

template <typename T>
__device__ __forceinline__ void put_pair(T* to, float x, float y, float factor) {
  *reinterpret_cast<uint32_t*>(to) = pack<T>(x * factor, y * factor);
}

// Streams at once: warps wk * WM .. hold stream wk, MT * 16 rows each. Blocks take works until none is left.
template <typename T, int D, int MT, int WM, int STAGES>
__global__ void __launch_bounds__(128 * WM, WM == 1 ? 2 : 1)
    invariant_attend(const InvariantStep s, const InvariantPlan plan, const InvariantLayer l) {
  constexpr int M = 16 * MT * WM, kTeam = 32 * WM, kChunksOf = D / 8;
  constexpr int kCellSize = 2 * kCellKeys * D * 2, kRows = kTeam / kChunksOf < kCellKeys ? kTeam / kChunksOf : kCellKeys;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ int next_work;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wk = warp / WM, wm = warp % WM;
  const int member = threadIdx.x % kTeam, own_row = member / kChunksOf, chunk = member % kChunksOf;
  const int cells_shift = __ffs(s.page / kCellKeys) - 1, stride = static_cast<int>(l.slot_stride);
  const uint32_t team_ring = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + wk * STAGES * kCellSize;
  bool waited = !l.early;
  const auto wait_once = [&]() {
    if (!waited) wait_for_kernel_in_front();
    waited = true;
  };
  let_next_kernel_start();
  if (waited) wait_for_kernel_in_front();
  const int works = plan.header[0] * l.kv_heads;
  int index = blockIdx.x;
  while (index < works) {
    const Work work = read_work(plan.items, index / l.kv_heads);
    const int head = index % l.kv_heads, slot = index / l.kv_heads;
    const bool recent = work.split == kRecentWork;
    const int64_t own = head * l.head_stride + chunk * 8;
    const T *own_k = static_cast<const T*>(l.k_cache) + own, *own_v = static_cast<const T*>(l.v_cache) + own;
    const int32_t* table = s.page_table + work.request * s.table_stride;
    int split = work.split == kAllSplits ? work.first : work.split;
    int after = 0;  // the work after this one
    uint32_t q[MT][D / 16][4];
    int limit[MT][2], from[MT][2];  // keys from .. limit - 1 are visible to a row
    bool first_split = true;
    do {
      // The cells of this stream: from key `begin` on; and their slots, of each key (recent) or of each cell's first.
      const int begin = recent ? work.border + wk * kRecentStream : split * kSplitKeys + wk * kStreamKeys;
      const int end = recent ? work.low + 1 : min(work.border, (split + 1) * kSplitKeys);
      const int most = recent ? kRecentStream / kCellKeys : kStreamKeys / kCellKeys;
      const int count = max(0, min(most, (end - begin + kCellKeys - 1) / kCellKeys));
      int slots[2] = {};
      if (recent) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int key = begin + x * 32 + lane;
          if (key < end) slots[x] = plan.recent[static_cast<int64_t>(work.row) * kRecentKeys + key - work.border];
        }
      } else if (lane < count) {
        const int cell = begin / kCellKeys + lane;
        slots[0] = table[cell >> cells_shift] * s.page + (cell & ((1 << cells_shift) - 1)) * kCellKeys;
      }
      const auto load_cell = [&](int i) {
        if (i >= count) return;
        const uint32_t to = team_ring + i % STAGES * kCellSize + own_row * (D * 2);
        const int left = end - begin - i * kCellKeys;
#pragma unroll
        for (int row = 0; row < kCellKeys; row += kRows) {
          const int key = row + own_row;
          const int place = recent ? __shfl_sync(kAll, i < 2 ? slots[0] : slots[1], (i & 1) * kCellKeys + key)
                                   : __shfl_sync(kAll, slots[0], i) + key;
          const int64_t at = static_cast<int64_t>(place) * stride;
          const uint32_t where = to + row * (D * 2) + (chunk ^ (key & 7)) * 16;
          copy16(where, own_k + at, key < left);
          copy16(where + kCellKeys * D * 2, own_v + at, key < left);
        }
      };
      // Committed keys may be asked for early; a ring that reaches the step's own keys waits first.
      if (recent && begin + (STAGES - 1) * kCellKeys > work.first) wait_once();
#pragma unroll
      for (int i = 0; i < STAGES - 1; ++i) load_cell(i), commit_copies();
      wait_once();
      if (first_split) {
        if (threadIdx.x == 0) after = atomicAdd(plan.header + 1, 1);
        load_q<T, D, MT>(q, l, work, s.group, head, wm * 16 * MT, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int node = (wm * 16 * MT + 16 * m + 8 * h + lane / 4) / s.group;
            const int t = node < work.nodes ? static_cast<int>(s.positions[work.row + node]) : -1;
            limit[m][h] = recent ? t + 1 : border_of(t);
            from[m][h] = s.window > 0 ? t - s.window + 1 : 0;
          }
      }
      Stream<D, MT> state;
      state.clear();
      const int open = s.window > 0 ? 0 : recent ? work.low + 1 : work.low;  // keys below it need no mask
      for (int i = 0; i < count; ++i) {
        wait_copies<STAGES - 2>();
        sync_group<kTeam>(wk);  // the cell is there for all, and all have left the cell before it
        load_cell(i + STAGES - 1);
        commit_copies();
        const int key = begin + i * kCellKeys;
        fold_cell<T, D, MT>(state, q, team_ring + i % STAGES * kCellSize, lane, l.scale_log2, key + kCellKeys > open,
                            [&](int m, int h, int x) { return key + x < limit[m][h] && key + x >= from[m][h]; });
      }
      wait_copies<0>();
      state.end();

      // The streams meet in shared memory: [stream][warp row][fragment][chunk or stats][lane] of four floats.
      constexpr int kStateQuads = MT * (kChunksOf + 1) * 32;
      float4* const meet = reinterpret_cast<float4*>(ring);
      __syncthreads();
      {
        float4* const mine = meet + (wk * WM + wm) * kStateQuads + lane;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int j = 0; j < kChunksOf; ++j) {
            const float(&x)[4] = state.acc[m][j];
            mine[(m * (kChunksOf + 1) + j) * 32] = make_float4(x[0], x[1], x[2], x[3]);
          }
          mine[(m * (kChunksOf + 1) + kChunksOf) * 32] =
              make_float4(state.top[m][0], state.top[m][1], state.total[m][0], state.total[m][1]);
        }
      }
      __syncthreads();
      {
        constexpr int kShare = kStreams * WM / (MT * WM);  // warps to a fragment of 16 rows
        const int fragment = warp / kShare;
        const float4* const theirs = meet + fragment / MT * kStateQuads + fragment % MT * (kChunksOf + 1) * 32 + lane;
        Fold folds[kStreams][2];
        float top[2] = {kNone, kNone}, total[2] = {};
#pragma unroll
        for (int w = 0; w < kStreams; ++w) {
          const float4 x = theirs[w * WM * kStateQuads + kChunksOf * 32];
          folds[w][0] = Fold(top[0], total[0], x.x, x.z), folds[w][1] = Fold(top[1], total[1], x.y, x.w);
        }
        int64_t place[2];  // of the two rows, and whether they exist
        bool live[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = fragment * 16 + 8 * h + lane / 4;
          live[h] = row / s.group < work.nodes;
          place[h] = recent ? (work.row * static_cast<int64_t>(l.kv_heads) + head) * s.group + row
                            : (slot * static_cast<int64_t>(l.kv_heads) + head) * M + row;
        }
        float* const sums = recent ? l.recent_parts : l.parts;
        const auto stat_of = [&](int h, int which) {
          return recent ? l.recent_stats + place[h] * 2 + which
                        : l.stats + ((slot * static_cast<int64_t>(l.kv_heads) + head) * 2 + which) * M +
                              fragment * 16 + 8 * h + lane / 4;
        };
        Fold onto[2];  // what the splits before left in memory
        if (!first_split) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!live[h]) continue;
            float held_top = *stat_of(h, 0), held_total = *stat_of(h, 1);
            onto[h] = Fold(held_top, held_total, top[h], total[h]);
            top[h] = held_top, total[h] = held_total;
          }
        }
#pragma unroll
        for (int j = warp % kShare; j < kChunksOf; j += kShare) {
          float x[4] = {};
#pragma unroll
          for (int w = 0; w < kStreams; ++w) {
            const float4 y = theirs[w * WM * kStateQuads + j * 32];
            x[0] = folds[w][0](x[0], y.x), x[1] = folds[w][0](x[1], y.y);
            x[2] = folds[w][1](x[2], y.z), x[3] = folds[w][1](x[3], y.w);
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!live[h]) continue;
            const int64_t to = place[h] * D + j * 8 + lane % 4 * 2;
            if (recent && !work.merged) {
              put_pair(static_cast<T*>(l.out) + to, x[2 * h], x[2 * h + 1], 1.0f / total[h]);
              continue;
            }
            float2* const at = reinterpret_cast<float2*>(sums + to);
            if (!first_split) {
              const float2 held = *at;
              x[2 * h] = onto[h](held.x, x[2 * h]), x[2 * h + 1] = onto[h](held.y, x[2 * h + 1]);
            }
            *at = make_float2(x[2 * h], x[2 * h + 1]);
          }
        }
        __syncthreads();  // all warps of the fragment have read its stats
        if (warp % kShare == 0 && lane % 4 == 0 && !(recent && !work.merged)) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (live[h]) *stat_of(h, 0) = top[h], *stat_of(h, 1) = total[h];
        }
      }
      __syncthreads();  // the ring is free, the stats are there
      first_split = false;
      ++split;
    } while (work.split == kAllSplits && split * kSplitKeys < work.border);
    if (threadIdx.x == 0) next_work = after;
    __syncthreads();
    index = next_work;
  }
  wait_once();  // so that this kernel's end implies the end of all before it
}

// A warp for each row and head: its splits in order, then its recent keys.
template <typename T, int D>
__global__ void __launch_bounds__(128) invariant_merge(const InvariantStep s, const InvariantPlan plan, const InvariantLayer l) {
  constexpr int kMine = D / 32, kAhead = 8;
  const int lane = threadIdx.x & 31, heads = l.kv_heads * s.group, of = blockIdx.x * 4 + (threadIdx.x >> 5);
  const int row = of / heads, head = of % heads;
  let_next_kernel_start();
  if (!l.early) wait_for_kernel_in_front();
  const int4 record = row < s.rows ? reinterpret_cast<const int4*>(plan.rows)[row] : int4{};
  wait_for_kernel_in_front();
  if (blockIdx.x == 0 && threadIdx.x == 0) plan.header[1] = s.workers, plan.header[3] = s.chunk_workers;
  if (record.w == 0) return;
  const int first = record.z & 0xffff, count = (record.z >> 16) - first;
  const auto slot_of = [&](int i) { return static_cast<int64_t>(record.x + first + i) * l.kv_heads + head / s.group; };
  const int m = record.y + head % s.group;
  struct Mine {
    float x[kMine];
  };
  const auto read = [&](const float* at) {
    Mine y;
    if constexpr (kMine == 4) {
      const float4 v = *reinterpret_cast<const float4*>(at + lane * 4);
      y.x[0] = v.x, y.x[1] = v.y, y.x[2] = v.z, y.x[3] = v.w;
    } else {
      const float2 v = *reinterpret_cast<const float2*>(at + lane * 2);
      y.x[0] = v.x, y.x[1] = v.y;
    }
    return y;
  };
  const int64_t own = static_cast<int64_t>(row) * heads + head;
  const Mine recent = read(l.recent_parts + own * D);
  const float recent_top = l.recent_stats[own * 2], recent_total = l.recent_stats[own * 2 + 1];
  float top = kNone, total = 0.0f;
  Mine sums{};
  for (int start = 0; start < count; start += 32) {
    float here = kNone, there = 0.0f;  // of lane's own split
    if (start + lane < count) {
      const float* stats = l.stats + slot_of(start + lane) * 2 * l.block_m + m;
      here = stats[0], there = stats[l.block_m];
    }
    float raised = fmaxf(here, top);  // the largest up to this split: a scan, as a maximum has no rounding
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const float below = __shfl_up_sync(kAll, raised, offset);
      if (lane >= offset) raised = fmaxf(raised, below);
    }
    float before = __shfl_up_sync(kAll, raised, 1);
    if (lane == 0) before = top;
    const float shift = finite(raised), decay = exp2_fast(before - shift), weight = exp2_fast(here - shift);
    const int splits = min(32, count - start);
    for (int i = 0; i < splits; i += kAhead) {
      Mine parts[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        if (i + u < splits) parts[u] = read(l.parts + (slot_of(start + i + u) * l.block_m + m) * D);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (i + u >= splits) continue;
        Fold fold;
        fold.decay = __shfl_sync(kAll, decay, i + u), fold.weight = __shfl_sync(kAll, weight, i + u);
        total = fold(total, __shfl_sync(kAll, there, i + u));
#pragma unroll
        for (int x = 0; x < kMine; ++x) sums.x[x] = fold(sums.x[x], parts[u].x[x]);
      }
    }
    top = __shfl_sync(kAll, raised, splits - 1);
  }
  const Fold fold(top, total, recent_top, recent_total);
#pragma unroll
  for (int x = 0; x < kMine; ++x) sums.x[x] = fold(sums.x[x], recent.x[x]);
  const float factor = 1.0f / total;
  T* const to = static_cast<T*>(l.out) + own * D + lane * kMine;
#pragma unroll
  for (int x = 0; x < kMine; x += 2) put_pair(to + x, sums.x[x], sums.x[x + 1], factor);
}

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

template <typename... Arguments>
void launch_in_line(void (*kernel)(Arguments...), int blocks, int threads, int bytes, cudaStream_t stream,
                    const char* name, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

template <typename T, int D, int MT, int WM, int STAGES>
void launch_attend(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, cudaStream_t stream) {
  constexpr int ring = kStreams * STAGES * 2 * kCellKeys * D * 2, meet = kStreams * WM * MT * (D / 8 + 1) * 512;
  launch_in_line(&invariant_attend<T, D, MT, WM, STAGES>, s.workers, 128 * WM, ring > meet ? ring : meet, stream,
                 "invariant_attend", s, plan, l);
}

template <typename T, int D>
void launch_all(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, cudaStream_t stream) {
  if (s.chunk_nodes > 0) {
    constexpr int stages = 3, bytes = stages * 64 * D * 4 + 256 * (D / 8) * 16;
    launch_in_line(&invariant_chunk<T, D, stages>, s.chunk_workers, 256, bytes, stream, "invariant_chunk", s, plan, l);
  }
  switch (l.block_m) {
    case 16: launch_attend<T, D, 1, 1, 3>(s, plan, l, stream); break;
    case 32: launch_attend<T, D, 2, 1, 3>(s, plan, l, stream); break;
    case 64: launch_attend<T, D, 2, 2, 4>(s, plan, l, stream); break;
    default: throw std::invalid_argument("block_m: expected 16, 32 or 64, got " + std::to_string(l.block_m));
  }
  const int rows = s.rows * l.kv_heads * s.group;
  launch_in_line(&invariant_merge<T, D>, (rows + 3) / 4, 128, 0, stream, "invariant_merge", s, plan, l);
}

}  // namespace

template <typename T>
void invariant_attention_typed(const InvariantStep& s, const InvariantPlan& plan, const InvariantLayer& l, uint64_t stream) {
  switch (l.head_dim) {
    case 64: return launch_all<T, 64>(s, plan, l, as_stream(stream));
    case 128: return launch_all<T, 128>(s, plan, l, as_stream(stream));
    default: throw std::invalid_argument("head_dim: expected 64 or 128, got " + std::to_string(l.head_dim));
  }
}

}  // namespace tlt::cuda
