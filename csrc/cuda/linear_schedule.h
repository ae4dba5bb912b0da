// Which part of a product a block of threads computes. Host and device, no CUDA types, so that a CPU test can walk it.
//
// The weight is cut into tiles of 128 rows, a tile's K into steps of 64. All (tile, step) pairs in order are dealt out
// in equal runs, one run a worker ("stream-K", arXiv 2301.03598): each reads the same bytes, whatever N and K are. The
// deal depends on N, K and the number of workers only, never on the rows of x, so neither does the order of any sum.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define TLT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TLT_HOST_DEVICE inline
#endif

namespace tlt::cuda {

constexpr int kTile = 128;  // rows of the weight
constexpr int kStep = 64;   // of K

// (tiles * steps + 1) * workers must be below 2^32: a division of 64 bits takes four times as long.
struct Deal {
  int32_t tiles, steps, workers;

  TLT_HOST_DEVICE int32_t first_stage(int32_t worker) const {
    return static_cast<int32_t>(static_cast<uint32_t>(worker) * tiles * steps / workers);
  }
  // The worker whose run holds `stage`.
  TLT_HOST_DEVICE int32_t worker_of(int32_t stage) const {
    const uint32_t stages = static_cast<uint32_t>(tiles) * steps;
    return static_cast<int32_t>(((static_cast<uint32_t>(stage) + 1) * workers - 1) / stages);
  }
  // Where a worker's sum of an unfinished tile lies: it has at most two, the one it starts in and the one it ends in.
  TLT_HOST_DEVICE int32_t slot_of(int32_t worker, int32_t tile) const {
    return 2 * worker + (tile != first_stage(worker) / steps ? 1 : 0);
  }
};

}  // namespace tlt::cuda
