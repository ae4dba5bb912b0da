// The copy engine (TMA) of compute capability 9.0: descriptions of tensors, copies of boxes, the barriers they arrive at.
#pragma once
#include <type_traits>

#include "cuda/common.cuh"

namespace tlt::cuda {
namespace {

// A box copy's description, filled in by the driver; the driver's header stays out, as nothing here links the driver.
struct alignas(128) BoxMap {
  uint64_t opaque[16];
};

constexpr int kBoxColumns = 64;  // of 16 bits: 128 bytes a row, the widest swizzle

__device__ __forceinline__ uint32_t shared_at(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_2d(uint32_t to, const BoxMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_2d_once(uint32_t to, const BoxMap& map, int column, int row, uint32_t barrier,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// As copy_2d_once, of the box that begins at {column, 0, 0, outer} of four dimensions.
__device__ __forceinline__ void copy_4d_once(uint32_t to, const BoxMap& map, int column, int outer, uint32_t barrier,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(0), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}

// cuTensorMapEncodeTiled as CUDA 12.0 declares it, enumerations as ints; found at run time.
using EncodeTiled = int (*)(BoxMap* map, int type, uint32_t rank, void* data, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* element_steps, int interleave,
                            int swizzle, int promotion, int fill);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "tensor map");
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error(
          "tensor map: expected a driver with cuTensorMapEncodeTiled, got none; update it to CUDA 12");
    }
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return found;
}

// kRank dimensions of T, the innermost dense; strides of the others in elements. Elements beyond the borders read as 0.
template <typename T, int kRank>
BoxMap box_map(const void* data, const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank - 1],
               const uint32_t (&box)[kRank]) {
  constexpr int kHalfType = 6, kBfloat16Type = 9, kSwizzle128 = 3;  // of CUtensorMapDataType, CUtensorMapSwizzle
  BoxMap map;
  uint64_t counts[kRank], bytes[kRank - 1];
  uint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) counts[i] = static_cast<uint64_t>(sizes[i]), steps[i] = 1;
  for (int i = 0; i < kRank - 1; ++i) bytes[i] = static_cast<uint64_t>(strides[i]) * sizeof(T);
  const int result = encode_tiled()(&map, std::is_same_v<T, __half> ? kHalfType : kBfloat16Type, kRank,
                                    const_cast<void*>(data), counts, bytes, box, steps, 0, kSwizzle128, 0, 0);
  if (result != 0) {
    throw std::runtime_error("tensor map: expected rows and strides of a multiple of 16 bytes, got CUresult " +
                             std::to_string(result) + " from cuTensorMapEncodeTiled");
  }
  return map;
}

}  // namespace
}  // namespace tlt::cuda
