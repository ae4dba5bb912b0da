#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "common.cuh"
#include "linear_schedule.h"

// One worker a multiprocessor streams its run of the weight through a ring in shared memory and multiplies with
// m16n8k16: 16 rows of the weight by 8 rows of x. One thread asks the copy engine (TMA) for whole boxes, eight warps
// multiply. The next kernel's workers move in as this one's leave: they ask for their first stages of the weight, 190
// KB each, before they wait for this one's last sums, so that memory stays busy across dependent products.
//
// Measured on an H200, products of 28 layers and the head of a 7B model in one graph, 1 / 16 rows, ms: 3.89 / 3.97 with
// this ring, 3.80 / 3.87 with one of half the size, so that two kernels stand side by side; with norms and rope between
// the products, which then find no room, that came to 4.15 / 6.07. With the half ring, copies of the weight without
// promotion to 256 bytes in L2 took 3.65 / 3.74 (taken over here), without evict-first 4.37 / 4.51. Copies by the
// threads themselves (cp.async) took 5.4 / 5.9. cuBLAS: 3.95 / 4.00.
//
// The order of k within a sum is free as long as both factors agree: 8 consecutive k of a row (16 bytes) serve a thread
// as its fragments of two products.
//
// A row's bits do not depend on the other rows: each column of a product is its own sum, and neither the deal nor the
// order in which partial sums are added knows R.

#pragma nv_diag_suppress 177  // the pass for GPUs before compute capability 9.0 leaves the kernel empty

