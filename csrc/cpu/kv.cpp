#include "cpu/kv.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/parallel.h"

namespace tlt {

void write_rows(const char* rows, int64_t row_stride, char* cache, int64_t page_stride, int64_t slot_stride,
                int64_t pages, int64_t page, int64_t row_bytes, const int64_t* slots, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] >= pages * page)
      throw std::invalid_argument("slots: expected slots in [0, " + std::to_string(pages * page) + "), got " +
                                  std::to_string(slots[i]) + " in row " + std::to_string(i) +
                                  "; build them from pages that the cache has");
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(cache + slots[i] / page * page_stride + slots[i] % page * slot_stride, rows + i * row_stride, row_bytes);
}

namespace {

void check_path(const int32_t* path, int64_t length, int64_t path_width, int64_t prefix, const int32_t* table,
                int64_t table_width, int64_t pages, int64_t page, int64_t request) {
  const std::string where = " in request " + std::to_string(request);
  if (length < 0 || length > path_width || prefix < 0)
    throw std::invalid_argument("walk.accept_lens: expected 0 to " + std::to_string(path_width) + ", got " +
                                std::to_string(length) + where + "; pass verify_tree's walk");
  for (int64_t d = 0; d < length; ++d)
    if (path[d] < (d == 0 ? 0 : path[d - 1] + 1))
      throw std::invalid_argument("walk.paths: expected rising nodes, got " + std::to_string(path[d]) + " at depth " +
                                  std::to_string(d) + where + "; a child stands behind its parent");
  if (length == 0) return;
  const int64_t last = (prefix + path[length - 1]) / page;
  if (last >= table_width)
    throw std::invalid_argument("page_table: expected more than " + std::to_string(last) + " pages, got " +
                                std::to_string(table_width) + where + "; own the slots of the whole tree first");
  for (int64_t i = prefix / page; i <= last; ++i)
    if (table[i] < 0 || table[i] >= pages)
      throw std::invalid_argument("page_table: expected pages in [0, " + std::to_string(pages) + "), got " +
                                  std::to_string(table[i]) + where + "; fix the table");
}

}  // namespace

void commit_kv(char* kv, int64_t planes, int64_t pages, int64_t page, int64_t slot_bytes, const int32_t* page_table,
               int64_t table_width, const int32_t* prefix_lens, const int32_t* accept_lens, const int32_t* paths,
               int64_t path_width, int64_t batch, int threads) {
  for (int64_t b = 0; b < batch; ++b)
    check_path(paths + b * path_width, accept_lens[b], path_width, prefix_lens[b], page_table + b * table_width,
               table_width, pages, page, b);
  parallel_for(batch, threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int32_t* table = page_table + b * table_width;
      const auto slot = [&](int64_t logical) { return table[logical / page] * page + logical % page; };
      // In rising order: paths rise, so depth d overwrites slot d, and every later source lies beyond it.
      for (int64_t d = 0; d < accept_lens[b]; ++d) {
        const int64_t node = paths[b * path_width + d];
        if (node == d) continue;
        const int64_t from = slot(prefix_lens[b] + node) * slot_bytes, to = slot(prefix_lens[b] + d) * slot_bytes;
        for (int64_t plane = 0; plane < planes; ++plane) {
          char* base = kv + plane * pages * page * slot_bytes;
          std::memcpy(base + to, base + from, slot_bytes);
        }
      }
    }
  });
}

void copy_pages(char* kv, int64_t planes, int64_t pages, int64_t page_bytes, const int64_t* src, const int64_t* dst,
                int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (src[i] == dst[i]) continue;
    for (int64_t plane = 0; plane < planes; ++plane) {
      char* base = kv + plane * pages * page_bytes;
      std::memcpy(base + dst[i] * page_bytes, base + src[i] * page_bytes, page_bytes);
    }
  }
}

}  // namespace tlt
