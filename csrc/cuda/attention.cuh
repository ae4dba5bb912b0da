// Tree attention for heads of 128 and pages of a multiple of 16 keys. A *cell* is 16 keys of one KV head, so of one
// page. A group of WM warps (16 * MT rows each) works alone through every WK-th cell of its item, with its own ring of
// cells in shared memory: nothing but the last reduction joins the groups. Rows of 256 bytes are stored with their 16
// chunks permuted (chunk ^ row % 8), so that ldmatrix meets no bank conflict.
// Hopper has hopper/attention.cu.
#pragma once
#include "attention_common.cuh"
#include "matrix.cuh"

namespace tlt::cuda {
namespace {

constexpr int kCell = 16, kCellBytes = 2 * kCell * kDim * 2;

// What a thread holds of its warp's 16 * MT rows, in the layout of mma's accumulators: half h of fragment m is row
// 16 * m + 8 * h + lane / 4. totals are of the thread's own columns until the loop has ended.
template <int MT>
struct State {
  float acc[MT][kChunks][4], top[MT][2], total[MT][2];
};

template <int MT>
__device__ __forceinline__ void rescale(State<MT>& s, int m, int h, float factor) {
  s.total[m][h] *= factor;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) s.acc[m][j][2 * h] *= factor, s.acc[m][j][2 * h + 1] *= factor;
}

template <int MT>
__device__ __forceinline__ void put_state(float* at, const State<MT>& s) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      *reinterpret_cast<float4*>(at + (m * kChunks + j) * 128) = {s.acc[m][j][0], s.acc[m][j][1], s.acc[m][j][2], s.acc[m][j][3]};
    *reinterpret_cast<float4*>(at + (MT * kChunks + m) * 128) = {s.top[m][0], s.top[m][1], s.total[m][0], s.total[m][1]};
  }
}

template <int MT>
__device__ __forceinline__ void merge_state(State<MT>& s, const float* at) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const float4 other = *reinterpret_cast<const float4*>(at + (MT * kChunks + m) * 128);
    const float tops[2] = {other.x, other.y}, totals[2] = {other.z, other.w};
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(s.top[m][h], tops[h]), shift = finite(top);
      weight[h] = exp2_fast(tops[h] - shift);
      rescale(s, m, h, exp2_fast(s.top[m][h] - shift));
      s.total[m][h] = fmaf(totals[h], weight[h], s.total[m][h]);
      s.top[m][h] = top;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4 acc = *reinterpret_cast<const float4*>(at + (m * kChunks + j) * 128);
      s.acc[m][j][0] = fmaf(acc.x, weight[0], s.acc[m][j][0]);
      s.acc[m][j][1] = fmaf(acc.y, weight[0], s.acc[m][j][1]);
      s.acc[m][j][2] = fmaf(acc.z, weight[1], s.acc[m][j][2]);
      s.acc[m][j][3] = fmaf(acc.w, weight[1], s.acc[m][j][3]);
    }
  }
}

// One cell of the online softmax. cell: shared address of its K rows, its V rows behind them.
template <typename T, int MT, typename Mask>
__device__ __forceinline__ void fold_cell(State<MT>& s, const uint32_t (&q)[MT][kDim / 16][4], uint32_t cell, int lane,
                                          float scale, bool masked, const Mask& visible) {
  float scores[MT][2][4] = {};
  const int k_row = (lane >> 4) * 8 + (lane & 7);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t k[4];
    load_matrix(k, cell + k_row * (kDim * 2) + (((2 * step + ((lane >> 3) & 1)) ^ (k_row & 7)) * 16));
#pragma unroll
    for (int m = 0; m < MT; ++m) mma<T>(scores[m][0], q[m][step], k[0], k[1]), mma<T>(scores[m][1], q[m][step], k[2], k[3]);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] *= scale;
  if (masked) visible(scores);

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
        rescale(s, m, h, exp2_fast(s.top[m][h] - finite(tops[m][h])));
        s.top[m][h] = tops[m][h];
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
        const float a = exp2_fast(scores[m][n][2 * h] - shift), b = exp2_fast(scores[m][n][2 * h + 1] - shift);
        s.total[m][h] += a + b;
        weights[m][2 * n + h] = pack<T>(a, b);
      }
  const uint32_t values = cell + kCell * kDim * 2;
  const int v_row = ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < kChunks / 2; ++j) {
    uint32_t v[4];
    load_matrix_transposed(v, values + v_row * (kDim * 2) + (((2 * j + (lane >> 4)) ^ (v_row & 7)) * 16));
#pragma unroll
    for (int m = 0; m < MT; ++m)
      mma<T>(s.acc[m][2 * j], weights[m], v[0], v[1]), mma<T>(s.acc[m][2 * j + 1], weights[m], v[2], v[3]);
  }
}

