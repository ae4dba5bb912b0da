// The splits of a tile, merged in the kernel that attends them: items that stand in one cluster of blocks add up their
// parts through each other's shared memory, each a share of the rows; where a tile has items in several clusters, the
// last of them to finish a row adds up what the others left in memory. Nobody waits for a block that may not have
// started.
#pragma once
#include "cuda/attention_common.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace tlt::cuda {
namespace {

constexpr int kPartRow = (kDim + 8) * 4;  // bytes; the 8 floats keep neighbouring rows in different banks
constexpr int kPartBytes = 64 * kPartRow;

// The items of a tile, and those of them that stand in this block's cluster: its team.
struct Team {
  int first, stride, splits;      // items first + i * stride, i < splits
  int members, position, leader;  // of the team; this block's place in it; the rank of its first block
  int teams, cluster;

  __device__ __forceinline__ Team(const Item& item, int index, int rank, int nodes_per_tile, int cluster_blocks)
      : stride((item.nodes + nodes_per_tile - 1) / nodes_per_tile), splits(item.splits), cluster(cluster_blocks) {
    first = index - item.split * stride;
    position = min(item.split, rank / stride);
    members = position + 1 + min(splits - 1 - item.split, (cluster - 1 - rank) / stride);
    leader = rank - position * stride;
    teams = stride >= cluster ? splits : (first + (splits - 1) * stride) / cluster - first / cluster + 1;
  }
  // The item of a team's first block: where its part lies.
  __device__ __forceinline__ int slot(int team) const {
    if (stride >= cluster) return first + team * stride;
    const int ahead = max(0, (first / cluster + team) * cluster - first);
    return first + (ahead + stride - 1) / stride * stride;
  }
};

template <typename T>
__device__ __forceinline__ void write_row(const AttentionArgs& a, const TileRows& rows, int m, const float4& x,
                                          float total, int lane) {
  float factor;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(total));  // 1 ulp; total >= 1, as a row sees itself
  T* to = static_cast<T*>(a.out) + rows.offset(m, static_cast<int64_t>(a.kv_heads) * a.group * kDim) + lane * 4;
  *reinterpret_cast<uint2*>(to) = {pack<T>(x.x * factor, x.y * factor), pack<T>(x.z * factor, x.w * factor)};
}

// Weighted sums of the parts of kRows rows at a time, so that one hides the latencies of another. Parts are added in order.
constexpr int kRows = 4;

struct Sums {
  float4 x[kRows];
  float top[kRows], total[kRows];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = {}, top[r] = kNone, total[r] = 0.0f;
  }
  // Lane p < count holds the maxima and sums of part p for `found` rows, and where it lies: load(place, r) is four
  // columns, this lane's, of its row r.
  template <typename Load>
  __device__ __forceinline__ void fold(const float (&tops)[kRows], const float (&totals)[kRows], uint32_t place,
                                       int count, int found, const Load& load) {
    float weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float all = fmaxf(top[r], warp_max(tops[r])), before = exp2_fast(top[r] - finite(all));
      weight[r] = exp2_fast(tops[r] - finite(all));
      x[r].x *= before, x[r].y *= before, x[r].z *= before, x[r].w *= before;
      total[r] = fmaf(total[r], before, warp_sum(totals[r] * weight[r]));
      top[r] = all;
    }
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int p = 0; p < count; p += kAtOnce) {
      float4 part[kAtOnce][kRows] = {};
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t from = __shfl_sync(kAll, place, (p + u) & 31);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (p + u < count && r < found) part[u][r] = load(from, r);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float w = p + u < count ? __shfl_sync(kAll, weight[r], (p + u) & 31) : 0.0f;
          x[r].x = fmaf(part[u][r].x, w, x[r].x), x[r].y = fmaf(part[u][r].y, w, x[r].y);
          x[r].z = fmaf(part[u][r].z, w, x[r].z), x[r].w = fmaf(part[u][r].w, w, x[r].w);
        }
    }
  }
};

// Adds up, for this block's share of the rows, what the team left in shared memory: at `parts` rows of parts, behind
// them 64 maxima and 64 sums for each 64 rows. A tile of several teams goes on in memory.
template <typename T, int MT>
__device__ __forceinline__ void merge(const AttentionArgs& a, const TileRows& rows, const Team& team, uint32_t parts,
                                      int index, int head, int warp, int lane) {
  constexpr int M = 64 * MT, kWarps = 4 * MT;
  const int live = min(a.nodes_per_tile, rows.item.nodes - rows.item.node) * a.group;
  const auto place = [&](int item) { return static_cast<uint32_t>(item * a.kv_heads + head) * M; };
  const int begin = team.position + team.members * warp, step = team.members * kWarps;  // this warp's rows
  const uint32_t own = place(index - team.position * team.stride);
  const uint32_t from = in_block(parts, team.leader + (lane < team.members ? lane * team.stride : 0));
  for (int first = begin; first < live; first += kRows * step) {
    float tops[kRows], totals[kRows];
    int found = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + r * step;
      tops[r] = kNone, totals[r] = 0.0f;
      if (row >= live) continue;
      ++found;
      const uint32_t at = from + MT * kPartBytes + row / 64 * 512 + row % 64 * 4;
      if (lane < team.members) tops[r] = load_float(at), totals[r] = load_float(at + 256);
    }
    Sums sums;
    sums.fold(tops, totals, from, team.members, found, [&](uint32_t part, int r) {
      const int row = first + r * step;
      return load_float4(part + row / 64 * kPartBytes + row % 64 * kPartRow + lane * 16);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= found) break;
      const int row = first + r * step;
      if (team.teams == 1) {
        write_row<T>(a, rows, row, sums.x[r], sums.total[r], lane);
      } else {
        __stcg(reinterpret_cast<float4*>(a.part + static_cast<int64_t>(own + row) * kDim) + lane, sums.x[r]);
        if (lane == 0) __stcg(a.stats + own * 2 + row, sums.top[r]), __stcg(a.stats + own * 2 + M + row, sums.total[r]);
      }
    }
  }
  if (team.teams == 1) return;

  fence_gpu();
  __syncwarp();
  bool last = false;
  if (begin + lane * step < live) {  // lane i: this warp's row i, of at most 16
    int32_t* arrivals = a.arrivals + place(team.first) + begin + lane * step;
    last = atomicAdd(arrivals, 1) == team.teams - 1;
    if (last) *arrivals = 0;  // for the next kernel
  }
  unsigned mine = __ballot_sync(kAll, last);
  if (mine) fence_gpu();
  while (mine) {
    int row[kRows], found = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r] = begin + (__ffs(mine) - 1) * step;
      found += mine != 0;
      mine &= mine - 1;
    }
    Sums sums;
#pragma unroll 1
    for (int t = 0; t < team.teams; t += 32) {
      const uint32_t part = place(team.slot(min(t + lane, team.teams - 1)));
      float tops[kRows], totals[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        tops[r] = kNone, totals[r] = 0.0f;
        if (r < found && t + lane < team.teams)
          tops[r] = __ldcg(a.stats + part * 2 + row[r]), totals[r] = __ldcg(a.stats + part * 2 + M + row[r]);
      }
      sums.fold(tops, totals, part, min(32, team.teams - t), found, [&](uint32_t from, int r) {
        return __ldcg(reinterpret_cast<const float4*>(a.part + static_cast<int64_t>(from + row[r]) * kDim) + lane);
      });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < found) write_row<T>(a, rows, row[r], sums.x[r], sums.total[r], lane);
  }
}

}  // namespace
}  // namespace tlt::cuda
