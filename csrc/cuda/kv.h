// Moves of KV and hidden rows, and the next step's inputs, on the device. Raw device pointers, the caller's stream.
// Legend: B requests, D columns of the walk, R packed rows. planes: layers * 2 (K and V).
#pragma once
#include <cstdint>

namespace tlt::cuda {

struct PagedKv {
  void* data;         // [planes, pages, page_size, row_bytes]
  int32_t planes;
  int64_t pages;
  int32_t page_size;
  int64_t row_bytes;  // a multiple of 2
};

struct PageTable {
  const int32_t* pages;  // [B, width]
  int32_t width;
};

// The accepted path's rows of every plane, from logical slot prefix + paths[b, d] to prefix + d. In place.
void commit_kv(const PagedKv& kv, const PageTable& table, const int32_t* prefix_lens, const int32_t* accept_lens,
               const int32_t* paths, int32_t steps, int32_t batch, uint64_t stream);

// Page dst[i] of every plane becomes page src[i], in the order of i.
void copy_pages(const PagedKv& kv, const int64_t* src, const int64_t* dst, int32_t count, uint64_t stream);

// out row b * steps + d = rows row node_indptr[b] + paths[b, d] for d < accept_lens[b]; other rows keep what they held.
void gather_accepted(const void* rows, int64_t row_bytes, const int32_t* node_indptr, const int32_t* accept_lens,
                     const int32_t* paths, int32_t steps, int32_t batch, void* out, uint64_t stream);

// After a walk: prefix_lens[b] += accept_lens[b], roots[b] = the last emitted token (0 where it is -1).
void advance(const int32_t* accept_lens, const int64_t* emitted, int32_t steps, int32_t batch, int32_t* prefix_lens,
             int64_t* roots, uint64_t stream);

// Per row i of request b: positions = prefix + depth, draws = prefix + depth + 1, slots = the flat KV slot of logical
// slot prefix + local node index. Rows beyond node_indptr[B] get position 0, draw 1 and slot pad_slot.
void step_inputs(const int32_t* node_indptr, const int32_t* depths, const int32_t* prefix_lens, const PageTable& table,
                 int32_t page_size, int64_t pad_slot, int32_t batch, int32_t rows, int64_t* positions, int64_t* draws,
                 int64_t* slots, uint64_t stream);

// cudaMemcpyAsync between pinned host memory and the device, either way.
void copy_async(void* to, const void* from, int64_t bytes, uint64_t stream);

// The same for `rows` runs of `bytes`, `pitch` bytes from one to the next on both sides.
void copy_block_async(void* to, const void* from, int64_t pitch, int64_t bytes, int64_t rows, uint64_t stream);

}  // namespace tlt::cuda
