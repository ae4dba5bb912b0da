// Reductions, scans and a sort over one block of kBlock threads. Fixed order throughout: equal inputs, equal bits.
#pragma once
#include "common.cuh"

namespace tlt::cuda {

constexpr int kBlock = 512;
constexpr int kBlockWarps = kBlock / 32;
constexpr int kBins = 2048;  // also the longest list that block_sort takes: 4 entries a thread
constexpr int kCounted = 256;  // of which so many are sorted by counting

__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();  // the scratch of the call before has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < kBlockWarps; ++i) total += scratch[i];
  return total;
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float top = scratch[0];
  for (int i = 1; i < kBlockWarps; ++i) top = fmaxf(top, scratch[i]);
  return top;
}

// values [kBins] become their inclusive prefix sums. Barriers before and after.
template <typename V>
__device__ __forceinline__ void block_scan(V* values, V* scratch) {
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  V v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = values[threadIdx.x * 4 + i] + (i ? v[i - 1] : V(0));
  V run = v[3];
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const V below = __shfl_up_sync(kAll, run, offset);
    if (lane >= offset) run += below;
  }
  if (lane == 31) scratch[warp] = run;
  V before = __shfl_up_sync(kAll, run, 1);
  if (lane == 0) before = V(0);
  __syncthreads();
  V earlier = V(0);
  for (int i = 0; i < warp; ++i) earlier += scratch[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[threadIdx.x * 4 + i] = earlier + before + v[i];
  __syncthreads();
}

// The first index of an ascending array [n] with values[i] + offset >= need, or n. Every thread gets it.
template <typename V>
__device__ __forceinline__ int block_first(const V* values, int n, V offset, V need, int* found) {
  __syncthreads();
  if (threadIdx.x == 0) *found = n;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kBlock) {
    if (values[i] + offset >= need && (i == 0 || values[i - 1] + offset < need)) atomicMin(found, i);
  }
  __syncthreads();
  return *found;
}

// Sorts list[n] in shared memory, largest first; entries differ, and the list has room for n rounded up to a power of
// two. Short ones by counting, two barriers; long ones bitonically.
__device__ __forceinline__ void block_sort(uint64_t* list, int n) {
  if (n <= kCounted) {
    const uint64_t mine = threadIdx.x < n ? list[threadIdx.x] : 0;
    int larger = 0;
    if (threadIdx.x < n) {
      for (int i = 0; i < n; ++i) larger += list[i] > mine;
    }
    __syncthreads();
    if (threadIdx.x < n) list[larger] = mine;
    __syncthreads();
    return;
  }
  int padded = 32;
  while (padded < n) padded *= 2;
  for (int i = n + threadIdx.x; i < padded; i += kBlock) list[i] = 0;
  for (int run = 2; run <= padded; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < padded / 2; i += kBlock) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const bool descending = (low & run) == 0;
        const uint64_t a = list[low], b = list[high];
        if ((a < b) == descending) list[low] = b, list[high] = a;
      }
    }
  }
  __syncthreads();
}

// A score and its id as one word whose order is (score, lower id first).
__device__ __forceinline__ uint64_t pack_entry(float score, int id) {
  return static_cast<uint64_t>(ordered_key(score)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ float entry_score(uint64_t entry) { return from_key(static_cast<uint32_t>(entry >> 32)); }

__device__ __forceinline__ int entry_id(uint64_t entry) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(entry));
}

}  // namespace tlt::cuda
