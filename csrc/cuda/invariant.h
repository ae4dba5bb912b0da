// Attention whose rows have the same bits whatever else a step holds. Raw device pointers, the caller's
// stream. Legend: R rows; B requests, M rows of a tile, D head dim.
#pragma once
#include <cstdint>

#include "sample.h"

namespace tlt::cuda {

// Which keys a row of position t sees, and in which order: invariant_attention.cuh.
constexpr int kSplitKeys = 512;    // of the prefix: a part each
constexpr int kStreamKeys = 128;   // of a split: its four streams, folded in order
constexpr int kRecentKeys = 192;   // recent keys of a row at most
constexpr int kRecentStream = 64;  // of the recent keys: their streams

// A planned step. All on the device, written by invariant_plan, read by every layer.
struct InvariantPlan {
  int32_t* header;  // [4]: items, the next item to take, chunk tiles, the next one of these
  int32_t* items;   // [items, 8]: see Work in invariant_attention.cuh
  int32_t* chunks;  // [chunk tiles, 8]
  int32_t* rows;    // [R, 4]: slot of split 0, row within the tile, first split | end split << 16, 1 if merged
  int32_t* recent;  // [R, kRecentKeys]: slots (page * page size + place) of the recent keys in path order
};

struct InvariantStep {
  const int32_t* page_table;  // [B, table_stride]
  const int32_t *prefix_lens, *node_indptr;
  const int64_t *ancestors, *positions;
  const uint8_t* causal;
  int64_t table_stride;
  int32_t rows, requests, page, group, window;
  int32_t nodes_per_tile;  // M / group, of trees
  int32_t chunk_nodes;     // of a tile of a chunk: a power of two that divides 64; 0: chunks are taken as trees are
  int32_t part_slots;      // splits that have a place; if a step needs more, one program folds all splits of a tile
  int32_t workers, chunk_workers;  // blocks of threads of the two attention kernels
};

void invariant_plan(const InvariantStep& step, const InvariantPlan& plan, uint64_t stream);

struct InvariantLayer {
  const void *q, *k_cache, *v_cache;  // [R, Hq, D] and [pages * page, Hkv, D], dense within a row, strides in elements
  int64_t q_row, slot_stride, head_stride;
  void* out;     // [R, Hq, D]
  float* parts;  // [part_slots, Hkv, M, D]
  float* stats;  // [part_slots, Hkv, 2, M]
  float* recent_parts;  // [R, Hq, D]
  float* recent_stats;  // [R, Hq, 2]
  float scale_log2;
  int32_t kv_heads, head_dim, block_m;  // 64 or 128; 16, 32 or 64
  // Nonzero: committed keys, the plan and the page table were complete when the kernel in front of this one started.
  int32_t early;
  Dtype dtype;
};

void invariant_attention(const InvariantStep& step, const InvariantPlan& plan, const InvariantLayer& layer,
                         uint64_t stream);

template <typename T>
void invariant_attention_typed(const InvariantStep& step, const InvariantPlan& plan, const InvariantLayer& layer,
                               uint64_t stream);

}  // namespace tlt::cuda
