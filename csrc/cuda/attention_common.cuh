// What both sets of attention kernels use: asynchronous copies, dependent launches, the schedule's records.
//
// Why not Triton (attention_kernels.py, which serves every other shape): at 67 MB a layer its 28 to 42 us were 16 us of
// reading and 12 to 26 of starting, draining and merging. Programmatic dependent launch hides most of that: the merge
// starts while the last items run, and with `early` an item asks for its first keys before the kernel in front has
// ended. `early` is the caller's word that the schedule, the page table and the committed keys were complete when
// that kernel *started*; q and the step's own keys are read after it has ended.
#pragma once
#include "attention.h"
#include "common.cuh"

namespace tlt::cuda {
namespace {

constexpr int kDim = 128, kChunks = kDim / 8;  // chunks of 16 bytes
constexpr float kNone = -INFINITY;

__device__ __forceinline__ void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// group: 0 to 3. Barriers by number, as racecheck has followed them (bench/LOG.md); from a register it has not.
template <int kThreads>
__device__ __forceinline__ void sync_group(int group) {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    switch (group) {
      case 0: asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); break;
      case 1: asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); break;
      case 2: asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory"); break;
      default: asm volatile("bar.sync 4, %0;" ::"n"(kThreads) : "memory"); break;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}

__device__ __forceinline__ float finite(float top) { return top == kNone ? 0.0f : top; }

struct Item {
  int request, node, begin, end, splits, split, first_row, nodes, prefix;
  bool chunked;
};

__device__ __forceinline__ Item read_item(const int32_t* items, int index) {
  const int4 a = reinterpret_cast<const int4*>(items)[index * 2], b = reinterpret_cast<const int4*>(items)[index * 2 + 1];
  return {a.x, a.y, a.z, a.w, b.x & 0xffff, b.x >> 16, b.y, b.z >> 1, b.w, (b.z & 1) != 0};
}

// Row m of an item's tile is query head m % group of node m / group.
struct TileRows {
  const AttentionArgs& a;
  const Item& item;
  int head;

  __device__ __forceinline__ int node(int m) const { return item.node + m / a.group; }
  __device__ __forceinline__ bool live(int m) const { return m / a.group < a.nodes_per_tile && node(m) < item.nodes; }
  __device__ __forceinline__ int64_t offset(int m, int64_t row_stride) const {
    return (item.first_row + node(m)) * row_stride + static_cast<int64_t>(head * a.group + m % a.group) * kDim;
  }
};

// Which of the step's own keys a row sees.
struct Sight {
  uint64_t low, high;
  int node, nodes;
  bool chunked;

  Sight() = default;
  __device__ __forceinline__ Sight(const TileRows& rows, int m) : nodes(rows.item.nodes), chunked(rows.item.chunked) {
    node = min(rows.node(m), nodes - 1);
    const int64_t* words = rows.a.ancestors + (rows.item.first_row + node) * 2ll;
    low = words[0], high = words[1];
  }
  // own: index of a key among the step's own; negative: committed. Without branches: a block asks 32 times a thread.
  __device__ __forceinline__ bool sees(int own) const {
    const bool ancestor = static_cast<bool>((own < 64 ? low : high) >> (own & 63) & 1) & (own < 128);
    return (own < 0) | ((own < nodes) & (chunked ? own <= node : ancestor));
  }
};

// Launches that may start before the kernel in front of them has ended.
inline void launch_dependent(const void* kernel, dim3 grid, int threads, int bytes, const AttentionArgs& a,
                             cudaStream_t stream, const char* name, int extra = 0) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  void* arguments[] = {const_cast<AttentionArgs*>(&a), &extra};  // as many as the kernel declares are read
  check(cudaLaunchKernelExC(&config, kernel, arguments), name);
}

}  // namespace
}  // namespace tlt::cuda
