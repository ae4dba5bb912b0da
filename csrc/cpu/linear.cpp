#include "cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"

namespace tlt {
namespace {

constexpr int kWeightRows = 4;               // rows of weights in a register tile
constexpr int64_t kRowsAhead = 8;            // rows of weights between a load and its prefetch
constexpr int64_t kChunkFloats = 128 * 1024;  // of x that stay in a 1 MiB L2 while the weights stream through

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadIndex __attribute__((vector_size(16)));

namespace plain {
#define TLT_LANES 4
#define TLT_ROWS 2
#include "cpu/linear_kernel.h"
#undef TLT_LANES
#undef TLT_ROWS
}  // namespace plain

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TLT_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define TLT_LANES 8
#define TLT_ROWS 2
#include "cpu/linear_kernel.h"
#undef TLT_LANES
#undef TLT_ROWS
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
#define TLT_LANES 16
#define TLT_ROWS 6
#include "cpu/linear_kernel.h"
#undef TLT_LANES
#undef TLT_ROWS
}  // namespace avx512
#pragma GCC pop_options
#endif

using RunBlock = void (*)(const LinearArgs&, int64_t begin, int64_t end, int64_t n);

RunBlock best_kernel() {
#ifdef TLT_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512::run_block;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::run_block;
#endif
  return plain::run_block;
}

}  // namespace

void linear(const LinearArgs& a) {
  static const RunBlock run = best_kernel();
  const int64_t blocks = (a.out_dim + kWeightRows - 1) / kWeightRows;
  const int64_t chunk = std::max<int64_t>(48, kChunkFloats / a.in_dim);
  for (int64_t row = 0; row < a.rows; row += chunk) {
    const int64_t last = std::min(row + chunk, a.rows);
    parallel_for(blocks, a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(a, row, last, i * kWeightRows);
    });
  }
}

}  // namespace tlt