namespace tlt::cuda {
namespace {

// A box copy's description, filled in by the driver; the driver's header stays out, as nothing here links the driver.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

constexpr int kWarps = 8, kConsumers = kWarps * 32, kThreads = kConsumers + 32;  // the last warp copies
constexpr int kBoxK = 64, kBoxRows = 64;         // 128 bytes a row: the widest swizzle
constexpr int kWeightBytes = kTile * kStep * 2;  // of a stage
static_assert(kTile == 2 * kBoxRows && kTile == kWarps * 16 && kStep % kBoxK == 0);

template <int kNTiles, int kStages>
constexpr int shared_bytes() {
  return kStages * (kWeightBytes + kNTiles * 8 * kStep * 2) + 1024;  // and what aligns it
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, int k, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(k), "r"(row), "r"(barrier)
      : "memory");
}

// The weight is read once: it must not push x, the partial sums and the KV cache out of L2.
__device__ __forceinline__ void copy_box_once(uint32_t to, const TensorMap& map, int k, int row, uint32_t barrier,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(k), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename T>
__device__ __forceinline__ void multiply(float4& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// The row of 8 that stands at place i of a fragment. Neighbouring places are 4 rows apart: the swizzle then puts what
// eight threads read at once on different banks.
__device__ __forceinline__ int physical(int i) { return (i & 1) * 4 + i / 2; }

// kNTiles: tiles of 8 rows of x, dealt to kAlongN columns of warps. Grid: workers * groups, the groups (of 8 kNTiles
// rows) of a worker side by side, so that all but the first find its part of the weight in L2.
template <typename T, int kNTiles, int kAlongN, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    linear_kernel(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map,
                  const Linear p, const Deal deal, const int32_t groups) {
#if __CUDA_ARCH__ >= 900
  constexpr int kAlongM = kWarps / kAlongN, kM = 8 / kAlongM, kN = kNTiles / kAlongN, kXRows = kNTiles * 8;
  constexpr int kXBytes = kXRows * kStep * 2, kPanels = kStep / kBoxK, kBoxBytes = kBoxK * kBoxRows * 2;
  extern __shared__ unsigned char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ bool finishes;
  unsigned char* const ring = unaligned + (-shared_address(unaligned) & 1023);  // the swizzle follows the address
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int group = blockIdx.x % groups, worker = blockIdx.x / groups;
  const int row0 = group * kXRows, rows = min(p.rows - row0, kXRows);
  const int first = deal.first_stage(worker), count = deal.first_stage(worker + 1) - first;
  const uint32_t w_ring = shared_address(ring), x_ring = w_ring + kStages * kWeightBytes;
  const uint32_t full_at = shared_address(full), empty_at = shared_address(empty);
  // A tile of outputs spans so many features; with silu_mul its second box holds what the first one's gates scale.
  const int span = p.silu_mul ? kTile / 2 : kTile, outputs = p.silu_mul ? p.outer / 2 : p.outer;
  if (tid == 0) {
    for (int i = 0; i < kStages; ++i) {
      start_barrier(full_at + i * 8, 1);
      start_barrier(empty_at + i * 8, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == kWarps) {
    if (lane != 0) return;
    const uint64_t policy = once_policy();
    const auto copy_weight = [&](int slot, int stage) {
      const int tile = stage / deal.steps, step = stage % deal.steps, barrier = full_at + slot * 8;
      expect(barrier, kWeightBytes + kXBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int k = step * kStep + panel * kBoxK;
        const uint32_t to = w_ring + slot * kWeightBytes + panel * 2 * kBoxBytes;
        copy_box_once(to, weight_map, k, tile * span, barrier, policy);
        copy_box_once(to + kBoxBytes, weight_map, k, tile * span + (p.silu_mul ? outputs : kBoxRows), barrier, policy);
      }
    };
    const auto copy_x = [&](int slot, int stage) {
      const int step = stage % deal.steps;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_box(x_ring + slot * kXBytes + panel * kXRows * kBoxK * 2, x_map, step * kStep + panel * kBoxK, row0,
                 full_at + slot * 8);
      }
    };
    const int ahead = min(count, kStages);
    for (int i = 0; i < ahead; ++i) copy_weight(i, first + i);
    start_dependents();
    wait_for_predecessor();
    for (int i = 0; i < ahead; ++i) copy_x(i, first + i);
    int slot = 0, parity = 0;
    for (int i = kStages; i < count; ++i) {
      await(empty_at + slot * 8, parity);
      copy_weight(slot, first + i);
      copy_x(slot, first + i);
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    return;
  }

  const int g = lane / 4, t = lane % 4, row8 = physical(g);
  const int m0 = warp / kAlongN * kM, j0 = warp % kAlongN * kN;
  const int word = row8 * 128 + (t ^ row8) * 16;  // of this thread in 8 rows of a box; 32 k on, it is ^ 64
  const auto feature = [&](int tile, int m, int half) {
    return tile * span + (p.silu_mul ? m * 8 : m * 16 + half * 8) + row8;
  };
  const int m_rows = p.silu_mul ? 8 : 16, half_rows = p.silu_mul ? kBoxRows : 8;
  float4 sums[kM][kN];
  const auto clear = [&]() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kN; ++j) sums[m][j] = make_float4(0, 0, 0, 0);
    }
  };
  clear();
  const auto accumulate = [&](int slot) {
#pragma unroll
    for (int c = 0; c < kStep / 32; ++c) {
      const int at = word ^ (c % 2 * 64);
      const unsigned char* const w = ring + slot * kWeightBytes + c / 2 * 2 * kBoxBytes + at;
      const unsigned char* const xs =
          ring + kStages * kWeightBytes + slot * kXBytes + (c / 2 * kXRows + j0 * 8) * 128 + at;
      uint4 a[kM][2], b[kN];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[m][half] = *reinterpret_cast<const uint4*>(w + ((m0 + m) * m_rows + half * half_rows) * 128);
        }
      }
#pragma unroll
      for (int j = 0; j < kN; ++j) b[j] = *reinterpret_cast<const uint4*>(xs + j * 8 * 128);
      // All first halves, then all second ones: a product waits 33 cycles for the one before it in its own sum.
#pragma unroll
      for (int i = 0; i < kM * kN; ++i) {
        const int m = i % kM, j = i / kM;
        multiply<T>(sums[m][j], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b[j].x, b[j].y);
      }
#pragma unroll
      for (int i = 0; i < kM * kN; ++i) {
        const int m = i % kM, j = i / kM;
        multiply<T>(sums[m][j], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b[j].z, b[j].w);
      }
    }
  };