// Grid (W, Hkv). An unsplit tile's rows go to out; others, not normalized, to part and stats for merge_kernel.
template <typename T, int MT, int WM, int WK, int STAGES>
__global__ void __launch_bounds__(32 * WM * WK) attend_kernel(const AttentionArgs a) {
  constexpr int M = 16 * MT * WM, kGroup = 32 * WM;
  extern __shared__ __align__(128) unsigned char ring[];
  const int index = blockIdx.x, head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int wk = warp / WM, wm = warp % WM, member = threadIdx.x % kGroup;
  let_next_kernel_start();
  if (!a.early) wait_for_kernel_in_front();
  const Item item = read_item(a.items, index);
  if (item.splits == 0) {
    if (a.early) wait_for_kernel_in_front();  // so that this kernel's end implies the end of all before it
    return;
  }
  const int limit = item.prefix + item.nodes;
  const int first = item.begin + wk, count = max(0, (item.end - first + WK - 1) / WK);
  const int cells_per_page = a.page / kCell;
  const int32_t* table = a.page_table + item.request * a.table_stride;
  // Lane l: the page of the l-th cell of 32, and where that cell begins in either cache, in elements.
  const auto page_of = [&](int i) { return i < count ? table[(first + i * WK) / cells_per_page] : 0; };
  const auto start_of = [&](int i, int page) {
    return page * a.page_stride + (first + i * WK) % cells_per_page * kCell * a.slot_stride;
  };
  const int first_page = page_of(lane);
  int next_pages = page_of(32 + lane);
  int64_t starts = start_of(lane, first_page);

  constexpr int kRows = kGroup / kChunks;  // of a copy by all threads of the group
  const int own_row = member / kChunks, chunk = member % kChunks;
  const int64_t own = head * a.head_stride + own_row * a.slot_stride + chunk * 8;
  const T *own_k = static_cast<const T*>(a.k_cache) + own, *own_v = static_cast<const T*>(a.v_cache) + own;
  const uint32_t group_ring = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + wk * STAGES * kCellBytes;

  const auto load_cell = [&](int i) {
    if (i >= count) return;
    if (i > 0 && i % 32 == 0) starts = start_of(i + lane, next_pages), next_pages = page_of(i + 32 + lane);
    const int left = limit - (first + i * WK) * kCell - own_row;
    const int64_t at = __shfl_sync(kAll, starts, i % 32);
    const uint32_t to = group_ring + i % STAGES * kCellBytes + own_row * (kDim * 2);
#pragma unroll
    for (int row = 0; row < kCell; row += kRows) {
      const uint32_t place = to + row * (kDim * 2) + (chunk ^ own_row ^ (row & 7)) * 16;
      copy16(place, own_k + at + row * a.slot_stride, row < left);
      copy16(place + kCell * kDim * 2, own_v + at + row * a.slot_stride, row < left);
    }
  };

  // Committed keys may be asked for early; a ring that reaches the step's own keys waits first.
  const bool asked = (first + (STAGES - 2) * WK + 1) * kCell <= item.prefix;
  if (a.early && !asked) wait_for_kernel_in_front();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load_cell(i), commit_copies();
  if (a.early && asked) wait_for_kernel_in_front();

  const TileRows rows{a, item, head};
  const int top_row = wm * 16 * MT + lane / 4, pair = lane % 4 * 2;
  uint32_t q[MT][kDim / 16][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = top_row + 16 * m + 8 * h;
      const bool used = rows.live(row);
      const T* from = static_cast<const T*>(a.q) + (used ? rows.offset(row, a.q_row) : 0) + pair;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          q[m][step][2 * side + h] = used ? *reinterpret_cast<const uint32_t*>(from + step * 16 + side * 8) : 0u;
    }

  Sight sights[2 * MT];  // asked for here, where nothing waits for it
#pragma unroll
  for (int x = 0; x < 2 * MT; ++x) sights[x] = Sight(rows, top_row + 8 * x);

  State<MT> s;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.top[m][h] = kNone, s.total[m][h] = 0.0f;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) s.acc[m][j][2 * h] = s.acc[m][j][2 * h + 1] = 0.0f;
    }
  for (int i = 0; i < count; ++i) {
    wait_copies<STAGES - 2>();
    sync_group<kGroup>(wk);  // the cell is there for all, and all have left the cell before it
    load_cell(i + STAGES - 1);
    commit_copies();
    const int key = (first + i * WK) * kCell;
    const auto hide = [&](float (&scores)[MT][2][4]) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (!sights[2 * m + h].sees(key + n * 8 + pair + e - item.prefix)) scores[m][n][2 * h + e] = kNone;
        }
    };
    fold_cell<T, MT>(s, q, group_ring + i % STAGES * kCellBytes, lane, a.scale_log2, key + kCell > item.prefix, hide);
  }

  wait_copies<0>();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) s.total[m][h] = quad_sum(s.total[m][h]);
  constexpr int kStateFloats = (MT * kChunks + MT) * 128;
