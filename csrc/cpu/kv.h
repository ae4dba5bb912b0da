// Copies within the paged KV cache. All sizes and strides are in bytes; dtypes do not matter here.
#pragma once
#include <cstdint>

namespace tlt {

// Slot slots[i] of `cache` (page slots[i] / page, offset slots[i] % page) becomes row i of `rows`, for i in [0, count).
// Throws std::invalid_argument, before any write, when a slot lies outside the cache.
void write_rows(const char* rows, int64_t row_stride, char* cache, int64_t page_stride, int64_t slot_stride,
                int64_t pages, int64_t page, int64_t row_bytes, const int64_t* slots, int64_t count);

// kv: `planes` (layers x 2) planes of [pages, page] slots of slot_bytes. For each request b and d < accept_lens[b], the
// slot of logical index prefix_lens[b] + paths[b][d] is copied to that of prefix_lens[b] + d, in every plane.
// Throws std::invalid_argument, before any write, when a path does not rise or leaves the page table.
void commit_kv(char* kv, int64_t planes, int64_t pages, int64_t page, int64_t slot_bytes, const int32_t* page_table,
               int64_t table_width, const int32_t* prefix_lens, const int32_t* accept_lens, const int32_t* paths,
               int64_t path_width, int64_t batch, int threads);

// Page dst[i] becomes page src[i] in every plane, for i = 0, 1, .. count - 1.
void copy_pages(char* kv, int64_t planes, int64_t pages, int64_t page_bytes, const int64_t* src, const int64_t* dst,
                int64_t count);

}  // namespace tlt
