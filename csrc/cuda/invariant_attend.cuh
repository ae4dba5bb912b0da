// Batch-invariant attention of few rows (invariant_attention.cuh): four streams at once, then the merge.
#pragma once
#include "invariant_stream.cuh"

namespace tlt::cuda {
namespace {

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
      // Teams of several warps meet as often as the longest stream has cells: racecheck loses count otherwise.
      const int first_begin = recent ? work.border : split * kSplitKeys;
      const int rounds = WM == 1 ? count : min(most, (end - first_begin + kCellKeys - 1) / kCellKeys);
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
      for (int i = 0; i < rounds; ++i) {
        wait_copies<STAGES - 2>();
        sync_group<kTeam>(wk);  // the cell is there for all, and all have left the cell before it
        load_cell(i + STAGES - 1);
        commit_copies();
        if (WM > 1 && i >= count) continue;
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

}  // namespace
}  // namespace tlt::cuda