#pragma unroll
  for (int half = WK / 2; half > 0; half /= 2) {
    float* at = reinterpret_cast<float*>(ring) + ((wk % half) * WM + wm) * kStateFloats + lane * 4;
    __syncthreads();
    if (wk >= half && wk < 2 * half) put_state(at, s);
    __syncthreads();
    if (wk < half) merge_state(s, at);
  }
  if (wk > 0) return;

  const int64_t slot = static_cast<int64_t>(index) * a.kv_heads + head;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = top_row + 16 * m + 8 * h;
      if (!rows.live(row)) continue;
      if (item.splits == 1) {
        T* to = static_cast<T*>(a.out) + rows.offset(row, static_cast<int64_t>(a.kv_heads) * a.group * kDim) + pair;
        const float factor = 1.0f / s.total[m][h];
#pragma unroll
        for (int j = 0; j < kChunks; ++j)
          *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(s.acc[m][j][2 * h] * factor, s.acc[m][j][2 * h + 1] * factor);
        continue;
      }
      float* to = a.part + (slot * M + row) * kDim + pair;
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        *reinterpret_cast<float2*>(to + j * 8) = {s.acc[m][j][2 * h], s.acc[m][j][2 * h + 1]};
      if (lane % 4 == 0) a.stats[slot * 2 * M + row] = s.top[m][h], a.stats[(slot * 2 + 1) * M + row] = s.total[m][h];
    }
}

