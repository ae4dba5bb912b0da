// The arithmetic that both kernels of batch-invariant attention share (invariant_attention.cuh): streams of cells,
// their folds, the records of the plan.
#pragma once
#include "attention_common.cuh"
#include "invariant.h"
#include "matrix.cuh"

namespace tlt::cuda {
namespace {

constexpr int kCellKeys = 16, kStreams = kSplitKeys / kStreamKeys;

__device__ __forceinline__ int border_of(int t) { return t >= 128 ? (t - 128) / 64 * 64 : 0; }

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

}  // namespace
}  // namespace tlt::cuda