  // Sums of unfinished tiles go to memory; the worker that comes last adds all of them in the order of k.
  const auto gather = [&](int tile) {
    constexpr int kPart = kM * kN * kConsumers;
    float4* const parts =
        reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(group) * deal.workers * 2 * kPart;
    const auto part = [&](int w) { return parts + static_cast<int64_t>(deal.slot_of(w, tile)) * kPart + tid; };
    float4* const mine = part(worker);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kN; ++j) __stcg(mine + (m * kN + j) * kConsumers, sums[m][j]);
    }
    const int from = deal.worker_of(tile * deal.steps), to = deal.worker_of((tile + 1) * deal.steps - 1);
    sync_consumers();
    if (tid == 0) {
      uint32_t* const counter = p.arrived + group * deal.tiles + tile;
      __threadfence();
      finishes = atomicAdd(counter, 1u) == static_cast<uint32_t>(to - from);
      if (finishes) *counter = 0;
      __threadfence();
    }
    sync_consumers();
    if (!finishes) return false;
    clear();
#pragma unroll (kM * kN > 4 ? 1 : 4)
    for (int w = from; w <= to; ++w) {
      const float4* const theirs = part(w);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const float4 v = __ldcg(theirs + (m * kN + j) * kConsumers);
          sums[m][j].x += v.x;
          sums[m][j].y += v.y;
          sums[m][j].z += v.z;
          sums[m][j].w += v.w;
        }
      }
    }
    return true;
  };

  const T* const bias = static_cast<const T*>(p.bias);
  const T* const base = static_cast<const T*>(p.base) + row0 * p.base_stride;
  T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(row0) * outputs;
  const auto write = [&](int tile) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float values[4] = {sums[m][j].x, sums[m][j].y, sums[m][j].z, sums[m][j].w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = (j0 + j) * 8 + physical(t * 2 + i);
          if (row >= rows) continue;
          if (p.silu_mul) {
            const int n = feature(tile, m0 + m, 0);
            if (n >= outputs) continue;
            const float gate = widen(narrow<T>(values[i] + (bias ? widen(bias[n]) : 0.0f)));
            const float up = widen(narrow<T>(values[i + 2] + (bias ? widen(bias[n + outputs]) : 0.0f)));
            const float silu = widen(narrow<T>(gate / (1.0f + __expf(-gate))));
            out[static_cast<int64_t>(row) * outputs + n] = narrow<T>(silu * up);
            continue;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int n = feature(tile, m0 + m, half);
            if (n >= outputs) continue;
            T y = narrow<T>(values[i + 2 * half] + (bias ? widen(bias[n]) : 0.0f));
            if (p.base) y = narrow<T>(widen(base[row * p.base_stride + n]) + widen(y));
            out[static_cast<int64_t>(row) * outputs + n] = y;
          }
        }
      }
    }
  };

  wait_for_predecessor();
  int tile = first / deal.steps, step = first % deal.steps, slot = 0, parity = 0;
  bool whole = step == 0;
  for (int i = 0; i < count; ++i) {
    await(full_at + slot * 8, parity);
    accumulate(slot);
    __syncwarp();
    if (lane == 0) arrive(empty_at + slot * 8);
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
    const bool ends = ++step == deal.steps;
    if (ends || i + 1 == count) {
      if ((whole && ends) || gather(tile)) write(tile);
      clear();
      whole = true;
    }
    if (ends) {
      step = 0;
      ++tile;
    }
  }
#endif
}

