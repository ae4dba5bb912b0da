// One worker a multiprocessor streams its run of the weight through a ring in shared memory and multiplies with wgmma:
// 64 rows of the weight (the instruction's M) by up to 256 rows of x (its N). One thread asks the copy engine (TMA) for
// whole boxes, two warpgroups multiply. The next kernel's workers move in as this one's leave: they ask for their first
// stages of the weight, 64 to 192 KB each, before they wait for this one's last sums, so that memory stays busy across
// dependent products.
//
// A row's bits do not depend on the other rows: each column of a product is its own sum, the instruction's order of k is
// the same for every N, and neither the deal nor the order in which partial sums are added knows how many rows there are.
// bench/LOG.md, "products of few rows", has what was tried.
#include "cuda/linear.h"

#include <algorithm>

#include "cuda/hopper/tma.cuh"
#include "cuda/hopper/warpgroup.cuh"
#include "cuda/linear_schedule.h"

namespace tlt::cuda {
namespace {

constexpr int kWarps = 8, kConsumers = kWarps * 32, kThreads = kConsumers + 32;  // the last warp copies
constexpr int kWeightBytes = kTile * kStep * 2;                                  // of a stage
static_assert(kTile == 128 && kStep == kBoxColumns);  // 64 rows a warpgroup

template <int N, int kStages>
constexpr int shared_bytes() {
  return kStages * (kWeightBytes + N * kStep * 2) + 1024;  // and what aligns it
}

// 16 bytes for the same thread to read, through L2.
__device__ __forceinline__ void copy_own(uint32_t to, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float4 read_own(uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
  return v;
}

// Publishes what the block stored before its barrier, and sees what the blocks that came earlier stored.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Rows of 128 bytes, k contiguous, 8 rows a group of 1024 bytes whose 16-byte chunks are permuted by row % 8.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  constexpr uint64_t stride = 1024 >> 4, swizzle_128 = 1;
  return ((at & 0x3ffff) >> 4) | stride << 16 | stride << 32 | swizzle_128 << 62;
}

// d [64 rows of the weight, N rows of x] (+)= their product over 16 k.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t weight, uint64_t x, int add) {
#define TLT_R4 "%0, %1, %2, %3"
#define TLT_R8 TLT_R4 ", %4, %5, %6, %7"
#define TLT_R16 TLT_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TLT_R32 TLT_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TLT_R64                                                                                       \
  TLT_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
          "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TLT_R128                                                                                                       \
  TLT_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
          "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "  \
          "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "     \
          "%122, %123, %124, %125, %126, %127"
#define TLT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TLT_D8(i) TLT_D4(i), TLT_D4(i + 4)
#define TLT_D16(i) TLT_D8(i), TLT_D8(i + 8)
#define TLT_D32(i) TLT_D16(i), TLT_D16(i + 16)
#define TLT_D64(i) TLT_D32(i), TLT_D32(i + 32)
#define TLT_D128(i) TLT_D64(i), TLT_D64(i + 64)
#define TLT_ASM(SHAPE, TYPE, REGISTERS, A, B, ADD, ...)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
               "." TYPE " {" REGISTERS "}, %" A ", %" B ", p, 1, 1, 0, 0;\n}"                                      \
               : __VA_ARGS__                                                                                       \
               : "l"(weight), "l"(x), "r"(add))
#define TLT_WGMMA(SHAPE, ...)                     \
  if constexpr (std::is_same_v<T, __half>) {      \
    TLT_ASM(SHAPE, "f16", __VA_ARGS__);           \
  } else {                                        \
    TLT_ASM(SHAPE, "bf16", __VA_ARGS__);          \
  }
  if constexpr (N == 8) {
    TLT_WGMMA("m64n8k16", TLT_R4, "4", "5", "6", TLT_D4(0))
  } else if constexpr (N == 16) {
    TLT_WGMMA("m64n16k16", TLT_R8, "8", "9", "10", TLT_D8(0))
  } else if constexpr (N == 32) {
    TLT_WGMMA("m64n32k16", TLT_R16, "16", "17", "18", TLT_D16(0))
  } else if constexpr (N == 64) {
    TLT_WGMMA("m64n64k16", TLT_R32, "32", "33", "34", TLT_D32(0))
  } else if constexpr (N == 128) {
    TLT_WGMMA("m64n128k16", TLT_R64, "64", "65", "66", TLT_D64(0))
  } else {
    static_assert(N == 256);
    TLT_WGMMA("m64n256k16", TLT_R128, "128", "129", "130", TLT_D128(0))
  }
#undef TLT_WGMMA
#undef TLT_ASM
#undef TLT_D128
#undef TLT_D64
#undef TLT_D32
#undef TLT_D16
#undef TLT_D8
#undef TLT_D4
#undef TLT_R128
#undef TLT_R64
#undef TLT_R32
#undef TLT_R16
#undef TLT_R8
#undef TLT_R4
}

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T>
union Two {
  T value[2];
  uint32_t word;
  __device__ Two() : word(0) {}
};

