// What every kernel here uses: launch checks, reductions within a warp, order-preserving keys, 16-byte loads.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tlt::cuda {

constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

inline const char* remedy(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
      return "; no usable GPU or driver: look at nvidia-smi, or pass CPU tensors";
    case cudaErrorNoKernelImageForDevice:
      return "; built for other GPUs: rebuild with TLT_CUDA_ARCHITECTURES set to this one's";
    default:
      return "; if an earlier kernel failed, CUDA_LAUNCH_BLOCKING=1 names it";
  }
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": expected success, got " + cudaGetErrorName(error) + " (" +
                             cudaGetErrorString(error) + ")" + remedy(error));
  }
}

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline cudaStream_t as_stream(uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Larger float, larger key; equal floats (-0 and +0 too) have equal keys, NaN lies beyond the infinities.
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ float warp_max(float x) { return from_key(__reduce_max_sync(kAll, ordered_key(x))); }

// The tree of this sum is fixed, so equal inputs give equal bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // 2 ulp
  return y;
#else
  return exp2f(x);
#endif
}

// Starts a copy of 16 bytes to shared memory; the thread that started it sees them after copies_done().
__device__ __forceinline__ void start_copy(uint4* to, const uint4* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
#else
  *to = *from;
#endif
}

__device__ __forceinline__ void copies_done() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Counts one up and returns what stood there. What its block has written before the barrier in front of it is seen by
// all who find it counted, behind a barrier of their own.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
#ifdef __CUDA_ARCH__
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
#else
  return atomicAdd(counter, 1u);
#endif
}

// Eight neighbouring logits as they lie in memory: one or two 16-byte loads.
template <typename T>
struct Raw8 {
  uint4 q[sizeof(T) / 2];
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T negative_infinity();
template <>
__device__ __forceinline__ float negative_infinity<float>() { return __uint_as_float(0xff800000u); }
template <>
__device__ __forceinline__ __half negative_infinity<__half>() { return __ushort_as_half(0xfc00); }
template <>
__device__ __forceinline__ __nv_bfloat16 negative_infinity<__nv_bfloat16>() { return __ushort_as_bfloat16(0xff80); }

// Logits 8 * group .. 8 * group + 7 of a row of n; -inf beyond n. aligned: the row starts at a 16-byte border.
template <typename T>
__device__ __forceinline__ Raw8<T> load8(const T* row, int group, int n, bool aligned) {
  Raw8<T> raw;
  if (aligned && group * 8 + 8 <= n) {
    const uint4* source = reinterpret_cast<const uint4*>(row + group * 8);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.q[i] = __ldg(source + i);
    return raw;
  }
  T* out = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = group * 8 + i < n ? row[group * 8 + i] : negative_infinity<T>();
  return raw;
}

// bf16 is the upper half of fp32: one shift or mask each, where the conversion takes two instructions.
__device__ __forceinline__ void unpack8(const Raw8<__nv_bfloat16>& raw, float (&x)[8]) {
  const uint32_t pairs[4] = {raw.q[0].x, raw.q[0].y, raw.q[0].z, raw.q[0].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

template <typename T>
__device__ __forceinline__ void unpack8(const Raw8<T>& raw, float (&x)[8]) {
  const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = widen(values[i]);
}

// x[i] for a run-time i without a trip through local memory.
template <typename V>
__device__ __forceinline__ V pick8(const V (&x)[8], int i) {
  V out = x[0];
#pragma unroll
  for (int j = 1; j < 8; ++j) out = i == j ? x[j] : out;
  return out;
}

}  // namespace tlt::cuda
