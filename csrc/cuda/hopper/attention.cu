// Tree attention on Hopper's warpgroup matrix units (wgmma): tiles of WM * 64 rows, blocks of 64 keys. A warpgroup holds
// 64 rows of q in registers and reads K and V from a ring of blocks in shared memory that all warpgroups fill, 16 bytes
// a copy, since the keys of a block lie in several pages. While one warpgroup takes exponentials the other multiplies.
//
// mma.sync (attention.cuh) does the same work at 2.4 us a block of 64 keys and 128 rows, where memory delivers one in
// 1.05 us: each warp must fetch all of K and V from shared memory for its 32 rows, and no overlap is left.
#include <type_traits>

#include "cuda/attention_common.cuh"

namespace tlt::cuda {
namespace {

constexpr int kKeys = 64, kHalfBytes = kKeys * 128, kBlockBytes = 4 * kHalfBytes;  // K: two halves of D, V: two

// Rows of 128 bytes, 8 of them a group of 1024 bytes whose 16-byte chunks are permuted by row % 8. Serves K (D
// contiguous) and one half of V (D contiguous, transposed by the instruction), where one stride is enough.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  constexpr uint64_t stride = 1024 >> 4, swizzle_128 = 1;
  return ((at & 0x3ffff) >> 4) | stride << 16 | stride << 32 | swizzle_128 << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Keeps the compiler from moving reads or writes of d across, since it sees no use of d in the asynchronous product.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d [64 rows, 64 columns] (+)= a [64, 16] * b [16, 64]; kTransposed: b lies column by column (V).
template <typename T, int kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
#define TLT_WGMMA(TYPE)                                                                                              \
  asm volatile(                                                                                                      \
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                    \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}\n"                                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
  if constexpr (std::is_same_v<T, __half>) {
    TLT_WGMMA("f16");
  } else {
    TLT_WGMMA("bf16");
  }
#undef TLT_WGMMA
}

// Thread: rows warp * 16 + lane / 4 and 8 below; column 8 * j + lane % 4 * 2 + e is element 4 * j + 2 * h + e.
template <typename T, int WM, int STAGES>
__global__ void __launch_bounds__(128 * WM) attend_wgmma(const AttentionArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int M = 64 * WM, kThreads = 128 * WM;
  extern __shared__ unsigned char unaligned[];
  const int index = blockIdx.x, head = blockIdx.y, lane = threadIdx.x & 31;
  let_next_kernel_start();
  if (!a.early) wait_for_kernel_in_front();
  const Item item = read_item(a.items, index);
  if (item.splits == 0) {
    if (a.early) wait_for_kernel_in_front();  // so that this kernel's end implies the end of all before it
    return;
  }
  const int begin = item.begin * 16, limit = min(item.prefix + item.nodes, item.end * 16);  // keys
  const int count = (limit - begin + kKeys - 1) / kKeys;
  const int cells_per_page = a.page / 16;
  const int32_t* table = a.page_table + item.request * a.table_stride;
  // Lane l: the page of cell l (16 keys) of eight blocks, and where that cell begins in either cache, in elements.
  // Known once for eight blocks: a division and two wide products for every copy cost more than the products of a tile.
  const auto page_of = [&](int i) {
    const int cell = item.begin + i * (kKeys / 16) + lane;
    return cell * 16 < limit ? table[cell / cells_per_page] : 0;
  };
  const auto start_of = [&](int i, int page) {
    return page * a.page_stride + (item.begin + i * (kKeys / 16) + lane) % cells_per_page * 16 * a.slot_stride;
  };
  const int first_page = page_of(0);
  int next_pages = count > 8 ? page_of(8) : 0;
  int64_t starts = start_of(0, first_page);

  constexpr int kRows = kThreads / kChunks;  // of a copy by all threads
  const int own_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const int64_t own = head * a.head_stride + own_row * a.slot_stride + chunk * 8;
  const T *own_k = static_cast<const T*>(a.k_cache) + own, *own_v = static_cast<const T*>(a.v_cache) + own;
  const uint32_t ring = (static_cast<uint32_t>(__cvta_generic_to_shared(unaligned)) + 1023) & ~1023u;
  const uint32_t own_place = ring + chunk / 8 * kHalfBytes + own_row * 128 + ((chunk ^ own_row) & 7) * 16;

  const auto load_block = [&](int i) {
    if (i >= count) return;
    if (i > 0 && i % 8 == 0) {
      starts = start_of(i, next_pages);
      if (i + 8 < count) next_pages = page_of(i + 8);
    }
    const int left = limit - begin - i * kKeys - own_row;
    const uint32_t to = own_place + i % STAGES * kBlockBytes;
#pragma unroll
    for (int row = 0; row < kKeys; row += kRows) {
      const int64_t at = __shfl_sync(kAll, starts, i % 8 * 4 + row / 16) + row % 16 * a.slot_stride;
      copy16(to + row * 128, own_k + at, row < left);
      copy16(to + row * 128 + 2 * kHalfBytes, own_v + at, row < left);
    }
  };

  // Committed keys may be asked for early; a ring that reaches the step's own keys waits first.
  const bool asked = begin + (STAGES - 1) * kKeys <= item.prefix;
  if (a.early && !asked) wait_for_kernel_in_front();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load_block(i), commit_copies();
  if (a.early && asked) wait_for_kernel_in_front();

  const TileRows rows{a, item, head};
  const int top_row = threadIdx.x / 32 * 16 + lane / 4, pair = lane % 4 * 2;
  uint32_t q[kDim / 16][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = top_row + 8 * h;
    const bool used = rows.live(row);
    const T* from = static_cast<const T*>(a.q) + (used ? rows.offset(row, a.q_row) : 0) + pair;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        q[step][2 * side + h] = used ? *reinterpret_cast<const uint32_t*>(from + step * 16 + side * 8) : 0u;
  }

  const Sight sights[2] = {{rows, top_row}, {rows, top_row + 8}};
  float acc[2][32] = {}, tops[2] = {kNone, kNone}, totals[2] = {};
  for (int i = 0; i < count; ++i) {
    wait_copies<STAGES - 2>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // the block is there for all, and all have left the one whose place the next copies take
    load_block(i + STAGES - 1);
    commit_copies();
    const uint32_t block = ring + i % STAGES * kBlockBytes;

    float scores[32];
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      wgmma<T, 0>(scores, q[step], descriptor(block + step / 4 * kHalfBytes + step % 4 * 32), step > 0);
    wgmma_commit();
    wgmma_wait();
    pin(scores);
#pragma unroll
    for (int x = 0; x < 32; ++x) scores[x] *= a.scale_log2;
    const int first_key = begin + i * kKeys;
    if (first_key + kKeys > min(item.prefix, limit)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = first_key + j * 8 + pair + e;
            if ((key >= limit) | !sights[h].sees(key - item.prefix)) scores[4 * j + 2 * h + e] = kNone;
          }
      }
    }
    float raised[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = scores[2 * h];
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
      raised[h] = fmaxf(tops[h], quad_max(top));
    }
    if (__any_sync(kAll, raised[0] > tops[0] || raised[1] > tops[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = exp2_fast(tops[h] - finite(raised[h]));
        tops[h] = raised[h], totals[h] *= factor;
#pragma unroll
        for (int d = 0; d < 2; ++d)
#pragma unroll
          for (int j = 0; j < 8; ++j) acc[d][4 * j + 2 * h] *= factor, acc[d][4 * j + 2 * h + 1] *= factor;
      }
    }
    uint32_t weights[4][4];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = finite(tops[h]);
        const float x = exp2_fast(scores[4 * j + 2 * h] - shift), y = exp2_fast(scores[4 * j + 2 * h + 1] - shift);
        totals[h] += x + y;
        weights[j / 2][j % 2 * 2 + h] = pack<T>(x, y);
      }
    pin(acc[0]), pin(acc[1]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < 2; ++d)
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        wgmma<T, 1>(acc[d], weights[step], descriptor(block + (2 + d) * kHalfBytes + step * 2048), 1);
    wgmma_commit();
    wgmma_wait();
    pin(acc[0]), pin(acc[1]);
  }

  const int64_t slot = static_cast<int64_t>(index) * a.kv_heads + head;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = top_row + 8 * h;
    const float total = quad_sum(totals[h]);
    if (!rows.live(row)) continue;
    if (item.splits == 1) {
      T* to = static_cast<T*>(a.out) + rows.offset(row, static_cast<int64_t>(a.kv_heads) * a.group * kDim) + pair;
      const float factor = 1.0f / total;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float* x = &acc[j / 8][j % 8 * 4 + 2 * h];
        *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(x[0] * factor, x[1] * factor);
      }
      continue;
    }
    float* to = a.part + (slot * M + row) * kDim + pair;
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      *reinterpret_cast<float2*>(to + j * 8) = {acc[j / 8][j % 8 * 4 + 2 * h], acc[j / 8][j % 8 * 4 + 2 * h + 1]};
    if (lane % 4 == 0) a.stats[slot * 2 * M + row] = tops[h], a.stats[(slot * 2 + 1) * M + row] = total;
  }