// The fragment of an 8 x 8 matrix of half types, two neighbours of a row a lane, becomes that of its transpose.
__device__ __forceinline__ uint32_t transpose(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// N: rows of x, those beyond p.rows zero. Grid: workers.
template <typename T, int N, int kStages>
__global__ void __launch_bounds__(kThreads, N < 128 ? 2 : 1)
    linear_kernel(const __grid_constant__ BoxMap weight_map, const __grid_constant__ BoxMap x_map,
                  const Linear p, const Deal deal) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kXBytes = N * kStep * 2, kQuads = N / 8;
  extern __shared__ unsigned char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ bool finishes;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int worker = blockIdx.x;
  const int first = deal.first_stage(worker), count = deal.first_stage(worker + 1) - first;
  const uint32_t w_ring = (shared_at(unaligned) + 1023) & ~1023u;  // the swizzle follows the address
  const uint32_t x_ring = w_ring + kStages * kWeightBytes;
  const uint32_t full_at = shared_at(full), empty_at = shared_at(empty);
  // A tile of outputs spans so many features; with silu_mul half of its rows are what the other half's gates scale.
  const int span = p.silu_mul ? kTile / 2 : kTile, outputs = p.silu_mul ? p.outer / 2 : p.outer;

  if (warp == kWarps) {
    const uint64_t policy = read_once_policy();
    const auto ask_weight = [&](int slot, int stage) {
      const int tile = stage / deal.steps, k = stage % deal.steps * kStep, barrier = full_at + slot * 8;
      expect_bytes(barrier, kWeightBytes + kXBytes);
      if (p.silu_mul) {
        copy_4d_once(w_ring + slot * kWeightBytes, weight_map, k, tile * (span / 8), barrier, policy);
      } else {
        copy_2d_once(w_ring + slot * kWeightBytes, weight_map, k, tile * span, barrier, policy);
      }
    };
    const auto ask_x = [&](int slot, int stage) {
      copy_2d(x_ring + slot * kXBytes, x_map, stage % deal.steps * kStep, 0, full_at + slot * 8);
    };
    const int ahead = min(count, kStages);
    if (lane == 0) {
      for (int i = 0; i < kStages; ++i) {
        init_barrier(full_at + i * 8, 1);
        init_barrier(empty_at + i * 8, kWarps);
      }
      fence_barriers();
      for (int i = 0; i < ahead; ++i) ask_weight(i, first + i);
      asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
      start_dependents();
    }
    __syncwarp();
    __syncthreads();
    if (lane != 0) return;
    wait_for_predecessor();
    for (int i = 0; i < ahead; ++i) ask_x(i, first + i);
    int slot = 0, parity = 0;
    for (int i = kStages; i < count; ++i) {
      wait_parity(empty_at + slot * 8, parity);
      ask_weight(slot, first + i);
      ask_x(slot, first + i);
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    return;
  }

  __syncthreads();
  float sums[N / 2];
  // Sums of unfinished tiles go to memory; the worker that comes last adds all of them in the order of k.
  const auto gather = [&](int tile, bool last) {
    const auto part = [&](int w) {
      return reinterpret_cast<float4*>(p.partials) + deal.slot_of(w, tile) * kQuads * kConsumers + tid;
    };
    float4* const mine = part(worker);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      __stcg(mine + j * kConsumers, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
    const int from = deal.worker_of(tile * deal.steps), to = deal.worker_of((tile + 1) * deal.steps - 1);
    sync_consumers();
    if (tid == 0) {
      uint32_t* const counter = p.arrived + tile;
      finishes = count_arrival(counter) == static_cast<uint32_t>(to - from);
      if (finishes) *counter = 0;
    }
    sync_consumers();
    if (!finishes) return false;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0;
    const auto add = [&](int j, float4 v) {
      sums[4 * j] += v.x;
      sums[4 * j + 1] += v.y;
      sums[4 * j + 2] += v.z;
      sums[4 * j + 3] += v.w;
    };
    if (!last) {
#pragma unroll 1
      for (int w = from; w <= to; ++w) {
        const float4* const theirs = part(w);
#pragma unroll
        for (int j = 0; j < kQuads; ++j) add(j, __ldcg(theirs + j * kConsumers));
      }
      return true;
    }
    // The ring is free: all sums come at once, where registers would hold those of one or two workers. 4.7 share a tile
    // of 3584 outputs.
    constexpr int kPartBytes = kQuads * kConsumers * 16, kFit = (shared_bytes<N, kStages>() - 1024) / kPartBytes;
    const uint32_t own = w_ring + tid * 16;
#pragma unroll 1
    for (int begin = from; begin <= to; begin += kFit) {
      const int end = min(begin + kFit, to + 1);
#pragma unroll 1
      for (int w = begin; w < end; ++w) {
        const float4* const theirs = part(w);
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          copy_own(own + (w - begin) * kPartBytes + j * kConsumers * 16, theirs + j * kConsumers);
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
      for (int w = begin; w < end; ++w) {
#pragma unroll
        for (int j = 0; j < kQuads; ++j) add(j, read_own(own + (w - begin) * kPartBytes + j * kConsumers * 16));
      }
    }
    return true;
  };

  const T* const bias = static_cast<const T*>(p.bias);
  const T* const base = static_cast<const T*>(p.base);
  T* const out = static_cast<T*>(p.out);
  // Lane: feature lane / 4 of 8, rows 8 j + lane % 4 * 2 + e, in sums[4 j + e]; 8 features on (or what this gate scales)
  // in sums[4 j + 2 + e]. Transposed, it holds two features of row 8 j + lane / 4.
  const auto write = [&](int tile) {
    const int n0 = tile * span + warp * (p.silu_mul ? 8 : 16), n = n0 + lane / 4, two = n0 + lane % 4 * 2;
    const int other = p.silu_mul ? outputs : 8;
    const float low = bias && n < outputs ? widen(bias[n]) : 0.0f;
    const float high = bias && n + (p.silu_mul ? 0 : 8) < outputs ? widen(bias[n + other]) : 0.0f;
    const auto live = [&](int j, int h) { return j * 8 + lane / 4 < p.rows && two + 8 * h < outputs; };
    constexpr int kChunk = kQuads < 8 ? kQuads : 8;
#pragma unroll
    for (int j0 = 0; j0 < kQuads; j0 += kChunk) {
      Two<T> added[kChunk][2];  // asked for before any store: out may be base, so that no load may pass a store
      if (p.base) {
#pragma unroll
        for (int i = 0; i < 2 * kChunk; ++i) {
          const int j = j0 + i / 2, h = i % 2;
          const T* const at = base + (j * 8 + lane / 4) * p.base_stride + two + 8 * h;
          if (live(j, h)) added[i / 2][h].word = *reinterpret_cast<const uint32_t*>(at);
        }
      }
#pragma unroll
      for (int j = j0; j < j0 + kChunk; ++j) {
        Two<T> y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          y[0].value[e] = narrow<T>(sums[4 * j + e] + low);
          y[1].value[e] = narrow<T>(sums[4 * j + 2 + e] + high);
        }
        T* const to = out + static_cast<int64_t>(j * 8 + lane / 4) * outputs + two;
        if (p.silu_mul) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float gate = widen(y[0].value[e]);
            const float silu = widen(narrow<T>(__fdividef(gate, 1.0f + __expf(-gate))));
            y[0].value[e] = narrow<T>(silu * widen(y[1].value[e]));
          }
          y[0].word = transpose(y[0].word);
          if (live(j, 0)) *reinterpret_cast<uint32_t*>(to) = y[0].word;
          continue;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          y[h].word = transpose(y[h].word);
          if (p.base) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              y[h].value[e] = narrow<T>(widen(added[j - j0][h].value[e]) + widen(y[h].value[e]));
            }
          }
          if (live(j, h)) *reinterpret_cast<uint32_t*>(to + 8 * h) = y[h].word;
        }
      }
    }
  };

  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) arrive_at(empty_at + slot * 8);
  };
  const uint64_t weight_at = descriptor(w_ring + warp / 4 * (kWeightBytes / 2)), x_at = descriptor(x_ring);
  wait_for_predecessor();
  int slot = 0, parity = 0;
  for (int stage = first; stage < first + count;) {
    const int tile = stage / deal.steps, step = stage % deal.steps;
    const int run = min(deal.steps - step, first + count - stage);
    int before = 0;
    pin(sums);
    for (int i = 0; i < run; ++i) {
      wait_parity(full_at + slot * 8, parity);
      wgmma_fence();
      const uint64_t w = weight_at + slot * (kWeightBytes >> 4), x = x_at + slot * (kXBytes >> 4);
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) wgmma<T, N>(sums, w + k * 2, x + k * 2, i + k > 0);
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        release(before);
      }
      before = slot;
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
    pin(sums);
    release(before);
    stage += run;
    if (run == deal.steps || gather(tile, stage == first + count)) write(tile);
  }
