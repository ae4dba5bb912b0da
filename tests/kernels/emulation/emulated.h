// CUDA kernels on the CPU, thread by thread: a block's threads are fibers that change places where the kernel makes
// them meet. For tests of indices, masks and orders: sums of products run in fp32 in a fixed order, not as on a GPU.
//
// What helps to find races: copies to shared memory land as late as they may (at their wait), a block's threads run in
// an order that changes with `seed`, and a thread runs on until it must meet others.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after another

using std::max;
using std::min;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
using __half = _Float16;
struct __nv_bfloat16 {
  uint16_t bits;
};
using cudaStream_t = void*;

namespace emulated {

struct Meeting {  // of a warp, a block, or a named part of it
  int arrived = 0, generation = 0;
};

struct Copy {
  void* to;
  const void* from;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  const int* waits_for = nullptr;  // runs on once it differs from `waits_at`
  int waits_at = 0, index = 0, step = 0;
  bool done = false;
  std::deque<std::vector<Copy>> groups{1};
};

inline std::vector<std::unique_ptr<Thread>> threads;
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline std::vector<unsigned char> storage;
inline unsigned char* shared = nullptr;
inline Meeting block, named[16];
inline std::vector<Meeting> warps;
struct Lane {
  uint32_t words[8];
};
inline std::vector<Lane> mail;  // [warp][step % 2][lane]
inline std::function<void()> body;
inline unsigned seed = 0;
inline uint64_t meetings = 0;

inline void meet(Meeting& meeting, int expected) {
  ++meetings;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0, ++meeting.generation;
    return;
  }
  current->waits_for = &meeting.generation, current->waits_at = meeting.generation;
  swapcontext(&current->context, &scheduler);
}

inline int lane() { return current->index % 32; }

// All lanes of a warp put words; then each reads what any of them has put.
inline const Lane* exchange(const Lane& mine) {
  const int warp = current->index / 32, step = current->step++ % 2;
  Lane* const all = &mail[(warp * 2 + step) * 32];
  all[lane()] = mine;
  meet(warps[warp], 32);
  return all;
}

inline void entry() {
  body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

}  // namespace emulated

struct Index {
  unsigned y = 0, z = 0;
  struct {
    operator unsigned() const { return emulated::current->index; }
  } x;
};
inline Index threadIdx;
inline dim3 blockIdx{0, 0, 0}, blockDim, gridDim;

namespace emulated {

inline void launch(int blocks, int count, int bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  storage.assign(bytes + 256, 0xff);  // NaN, of any type
  shared = storage.data() + (-reinterpret_cast<uintptr_t>(storage.data()) & 127);
  gridDim = {static_cast<unsigned>(blocks), 1, 1}, blockDim = {static_cast<unsigned>(count), 1, 1};
  std::mt19937 draw(seed);
  for (int b = 0; b < blocks; ++b) {
    blockIdx = {static_cast<unsigned>(b), 0, 0};
    block = {}, std::fill(std::begin(named), std::end(named), Meeting{});
    warps.assign(count / 32, {}), mail.assign(count * 2, {});
    threads.resize(count);
    for (int i = 0; i < count; ++i) {
      if (!threads[i]) threads[i] = std::make_unique<Thread>();
      Thread& t = *threads[i];
      t.stack.resize(64 << 10);
      t.index = i, t.step = 0, t.done = false, t.waits_for = nullptr, t.groups.assign(1, {});
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
      t.context.uc_link = nullptr;
      makecontext(&t.context, entry, 0);
    }
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) order[i] = i;
    if (seed) std::shuffle(order.begin(), order.end(), draw);
    for (bool moved = true; moved;) {
      moved = false;
      for (int i : order) {
        Thread& t = *threads[i];
        if (t.done || (t.waits_for && *t.waits_for == t.waits_at)) continue;
        t.waits_for = nullptr, current = &t, moved = true;
        swapcontext(&scheduler, &t.context);
      }
    }
    for (int i = 0; i < count; ++i)
      if (!threads[i]->done) throw std::runtime_error("threads that wait for others which do not come");
  }
}

}  // namespace emulated

inline void __syncthreads() { emulated::meet(emulated::block, blockDim.x); }
inline void __syncwarp() { emulated::exchange({}); }

template <typename V>
V __shfl_sync(unsigned, V x, int from) {
  static_assert(sizeof(V) == 4);
  emulated::Lane mine{};
  std::memcpy(mine.words, &x, 4);
  V y;
  std::memcpy(&y, emulated::exchange(mine)[from & 31].words, 4);
  return y;
}
template <typename V>
V __shfl_xor_sync(unsigned mask, V x, int other) { return __shfl_sync(mask, x, emulated::lane() ^ other); }
template <typename V>
V __shfl_up_sync(unsigned mask, V x, int by) {
  const int lane = emulated::lane();
  return __shfl_sync(mask, x, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  emulated::Lane mine{};
  mine.words[0] = x;
  const emulated::Lane* all = emulated::exchange(mine);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i].words[0] << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int atomicAdd(int* at, int x) { return *at += x, *at - x; }
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<const unsigned char*>(p) - emulated::shared;
}

namespace tlt::cuda {

constexpr unsigned kAll = 0xffffffffu;
constexpr float kNone = -INFINITY;
inline float exp2_fast(float x) { return exp2f(x); }
inline float finite(float top) { return top == kNone ? 0.0f : top; }
inline void wait_for_kernel_in_front() {}
inline void let_next_kernel_start() {}
inline cudaStream_t as_stream(uint64_t) { return nullptr; }
inline void check_launch(const char*) {}

inline void copy16(uint32_t to, const void* from, bool inside) {
  emulated::current->groups.back().push_back({emulated::shared + to, inside ? from : nullptr});
}
inline void commit_copies() { emulated::current->groups.emplace_back(); }
template <int kLeft>
void wait_copies() {
  auto& groups = emulated::current->groups;
  while (static_cast<int>(groups.size()) - 1 > kLeft) {
    for (const emulated::Copy& copy : groups.front())
      copy.from ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
    groups.pop_front();
  }
}
template <int kThreads>
void sync_group(int group) {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    emulated::meet(emulated::named[group], kThreads);
  }
}

inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}
inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}

template <typename T>
uint32_t pack(float low, float high) {
  const T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  uint32_t word;
  std::memcpy(&word, pair, 4);
  return word;
}

inline void load_matrices(uint32_t (&r)[4], uint32_t at, bool transposed) {
  const emulated::Lane* all = emulated::exchange({{at}});
  const int lane = emulated::lane();
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(reinterpret_cast<char*>(&r[i]) + 2 * e, emulated::shared + all[i * 8 + row].words[0] + column * 2, 2);
    }
}
inline void load_matrix(uint32_t (&r)[4], uint32_t at) { load_matrices(r, at, false); }
inline void load_matrix_transposed(uint32_t (&r)[4], uint32_t at) { load_matrices(r, at, true); }

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulated::Lane* all = emulated::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const auto half = [](uint32_t word, int which) {
    T x;
    std::memcpy(&x, reinterpret_cast<const char*>(&word) + 2 * which, 2);
    return static_cast<float>(x);
  };
  const int lane = emulated::lane();
  for (int x = 0; x < 4; ++x) {
    const int column = lane % 4 * 2 + x % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += half(all[lane / 4 * 4 + k % 8 / 2].words[x / 2 + 2 * (k / 8)], k % 2) *
             half(all[column * 4 + k % 8 / 2].words[4 + k / 8], k % 2);
    c[x] += sum;
  }
}

}  // namespace tlt::cuda
