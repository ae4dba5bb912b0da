// Tree attention of 16-bit rows with heads of 128: attend work items, merge the parts of split tiles. Raw device
// pointers, the caller's stream. Legend: R packed rows, T tiles, W work items, M rows of a tile, D = 128.
#pragma once
#include <cstdint>

#include "sample.h"

namespace tlt::cuda {

struct AttentionArgs {
  const void* q;                    // [R, Hq, D], dense within a row
  const void *k_cache, *v_cache;    // [P, page, Hkv, D] of the strides below
  const int32_t* page_table;        // [B, table_stride]
  const int64_t* ancestors;         // [R, 2]
  const int32_t *items, *tiles;     // [W, 8] and [T, 8], written by schedule_kernel (attention_kernels.py)
  void* out;                        // [R, Hq, D] contiguous
  float *part, *stats;              // [W, Hkv, M, D] and [W, Hkv, 2, M]
  int32_t* arrivals;                // [W, Hkv, M] zeros, left as zeros; hopper only
  float scale_log2;                 // > 0
  int64_t q_row;                    // elements, as all strides
  int64_t page_stride, slot_stride, head_stride, table_stride;
  int32_t page, group, kv_heads, nodes_per_tile, max_items, max_tiles;
  int32_t block_m;                  // rows of a tile: 16, 32, 64 or 128
  int32_t hopper;                   // use hopper/attention.cu
  int32_t stages;                   // 3, 4 or 6 blocks of the ring
  int32_t pages;                    // P
  int32_t cluster;                  // blocks of a cluster, hopper only: 1 to 8
  int32_t early;                    // see attention_common.cuh
  Dtype dtype;                      // bf16 or fp16
};

void tree_attention(const AttentionArgs& args, uint64_t stream);

void attend_hopper(const AttentionArgs& args, uint64_t stream);

// How many clusters of `cluster` blocks of hopper/attention.cu the device runs at once.
int attention_clusters(int block_m, int stages, int cluster);

template <typename T>
void tree_attention_typed(const AttentionArgs& args, uint64_t stream);

}  // namespace tlt::cuda