#endif
}

// With silu_mul groups of 8 gates and of the 8 rows that they scale take turns, so that a thread holds both of a pair.
template <typename T>
BoxMap map_of_weight(const Linear& p) {
  const int64_t inner = p.inner, outer = p.outer;
  if (!p.silu_mul) return box_map<T, 2>(p.weight, {inner, outer}, {inner}, {kStep, kTile});
  return box_map<T, 4>(p.weight, {inner, 8, 2, outer / 16}, {inner, outer / 2 * inner, 8 * inner},
                       {kStep, 8, 2, kTile / 16});
}

template <typename T, int N, int kStages>
void launch(const Linear& p, bool overlap, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<N, kStages>();
  static_assert(kBytes <= 226 * 1024);
  const auto kernel = linear_kernel<T, N, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "linear");
  const int32_t outputs = p.silu_mul ? p.outer / 2 : p.outer, span = p.silu_mul ? kTile / 2 : kTile;
  Deal deal{(outputs + span - 1) / span, (p.inner + kStep - 1) / kStep, p.workers};
  const int64_t stages = static_cast<int64_t>(deal.tiles) * deal.steps;
  deal.workers = static_cast<int32_t>(std::min<int64_t>(p.workers, stages));
  if ((stages + 1) * deal.workers > UINT32_MAX) {
    throw std::invalid_argument("linear: expected a weight of fewer than 2^32 / workers boxes of 128 x 64, got [" +
                                std::to_string(p.outer) + ", " + std::to_string(p.inner) + "]; split its rows");
  }
  const BoxMap weight = map_of_weight<T>(p);
  const BoxMap x = box_map<T, 2>(p.x, {p.inner, p.rows}, {p.rows == 1 ? p.inner : p.x_stride}, {kStep, N});
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(deal.workers);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, weight, x, p, deal), "linear");
}

