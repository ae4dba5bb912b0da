#include "cpu/row_kernels.h"

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "philox.h"

#define TLT_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TLT_X86 1
#include <immintrin.h>
#endif

namespace tlt {

namespace baseline {
namespace {
#define TLT_ISA_LEVEL 0
#include "cpu/row_kernels.inl"
#undef TLT_ISA_LEVEL
}  // namespace
}  // namespace baseline

#ifdef TLT_X86
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
namespace {
#define TLT_ISA_LEVEL 256
#include "cpu/row_kernels.inl"
#undef TLT_ISA_LEVEL
}  // namespace
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
namespace avx512 {
namespace {
#define TLT_ISA_LEVEL 512
#include "cpu/row_kernels.inl"
#undef TLT_ISA_LEVEL
}  // namespace
}  // namespace avx512
#pragma GCC pop_options
#endif

namespace {

// What this CPU runs, fastest first.
std::vector<const RowKernels*> runnable() {
  std::vector<const RowKernels*> out;
#ifdef TLT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    out.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2")) out.push_back(&avx2::kernels);
#endif
  out.push_back(&baseline::kernels);
  return out;
}

std::atomic<const RowKernels*>& picked() {
  static std::atomic<const RowKernels*> kernels{runnable().front()};
  return kernels;
}

}  // namespace

const RowKernels& row_kernels() { return *picked().load(std::memory_order_relaxed); }

bool use_isa(const std::string& isa) {
  for (const RowKernels* kernels : runnable()) {
    if (isa != kernels->isa) continue;
    picked().store(kernels);
    return true;
  }
  return false;
}

float exp_nonpositive(float x) { return baseline::exp_lane(x); }

}  // namespace tlt
