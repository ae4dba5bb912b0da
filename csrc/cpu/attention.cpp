#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/parallel.h"

namespace tlt {
namespace {

constexpr int kBlock = 64;                  // keys a block: 64 x 64 fp32 keys and values fill half of a 32 KiB L1 each
constexpr int kMaxNodes = 128;
constexpr int kTail = 3 * kBlock;           // at most 63 keys behind the last full block, and the nodes of a tree
constexpr int64_t kQueries = 64;            // rows x group of an item, where one row does not exceed it

// Rows row0 .. row0 + rows - 1 of one request, with one KV head.
struct Item {
  int64_t request, kv_head, node0, row0, rows, prefix, nodes;
  bool causal;

  // In a block of shared places: row r sees places below limit, from start on. A tree's shared places are prefix.
  int64_t limit(int64_t r) const { return causal ? prefix + row0 + r + 1 : prefix; }
  int64_t start(const AttentionArgs& a, int64_t r) const {
    return a.window > 0 ? a.positions[node0 + row0 + r] - a.window + 1 : 0;
  }
};

struct Scratch {
  int64_t width;     // dim rounded up to 16 floats
  bool copy_values;  // half types, and dims that vectors would overrun
  float *q, *maxima, *totals, *sums, *scores, *path_scores, *keys_t, *key_rows, *value_rows;
  const float** values;
};

inline float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // inf and NaN keep the largest exponent
  const uint32_t bits = to_bits(from_bits(magnitude) * 0x1p112f) | special;
  return from_bits(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

inline uint16_t float_to_bf16(float f) {
  const uint32_t bits = to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To nearest, ties to even, as the hardware does.
inline uint16_t float_to_half(float f) {
  const uint32_t all = to_bits(f), sign = all >> 16 & 0x8000;
  uint32_t bits = all & 0x7fffffff;
  if (bits >= 0x47800000) return static_cast<uint16_t>(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits < 0x38800000) return static_cast<uint16_t>(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3f000000));
  bits += 0xc8000fff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | bits >> 13);
}

namespace plain {
#define TLT_LANES 4
#define TLT_TILE 2
#include "cpu/attention_kernel.h"
#undef TLT_LANES
#undef TLT_TILE
}  // namespace plain

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TLT_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define TLT_LANES 8
#define TLT_TILE 2
#include "cpu/attention_kernel.h"
#undef TLT_LANES
#undef TLT_TILE
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
#define TLT_LANES 16
#define TLT_TILE 4
#include "cpu/attention_kernel.h"
#undef TLT_LANES
#undef TLT_TILE
}  // namespace avx512
#pragma GCC pop_options
#endif

using RunItem = void (*)(const AttentionArgs&, const Item&, const Scratch&);

// TLT_CPU_ISA=plain or avx2 holds the choice down, so that tests reach every kernel on one machine.
RunItem best_kernel() {
  const char* name = std::getenv("TLT_CPU_ISA");
  const std::string most = name == nullptr ? "avx512" : name;
  if (most != "plain" && most != "avx2" && most != "avx512")
    throw std::invalid_argument("TLT_CPU_ISA: expected plain, avx2 or avx512, got " + most + "; unset it for the best");
#ifdef TLT_X86
  if (most == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return avx512::run_item;
  if (most != "plain" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::run_item;
#endif
  return plain::run_item;
}

[[noreturn]] void refuse(const std::string& name, const std::string& expected, int64_t got, const std::string& where) {
  throw std::invalid_argument("tree_attention: " + name + ": expected " + expected + ", got " + std::to_string(got) +
                              " " + where);
}

void check_request(const AttentionArgs& a, int64_t b) {
  const std::string where = "in request " + std::to_string(b);
  const int64_t nodes = a.node_indptr[b + 1] - a.node_indptr[b];
  if (nodes < 0) refuse("node_indptr", "bounds that never fall", nodes, where + "; sum up the row counts");
  if (a.prefix_lens[b] < 0) refuse("prefix_lens", "a length >= 0", a.prefix_lens[b], where);
  if (nodes == 0) return;
  if (!a.causal[b] && nodes > kMaxNodes)
    refuse("node_indptr", "at most 128 nodes in a tree", nodes, where + "; set causal for a chunk");
  const int64_t used = (a.prefix_lens[b] + nodes + a.page - 1) / a.page;
  if (used > a.table_width) refuse("page_table", std::to_string(used) + " pages", a.table_width, where);
  for (int64_t i = 0; i < used; ++i) {
    const int64_t page = a.page_table[b * a.table_width + i];
    if (page < 0 || page >= a.pages) refuse("page_table", "pages in [0, " + std::to_string(a.pages) + ")", page, where);
  }
  if (!a.causal[b] || a.window == 0) return;
  for (int64_t i = 0; i < nodes; ++i)
    if (a.positions[a.node_indptr[b] + i] != a.prefix_lens[b] + i)
      refuse("positions", "prefix_len + i in a causal chunk with a window", a.positions[a.node_indptr[b] + i], where);
}

std::vector<Item> make_items(const AttentionArgs& a) {
  const int64_t rows_an_item = std::max<int64_t>(1, kQueries / (a.heads / a.kv_heads));
  std::vector<Item> items;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t node0 = a.node_indptr[b], nodes = a.node_indptr[b + 1] - node0;
    for (int64_t h = 0; h < a.kv_heads; ++h)
      for (int64_t row = 0; row < nodes; row += rows_an_item)
        items.push_back({b, h, node0, row, std::min(rows_an_item, nodes - row), a.prefix_lens[b], nodes,
                         a.causal[b] != 0});
  }
  return items;
}

// Carves the scratch of one thread out of a buffer that it keeps between calls.
Scratch make_scratch(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t queries = std::max<int64_t>(1, kQueries / group) * group;
  Scratch w;
  w.width = (a.dim + 15) / 16 * 16;
  w.copy_values = a.dtype != Float::f32 || a.dim % 16 != 0;
  const int64_t copied = w.copy_values ? kTail * w.width : 0;
  const int64_t sizes[] = {queries * a.dim,  queries,         queries,         queries * w.width, queries * kTail,
                           group * kBlock,   a.dim * kBlock,  kBlock * w.width, copied};
  float** parts[] = {&w.q,           &w.maxima, &w.totals,   &w.sums,      &w.scores,
                     &w.path_scores, &w.keys_t, &w.key_rows, &w.value_rows};
  int64_t total = 0;
  for (int64_t size : sizes) total += (size + 15) / 16 * 16;
  thread_local std::vector<float> buffer;
  thread_local std::vector<const float*> values(kTail);
  if (static_cast<int64_t>(buffer.size()) < total) buffer.resize(total);
  float* next = buffer.data();
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    *parts[i] = next;
    next += (sizes[i] + 15) / 16 * 16;
  }
  // Widened values have dim floats; the vectors read width of them, and only their padding would be garbage.
  if (a.dim % 16 != 0) std::fill(w.value_rows, w.value_rows + copied, 0.0f);
  w.values = values.data();
  return w;
}

}  // namespace

void tree_attention(const AttentionArgs& a) {
  if (a.node_indptr[0] != 0 || a.node_indptr[a.batch] != a.rows)
    refuse("node_indptr", "to run from 0 to R", a.node_indptr[a.batch], "; give the bounds of each request's rows");
  for (int64_t b = 0; b < a.batch; ++b) check_request(a, b);
  static const RunItem run = best_kernel();
  const std::vector<Item> items = make_items(a);
  parallel_for(static_cast<int64_t>(items.size()), a.threads, [&](int64_t begin, int64_t end) {
    const Scratch scratch = make_scratch(a);
    for (int64_t i = begin; i < end; ++i) run(a, items[i], scratch);
  });
}

}  // namespace tlt
