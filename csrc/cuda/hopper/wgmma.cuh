// Attention's warpgroup products (wgmma) with one factor in registers, its boxes, and what a cluster's blocks share.
#pragma once
#include <type_traits>

#include "cuda/hopper/tma.cuh"
#include "cuda/hopper/warpgroup.cuh"

namespace tlt::cuda {
namespace {

__device__ __forceinline__ uint64_t read_again_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_box(uint32_t to, const BoxMap& map, int z, int w, int v, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(0), "r"(z), "r"(w), "r"(v), "r"(barrier),
      "l"(policy)
      : "memory");
}

__device__ __forceinline__ void fetch_map(const BoxMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void show_to_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Groups of 8 keys by 64 of D, 1024 bytes each, whose 16-byte chunks are permuted by key % 8; the two halves of D lie
// side by side. Serves K (D contiguous), whose product takes half of D and does not read the first distance, and V (D
// contiguous, transposed by the instruction).
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  constexpr uint64_t halves = 1024 >> 4, groups = 2048 >> 4, swizzle_128 = 1;
  return ((at & 0x3ffff) >> 4) | halves << 16 | groups << 32 | swizzle_128 << 62;
}

#define TLT_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TLT_D32(d, i) TLT_D8(d, i), TLT_D8(d, i + 8), TLT_D8(d, i + 16), TLT_D8(d, i + 24)
#define TLT_N32                                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"

// d [64 rows, 64 keys] (+)= a [64, 16] * b [16, 64], b row by row (K).
template <typename T>
__device__ __forceinline__ void multiply_keys(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
#define TLT_WGMMA(TYPE)                                                                                              \
  asm volatile(                                                                                                      \
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" TLT_N32 \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}\n"                                                                 \
      : TLT_D32(d, 0)                                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
  if constexpr (std::is_same_v<T, __half>) {
    TLT_WGMMA("f16");
  } else {
    TLT_WGMMA("bf16");
  }
#undef TLT_WGMMA
}

// d [64 rows, 128 columns] += a [64, 16 keys] * b [16 keys, 128], b column by column (V).
template <typename T>
__device__ __forceinline__ void multiply_values(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#define TLT_WGMMA(TYPE)                                                                                          \
  asm volatile(                                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" TLT_N32                                  \
      ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "   \
      "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"    \
      : TLT_D32(d, 0), TLT_D32(d, 32)                                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (std::is_same_v<T, __half>) {
    TLT_WGMMA("f16");
  } else {
    TLT_WGMMA("bf16");
  }
#undef TLT_WGMMA
}
#undef TLT_D8
#undef TLT_D32
#undef TLT_N32

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for the threads of the cluster that have not exited; what they wrote to shared memory is then seen by all.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Nobody leaves while others read its shared memory. Orders nothing else: a fence would wait for the rows written.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The address of `at` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t in_block(uint32_t at, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

__device__ __forceinline__ float load_float(uint32_t at) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ float4 load_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_floats(uint32_t at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_float(uint32_t at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

}  // namespace
}  // namespace tlt::cuda
