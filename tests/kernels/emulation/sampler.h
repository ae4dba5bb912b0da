// What the sampler's kernels need beside emulated.h: conversions, reductions, atomics, launches of a plane of blocks.
#pragma once
#include <type_traits>
#include <utility>

#include "emulated.h"

#define __grid_constant__
#define __noinline__ __attribute__((noinline))

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

using cudaError_t = int;
enum { cudaSuccess, cudaErrorInsufficientDriver, cudaErrorNoDevice, cudaErrorNoKernelImageForDevice };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(int) { return ""; }
inline const char* cudaGetErrorString(int) { return ""; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline __half __ushort_as_half(unsigned short x) { return bits_as<__half>(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half2 {
  __half x, y;
};
inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float as_float(__half x) { return static_cast<float>(x); }
template <typename V>
V larger(V a, V b, bool keep_nan) {
  const float x = as_float(a), y = as_float(b);
  if (x != x) return keep_nan ? a : b;
  if (y != y) return keep_nan ? b : a;
  return x > y ? a : b;
}
template <typename Pair>
Pair __hmax2(Pair a, Pair b) { return {larger(a.x, b.x, false), larger(a.y, b.y, false)}; }
template <typename Pair>
Pair __hmax2_nan(Pair a, Pair b) { return {larger(a.x, b.x, true), larger(a.y, b.y, true)}; }

template <typename V>
V __ldg(const V* at) { return *at; }
template <typename V>
V __ldcg(const V* at) { return *at; }
inline void __threadfence() {}

template <typename Combine>
uint32_t reduce(uint32_t x, Combine combine) {
  emulated::Lane mine{};
  mine.words[0] = x;
  const emulated::Lane* all = emulated::exchange(mine);
  uint32_t out = all[0].words[0];
  for (int i = 1; i < 32; ++i) out = combine(out, all[i].words[0]);
  return out;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  return reduce(x, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t x) {
  return reduce(x, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t x) {
  return reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t x) {
  return reduce(x, [](uint32_t a, uint32_t b) { return a | b; });
}
inline int __syncthreads_or(int x) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= x != 0;
  __syncthreads();
  return any;
}

inline int __syncthreads_count(int x) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += x != 0;
  __syncthreads();
  return count;
}
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint64_t>(x) * y >> 32; }

template <typename V>
V atomicCAS(V* at, V old, V x) { return *at == old ? std::exchange(*at, x) : *at; }
template <typename V, typename W>
V atomicAdd(V* at, W x) { return *at += x, *at - static_cast<V>(x); }
template <typename V, typename W>
V atomicOr(V* at, W x) { return std::exchange(*at, *at | x); }
template <typename V, typename W>
V atomicMax(V* at, W x) { return std::exchange(*at, std::max<V>(*at, x)); }
template <typename V, typename W>
V atomicMin(V* at, W x) { return std::exchange(*at, std::min<V>(*at, x)); }
template <typename V, typename W>
V atomicExch(V* at, W x) { return std::exchange(*at, static_cast<V>(x)); }

namespace emulated {

// Rows of blocks last to first, so that nothing may count on the order of a grid.
inline void launch_plane(dim3 blocks, int count, int bytes, const std::function<void()>& kernel) {
  for (unsigned i = blocks.x * blocks.y; i-- > 0;) {
    launch(1, count, bytes, [&] {
      blockIdx = {i % blocks.x, i / blocks.x, 0}, gridDim = blocks;
      kernel();
    });
  }
}
inline void launch_plane(int blocks, int count, int bytes, const std::function<void()>& kernel) {
  launch_plane(dim3{static_cast<unsigned>(blocks), 1, 1}, count, bytes, kernel);
}

}  // namespace emulated