// cuTensorMapEncodeTiled as CUDA 12.0 declares it, enumerations as ints.
using Encode = int (*)(TensorMap* map, int type, uint32_t rank, void* data, const uint64_t* sizes,
                       const uint64_t* strides, const uint32_t* box, const uint32_t* element_steps, int interleave,
                       int swizzle, int promotion, int fill);
constexpr int kHalf = 6, kBfloat16 = 9;  // CUtensorMapDataType
constexpr int kSwizzle128 = 3;           // CUtensorMapSwizzle; of the other enumerations 0, "none", is used

// Found at run time.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "linear");
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error("linear: expected a driver with cuTensorMapEncodeTiled, got none; update it to CUDA 12");
    }
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// [rows, columns] at `data`, copied in boxes of box_rows x kBoxK; elements beyond the borders read as zero.
template <typename T>
TensorMap map_of(const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  TensorMap map;
  const uint64_t sizes[2] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)};
  const uint64_t strides[1] = {static_cast<uint64_t>(stride) * sizeof(T)};
  const uint32_t box[2] = {kBoxK, static_cast<uint32_t>(box_rows)}, element_steps[2] = {1, 1};
  const int result = encoder()(&map, std::is_same_v<T, __half> ? kHalf : kBfloat16, 2, const_cast<void*>(data), sizes,
                               strides, box, element_steps, 0, kSwizzle128, 0, 0);
  if (result != 0) {
    throw std::runtime_error("linear: expected rows and strides of a multiple of 16 bytes, got CUresult " +
                             std::to_string(result) + " from cuTensorMapEncodeTiled");
  }
  return map;
}

template <typename T, int kNTiles, int kAlongN, int kStages>
void launch(const Linear& p, bool overlap, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<kNTiles, kStages>();
  const auto kernel = linear_kernel<T, kNTiles, kAlongN, kStages>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "linear");
  const int32_t span = p.silu_mul ? kTile / 2 : kTile, outputs = p.silu_mul ? p.outer / 2 : p.outer;
  Deal deal{(outputs + span - 1) / span, (p.inner + kStep - 1) / kStep, p.workers};
  deal.workers = static_cast<int32_t>(std::min<int64_t>(p.workers, static_cast<int64_t>(deal.tiles) * deal.steps));
  const int32_t groups = (p.rows + kNTiles * 8 - 1) / (kNTiles * 8);
  const TensorMap weight = map_of<T>(p.weight, p.outer, p.inner, p.inner, kBoxRows);
  const TensorMap x = map_of<T>(p.x, p.rows, p.inner, p.rows == 1 ? p.inner : p.x_stride, kNTiles * 8);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(deal.workers * groups);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, weight, x, p, deal, groups), "linear");
}

template <typename T>
void launch_rows(const Linear& p, bool overlap, cudaStream_t stream) {
  if (p.rows <= 8) return launch<T, 1, 1, 12>(p, overlap, stream);
  if (p.rows <= 16) return launch<T, 2, 1, 11>(p, overlap, stream);
  if (p.rows <= 32) return launch<T, 4, 1, 10>(p, overlap, stream);
  if (p.rows <= 64) return launch<T, 8, 1, 8>(p, overlap, stream);
  launch<T, 16, 2, 6>(p, overlap, stream);
}

int32_t padded_rows(int32_t rows) {
  const int32_t one = std::min(rows, kRowsPerLaunch);
  return one <= 8 ? 8 : one <= 16 ? 16 : one <= 32 ? 32 : one <= 64 ? 64 : (one + 127) / 128 * 128;
}

}  // namespace

int64_t linear_partials(int32_t rows, int32_t workers) {
  return static_cast<int64_t>(workers) * 2 * kTile * padded_rows(rows) * sizeof(float);
}

int64_t linear_counters(int32_t rows, int32_t outer) {
  const int64_t groups = (padded_rows(rows) + 127) / 128, tiles = outer / (kTile / 2) + 1;
  return groups * tiles * sizeof(uint32_t);
}

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