#endif
}

template <typename T, int WM, int STAGES>
void launch_wgmma(const AttentionArgs& a, cudaStream_t stream) {
  const auto kernel = reinterpret_cast<const void*>(&attend_wgmma<T, WM, STAGES>);
  constexpr int bytes = STAGES * kBlockBytes + 1024;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attend: shared memory");
  launch_dependent(kernel, dim3(a.max_items, a.kv_heads), 128 * WM, bytes, a, stream, "attend");
}

template <typename T, int WM>
void launch_stages(const AttentionArgs& a, cudaStream_t stream) {
  switch (a.stages) {
    case 3: return launch_wgmma<T, WM, 3>(a, stream);
    case 4: return launch_wgmma<T, WM, 4>(a, stream);
    case 6: return launch_wgmma<T, WM, 6>(a, stream);
    default: throw std::invalid_argument("stages: expected 3, 4 or 6, got " + std::to_string(a.stages));
  }
}

template <typename T>
void launch_tiles(const AttentionArgs& a, cudaStream_t stream) {
  switch (a.block_m) {
    case 64: return launch_stages<T, 1>(a, stream);
    case 128: return launch_stages<T, 2>(a, stream);
    default: throw std::invalid_argument("block_m: expected 64 or 128, got " + std::to_string(a.block_m));
  }
}

}  // namespace

void attend_hopper(const AttentionArgs& a, uint64_t stream) {
  if (a.dtype == Dtype::kFloat16) {
    launch_tiles<__half>(a, as_stream(stream));
  } else {
    launch_tiles<__nv_bfloat16>(a, as_stream(stream));
  }
}

}  // namespace tlt::cuda