// Blocks of 4 warps, `sharers` (1 or 4) of them to one row of one head: with few splits a warp each, since a block for
// each would take several waves. Warp w of a row adds up every sharers-th part in split order, then the warps' sums are
// added in order.
template <typename T>
__global__ void __launch_bounds__(128, 8) merge_kernel(const AttentionArgs a, int sharers) {
  __shared__ float4 sums[4][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, share = warp % sharers;
  let_next_kernel_start();
  if (!a.early) wait_for_kernel_in_front();
  const int heads = a.kv_heads * a.group, of_row = blockIdx.x * (4 / sharers) + warp / sharers;
  const int tile = of_row / heads / a.nodes_per_tile, local = of_row / heads % a.nodes_per_tile;
  const int head = of_row % heads, m = local * a.group + head % a.group;
  int4 record = {};  // first row, nodes, first item, stride
  int splits = 0;
  if (tile < a.max_tiles) record = reinterpret_cast<const int4*>(a.tiles)[tile * 2], splits = a.tiles[tile * 8 + 4];
  if (a.early) wait_for_kernel_in_front();
  if (splits <= 1 || local >= record.y) return;  // all sharers of a row leave together
  const auto slot_of = [&](int i) { return static_cast<int64_t>(record.z + i * record.w) * a.kv_heads + head / a.group; };
  const auto top_of = [&](int i) { return a.stats[slot_of(i) * 2 * a.block_m + m]; };
  const auto part_of = [&](int i) {
    return *reinterpret_cast<const float4*>(a.part + (slot_of(i) * a.block_m + m) * kDim + lane * 4);
  };
  constexpr int kHeld = 4;  // asked for before the weights are known
  float4 held[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u)
    if (share + sharers * u < splits) held[u] = part_of(share + sharers * u);
  float top = kNone, total = 0.0f;
  for (int i = lane; i < splits; i += 32) {
    const float here = top_of(i), sum = a.stats[(slot_of(i) * 2 + 1) * a.block_m + m];
    const float raised = fmaxf(top, here), shift = finite(raised);
    total = fmaf(total, exp2_fast(top - shift), sum * exp2_fast(here - shift));
    top = raised;
  }
  const float all = warp_max(top);  // finite: a row sees itself
  total = warp_sum(total * exp2_fast(top - all));
  float4 acc = {};
  const auto add = [&](const float4& x, float weight) {
    acc.x = fmaf(x.x, weight, acc.x), acc.y = fmaf(x.y, weight, acc.y);
    acc.z = fmaf(x.z, weight, acc.z), acc.w = fmaf(x.w, weight, acc.w);
  };
#pragma unroll
  for (int u = 0; u < kHeld; ++u)
    if (share + sharers * u < splits) add(held[u], exp2_fast(top_of(share + sharers * u) - all));
#pragma unroll 4
  for (int i = share + sharers * kHeld; i < splits; i += sharers) add(part_of(i), exp2_fast(top_of(i) - all));
  if (sharers > 1) {
    sums[warp][lane] = acc;
    __syncthreads();
    if (share > 0) return;
    for (int w = 1; w < sharers; ++w) {
      const float4 x = sums[warp + w][lane];
      acc.x += x.x, acc.y += x.y, acc.z += x.z, acc.w += x.w;
    }
  }
  const float factor = 1.0f / total;
  T* to = static_cast<T*>(a.out) + ((record.x + local) * static_cast<int64_t>(heads) + head) * kDim;
  *reinterpret_cast<uint2*>(to + lane * 4) = {pack<T>(acc.x * factor, acc.y * factor), pack<T>(acc.z * factor, acc.w * factor)};
}

template <typename T, int MT, int WM, int WK, int STAGES>
void launch_attend(const AttentionArgs& a, cudaStream_t stream) {
  const auto kernel = reinterpret_cast<const void*>(&attend_kernel<T, MT, WM, WK, STAGES>);
  constexpr int ring = WK * STAGES * kCellBytes, reduction = WK / 2 * WM * MT * (kChunks + 1) * 512;
  constexpr int bytes = ring > reduction ? ring : reduction;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attend: shared memory");
  launch_dependent(kernel, dim3(a.max_items, a.kv_heads), 32 * WM * WK, bytes, a, stream, "attend");
}

template <typename T, int MT, int WM, int WK>
void launch_stages(const AttentionArgs& a, cudaStream_t stream) {
  switch (a.stages) {
    case 3: return launch_attend<T, MT, WM, WK, 3>(a, stream);
    case 4: return launch_attend<T, MT, WM, WK, 4>(a, stream);
    case 6: return launch_attend<T, MT, WM, WK, 6>(a, stream);
    default: throw std::invalid_argument("stages: expected 3, 4 or 6, got " + std::to_string(a.stages));
  }
}

}  // namespace

template <typename T>
void tree_attention_typed(const AttentionArgs& a, uint64_t address) {
  const cudaStream_t stream = as_stream(address);
  if (a.hopper) return attend_hopper(a, address);
  switch (a.block_m) {
    case 16: launch_stages<T, 1, 1, 4>(a, stream); break;
    case 32: launch_stages<T, 2, 1, 4>(a, stream); break;
    case 64: launch_stages<T, 2, 2, 4>(a, stream); break;
    case 128: launch_stages<T, 2, 4, 2>(a, stream); break;
    default: throw std::invalid_argument("block_m: expected 16, 32, 64 or 128, got " + std::to_string(a.block_m));
  }
  const int sharers = a.max_items > 8 * a.max_tiles ? 4 : 1;  // by shapes alone, as a graph must be
  const int rows = a.max_tiles * a.nodes_per_tile * a.kv_heads * a.group, of_block = 4 / sharers;
  launch_dependent(reinterpret_cast<const void*>(&merge_kernel<T>), dim3((rows + of_block - 1) / of_block), 128, 0, a,
                   stream, "merge", sharers);
}

}  // namespace tlt::cuda