// As many stages as fit.
template <typename T>
void launch_rows(const Linear& p, bool overlap, cudaStream_t stream) {
  if (p.rows <= 8) return launch<T, 8, 12>(p, overlap, stream);
  if (p.rows <= 16) return launch<T, 16, 12>(p, overlap, stream);
  if (p.rows <= 32) return launch<T, 32, 11>(p, overlap, stream);
  if (p.rows <= 64) return launch<T, 64, 9>(p, overlap, stream);
  if (p.rows <= 128) return launch<T, 128, 7>(p, overlap, stream);
  launch<T, 256, 4>(p, overlap, stream);
}

int32_t padded_rows(int32_t rows) {
  for (int32_t padded = 8; padded < kRowsPerLaunch; padded *= 2) {
    if (rows <= padded) return padded;
  }
  return kRowsPerLaunch;
}

}  // namespace

int64_t linear_partials(int32_t rows, int32_t workers) {
  return static_cast<int64_t>(workers) * 2 * kTile * padded_rows(rows) * sizeof(float);
}

int64_t linear_counters(int32_t outer) { return (outer / (kTile / 2) + 1) * static_cast<int64_t>(sizeof(uint32_t)); }

void linear(const Linear& product, int32_t dtype, bool overlap, uint64_t stream) {
  const int64_t outputs = product.silu_mul ? product.outer / 2 : product.outer;
  for (int32_t row = 0; row < product.rows; row += kRowsPerLaunch) {
    Linear part = product;
    part.rows = std::min(product.rows - row, kRowsPerLaunch);
    part.x = static_cast<const char*>(product.x) + row * product.x_stride * 2;
    if (product.base) part.base = static_cast<const char*>(product.base) + row * product.base_stride * 2;
    part.out = static_cast<char*>(product.out) + row * outputs * 2;
    if (dtype == 1) {
      launch_rows<__nv_bfloat16>(part, overlap, as_stream(stream));
    } else {
      launch_rows<__half>(part, overlap, as_stream(stream));
    }
  }
}

}  // namespace tlt::cuda
