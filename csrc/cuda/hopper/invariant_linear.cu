// Products whose rows have the same bits however many there are, on Hopper's warpgroup matrix units (wgmma).
//
// linear.cu's mma.sync has that property too, but falls behind the memory above 16 rows of x and takes four times
// cuBLAS' time at 256: each warp fetches the weight and x from shared memory into registers. wgmma reads both where the
// copy engine put them, and takes 8 to 64 rows of x an instruction. Its columns are sums of their own, so that the bits
// of a row are those of the instruction for 8; the deal of K to workers and the order of their sums know no rows.
//
// One worker a multiprocessor streams its run of the weight (linear_schedule.h) through a ring of stages of 64 k; one
// thread asks for them, two warpgroups multiply 64 rows of the weight each.
#include "cuda/invariant.h"
#include "cuda/linear_schedule.h"
#include "cuda/tma.cuh"

#include <algorithm>

namespace tlt::cuda {
namespace {

constexpr int kConsumers = 256, kThreads = kConsumers + 32;  // the last warp copies
constexpr int kWeightBytes = kTile * kStep * 2, kHalfBytes = kWeightBytes / 2;
static_assert(kTile == 128 && kStep == kBoxColumns);

template <int kRows>
constexpr int kStages = kRows <= 8 ? 12 : kRows <= 16 ? 11 : kRows <= 32 ? 10 : kRows <= 64 ? 8 : kRows <= 128 ? 6 : 4;

// Rows of 128 bytes, 8 of them a group of 1024 bytes whose 16-byte chunks are permuted by row % 8.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  constexpr uint64_t stride = 1024 >> 4, swizzle_128 = 1;
  return ((at & 0x3ffff) >> 4) | stride << 16 | stride << 32 | swizzle_128 << 62;
}

#define TLT_D4 "%0, %1, %2, %3"
#define TLT_D8 TLT_D4 ", %4, %5, %6, %7"
#define TLT_D16 TLT_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TLT_D32 TLT_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TLT_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TLT_OUT8(i) TLT_OUT4(i), TLT_OUT4(i + 4)
#define TLT_OUT16(i) TLT_OUT8(i), TLT_OUT8(i + 8)
#define TLT_OUT32(i) TLT_OUT16(i), TLT_OUT16(i + 16)
#define TLT_WGMMA(N, TYPE, D, A, B, ADD, ...)                                                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N            \
               "k16.f32." TYPE "." TYPE " {" D "}, " A ", " B ", p, 1, 1, 0, 0;}\n"                        \
               : __VA_ARGS__                                                                               \
               : "l"(weight), "l"(x), "r"(add))
#define TLT_WGMMA_TYPES(N, D, A, B, ADD, ...)     \
  if constexpr (std::is_same_v<T, __half>) {      \
    TLT_WGMMA(N, "f16", D, A, B, ADD, __VA_ARGS__); \
  } else {                                        \
    TLT_WGMMA(N, "bf16", D, A, B, ADD, __VA_ARGS__); \
  }

// d [64 rows of the weight, kColumns rows of x] (+)= 16 k of both.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], uint64_t weight, uint64_t x, int add) {
  if constexpr (kColumns == 8) {
    TLT_WGMMA_TYPES("8", TLT_D4, "%4", "%5", "%6", TLT_OUT4(0))
  } else if constexpr (kColumns == 16) {
    TLT_WGMMA_TYPES("16", TLT_D8, "%8", "%9", "%10", TLT_OUT8(0))
  } else if constexpr (kColumns == 32) {
    TLT_WGMMA_TYPES("32", TLT_D16, "%16", "%17", "%18", TLT_OUT16(0))
  } else {
    static_assert(kColumns == 64);
    TLT_WGMMA_TYPES("64", TLT_D32, "%32", "%33", "%34", TLT_OUT32(0))
  }
}

