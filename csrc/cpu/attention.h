// Attention of packed rows (prefill chunks, single tokens, draft trees) over a paged KV cache.
#pragma once
#include <cstdint>

namespace tlt {

enum class Float : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Strides count elements. Shapes and meaning: kernels/tlt_kernels/attention.py.
struct AttentionArgs {
  Float dtype;
  const void* q;  // [rows, heads, dim], q_stride between rows
  int64_t q_stride;
  const void* k_cache;  // [pages, page, kv_heads, dim]
  const void* v_cache;
  int64_t pages, page, kv_heads;
  int64_t page_stride, slot_stride, head_stride;
  const int32_t* page_table;  // [batch, table_width]
  int64_t table_width;
  const int32_t* prefix_lens;  // [batch]
  const int32_t* node_indptr;  // [batch + 1]
  const int64_t* ancestors;    // [rows, 2]
  const uint8_t* causal;       // [batch]
  const int64_t* positions;    // [rows]
  int64_t batch, rows, heads, dim;
  float scale;
  int64_t window;  // 0 = none
  int threads;
  void* out;  // [rows, heads, dim]
};

// Throws std::invalid_argument for ranges, page ids or tree sizes that would read outside the tensors.
void tree_attention(const AttentionArgs& args);

}  // namespace tlt