#undef TLT_WGMMA_TYPES
#undef TLT_WGMMA

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Keeps the compiler from moving reads or writes of d across, since it sees no use of d in the asynchronous product.
template <int kBlocks, int kCount>
__device__ __forceinline__ void pin(float (&d)[kBlocks][kCount]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[b][i])::"memory");
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// kRows: rows of x, those beyond p.rows zero. Grid: workers.
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    invariant_linear_kernel(const __grid_constant__ BoxMap weight_map, const __grid_constant__ BoxMap x_map,
                            const Linear p, const Deal deal) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kColumns = kRows < 64 ? kRows : 64, kBlocks = kRows / kColumns, kRing = kStages<kRows>;
  constexpr int kXBytes = kRows * kStep * 2;
  extern __shared__ unsigned char unaligned[];
  __shared__ uint64_t full[kRing], empty[kRing];
  __shared__ bool finishes;
  const uint32_t w_ring = (shared_at(unaligned) + 1023) & ~1023u, x_ring = w_ring + kRing * kWeightBytes;
  const uint32_t full_at = shared_at(full), empty_at = shared_at(empty);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, worker = blockIdx.x;
  const int first = deal.first_stage(worker), count = deal.first_stage(worker + 1) - first;
  const int outputs = p.silu_mul ? p.outer / 2 : p.outer;
  if (tid == 0) {
    for (int i = 0; i < kRing; ++i) init_barrier(full_at + i * 8, 1), init_barrier(empty_at + i * 8, kConsumers / 32);
    fence_barriers();
  }
  __syncthreads();

  if (warp == kConsumers / 32) {
    if (lane != 0) return;
    const uint64_t policy = read_once_policy();
    const auto copy_weight = [&](int slot, int stage) {
      const int tile = stage / deal.steps, k = stage % deal.steps * kStep;
      const uint32_t to = w_ring + slot * kWeightBytes, barrier = full_at + slot * 8;
      expect_bytes(barrier, kWeightBytes + kXBytes);
      if (p.silu_mul) {
        copy_4d_once(to, weight_map, k, tile * (kTile / 16), barrier, policy);
      } else {
        copy_2d_once(to, weight_map, k, tile * kTile, barrier, policy);
      }
    };
    const auto copy_x = [&](int slot, int stage) {
      copy_2d(x_ring + slot * kXBytes, x_map, stage % deal.steps * kStep, 0, full_at + slot * 8);
    };
    const int ahead = min(count, kRing);
    for (int i = 0; i < ahead; ++i) copy_weight(i, first + i);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < ahead; ++i) copy_x(i, first + i);
    int slot = 0, parity = 0;
    for (int i = kRing; i < count; ++i) {
      wait_parity(empty_at + slot * 8, parity);
      copy_weight(slot, first + i);
      copy_x(slot, first + i);
      if (++slot == kRing) slot = 0, parity ^= 1;
    }
    return;
  }

  // A thread's part of a tile: rows `slab * 16 + lane / 4` and 8 below of the weight, pairs of rows of x.
  const int group = warp / 4, slab = warp, pair = lane % 4 * 2;
  float sums[kBlocks][kColumns / 2];

  // Sums of unfinished tiles go to memory; the worker that comes last adds all of them in the order of k.
  const auto gather = [&](int tile) {
    constexpr int kQuads = kRows / 8, kPart = kQuads * kConsumers;
    const auto part = [&](int w) {
      return reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(deal.slot_of(w, tile)) * kPart + tid;
    };
    const auto quad = [&](int i) { return &sums[i * 4 / (kColumns / 2)][i * 4 % (kColumns / 2)]; };
    float4* const mine = part(worker);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float* const s = quad(i);
      __stcg(mine + i * kConsumers, make_float4(s[0], s[1], s[2], s[3]));
    }
    const int from = deal.worker_of(tile * deal.steps), to = deal.worker_of((tile + 1) * deal.steps - 1);
    sync_consumers();
    if (tid == 0) {
      __threadfence();
      finishes = atomicAdd(p.arrived + tile, 1u) == static_cast<uint32_t>(to - from);
      if (finishes) p.arrived[tile] = 0;
      __threadfence();
    }
    sync_consumers();
    if (!finishes) return false;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float* const s = quad(i);
      s[0] = s[1] = s[2] = s[3] = 0.0f;
    }
    for (int w = from; w <= to; ++w) {
      const float4* const theirs = part(w);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 v = __ldcg(theirs + i * kConsumers);
        float* const s = quad(i);
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
    }
    return true;
  };

  const T* const bias = static_cast<const T*>(p.bias);
  const T* const base = static_cast<const T*>(p.base);
  T* const out = static_cast<T*>(p.out);
  const auto write = [&](int tile) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {  // pairs (j, e): column 8 j + pair + e
        const int j = i / 2, e = i % 2, row = b * kColumns + j * 8 + pair + e;
        if (row >= p.rows) continue;
        const float values[2] = {sums[b][4 * j + e], sums[b][4 * j + 2 + e]};
        if (p.silu_mul) {
          const int n = tile * (kTile / 2) + slab * 8 + lane / 4;
          if (n >= outputs) continue;
          const float gate = widen(narrow<T>(values[0] + (bias ? widen(bias[n]) : 0.0f)));
          const float up = widen(narrow<T>(values[1] + (bias ? widen(bias[n + outputs]) : 0.0f)));
          const float silu = widen(narrow<T>(gate / (1.0f + __expf(-gate))));
          out[static_cast<int64_t>(row) * outputs + n] = narrow<T>(silu * up);
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = tile * kTile + slab * 16 + half * 8 + lane / 4;
          if (n >= outputs) continue;
          T y = narrow<T>(values[half] + (bias ? widen(bias[n]) : 0.0f));
          if (p.base) y = narrow<T>(widen(base[row * p.base_stride + n]) + widen(y));
          out[static_cast<int64_t>(row) * outputs + n] = y;
        }
      }
    }
  };

  asm volatile("griddepcontrol.wait;" ::: "memory");
  int tile = first / deal.steps, step = first % deal.steps, slot = 0, parity = 0, started = 0, held = -1;
  bool whole = step == 0;
  const auto release = [&](int which) {
    if (which >= 0 && lane == 0) arrive_at(empty_at + which * 8);
  };
  for (int i = 0; i < count; ++i) {
    wait_parity(full_at + slot * 8, parity);
    const uint32_t w = w_ring + slot * kWeightBytes + group * kHalfBytes, x = x_ring + slot * kXBytes;
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        multiply<T, kColumns>(sums[b], descriptor(w + k * 32), descriptor(x + b * kColumns * 128 + k * 32), started | k);
    }
    wgmma_commit();
    const bool ends = ++step == deal.steps;
    if (ends || i + 1 == count) {
      wgmma_wait<0>();
      pin(sums);
      release(held), release(slot);
      held = -1;
      if ((whole && ends) || gather(tile)) write(tile);
      started = 0, whole = true;
    } else {
      wgmma_wait<1>();  // the stage before this one has been read
      release(held);
      held = slot, started = 1;
    }
    if (ends) step = 0, ++tile;
    if (++slot == kRing) slot = 0, parity ^= 1;
  }
#endif
}

template <typename T, int kRows>
void launch(const Linear& p, bool overlap, cudaStream_t stream) {
  constexpr int kBytes = kStages<kRows> * (kWeightBytes + kRows * kStep * 2) + 1024;
  const auto kernel = invariant_linear_kernel<T, kRows>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "invariant linear");
  const int64_t inner = p.inner, outputs = p.silu_mul ? p.outer / 2 : p.outer;
  const int32_t span = p.silu_mul ? kTile / 2 : kTile;
  Deal deal{static_cast<int32_t>((outputs + span - 1) / span), (p.inner + kStep - 1) / kStep, p.workers};
  deal.workers = static_cast<int32_t>(std::min<int64_t>(p.workers, static_cast<int64_t>(deal.tiles) * deal.steps));
  // With silu_mul groups of 8 gates and of the 8 rows they scale take turns, so that a thread holds both of a pair.
  const BoxMap weight = p.silu_mul
      ? box_map<T, 4>(p.weight, {inner, 8, 2, outputs / 8}, {inner, outputs * inner, 8 * inner}, {kBoxColumns, 8, 2, 8})
      : box_map<T, 2>(p.weight, {inner, outputs}, {inner}, {kBoxColumns, kTile});
  const BoxMap x = box_map<T, 2>(p.x, {inner, p.rows}, {p.rows == 1 ? inner : p.x_stride}, {kBoxColumns, kRows});
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(deal.workers), config.blockDim = dim3(kThreads), config.dynamicSmemBytes = kBytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, weight, x, p, deal), "invariant linear");
}

template <typename T>
void launch_rows(const Linear& p, bool overlap, cudaStream_t stream) {
  if (p.rows <= 8) return launch<T, 8>(p, overlap, stream);
  if (p.rows <= 16) return launch<T, 16>(p, overlap, stream);
  if (p.rows <= 32) return launch<T, 32>(p, overlap, stream);
  if (p.rows <= 64) return launch<T, 64>(p, overlap, stream);
  if (p.rows <= 128) return launch<T, 128>(p, overlap, stream);
  launch<T, 256>(p, overlap, stream);
}

}  // namespace

int64_t invariant_linear_partials(int32_t workers) {
  return static_cast<int64_t>(workers) * 2 * kTile * kInvariantRows * sizeof(float);
}

int64_t invariant_linear_counters(int32_t outer) {
  return (outer / (kTile / 2) + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

void invariant_linear(const Linear& product, Dtype dtype, bool overlap, uint64_t stream) {
  const int64_t outputs = product.silu_mul ? product.outer / 2 : product.outer;
  for (int32_t row = 0; row < product.rows; row += kInvariantRows) {
    Linear part = product;
    part.rows = std::min(product.rows - row, kInvariantRows);
    part.x = static_cast<const char*>(product.x) + row * product.x_stride * 2;
    if (product.base) part.base = static_cast<const char*>(product.base) + row * product.base_stride * 2;
    part.out = static_cast<char*>(product.out) + row * outputs * 2;
    if (dtype == Dtype::kFloat16) {
      launch_rows<__half>(part, overlap, as_stream(stream));
    } else {
      launch_rows<__nv_bfloat16>(part, overlap, as_stream(stream));
    }
  }
}

}  // namespace tlt::cuda
