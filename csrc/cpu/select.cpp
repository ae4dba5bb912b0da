#include "cpu/select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace tlt {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

bool before(const Entry& a, const Entry& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

int64_t collect(const float* z, int64_t padded, float threshold, SelectScratch& scratch) {
  scratch.entries.resize(padded);
  return row_kernels().collect(z, padded, threshold, scratch.entries.data());
}

}  // namespace

Entry top_k_cut(const float* z, int64_t padded, int64_t k, SelectScratch& scratch) {
  const int64_t groups = padded / kGroup;
  float threshold = -kInf;
  if (k <= groups) {  // k groups reach the k-th largest group maximum, so at least k ids do: the cut is not below it
    scratch.groups.resize(groups);
    row_kernels().group_max(z, padded, scratch.groups.data());
    std::nth_element(scratch.groups.begin(), scratch.groups.begin() + (k - 1), scratch.groups.end(),
                     std::greater<float>());
    threshold = scratch.groups[k - 1];
  }
  const int64_t count = collect(z, padded, threshold, scratch);
  if (count < k) return {-kInf, static_cast<int32_t>(padded - 1)};
  const auto first = scratch.entries.begin();
  std::nth_element(first, first + (k - 1), first + count, before);
  return first[k - 1];
}

Entry top_p_cut(const float* z, int64_t padded, float p, float max, SelectScratch& scratch) {
  const double total = row_kernels().exp_sum(z, padded, max);
  // Ids below `floor` have a mass below (1 - p) * total in all, so the set that reaches p never needs them. The margin
  // of 1e-3 in the exponent is far above the rounding of log, exp and sum.
  const double floor = max + std::log((1.0 - static_cast<double>(p)) * total / static_cast<double>(padded)) - 1e-3;
  const int64_t count = collect(z, padded, std::nextafter(static_cast<float>(floor), -kInf), scratch);
  const double target = static_cast<double>(p) * total;
  auto lo = scratch.entries.begin(), hi = lo + count;
  double mass = 0;  // of what stands before lo
  while (hi - lo > 1) {
    const auto mid = lo + (hi - lo) / 2;
    std::nth_element(lo, mid, hi, before);
    double front = 0;
    for (auto it = lo; it != mid; ++it) front += exp_nonpositive(it->z - max);
    if (mass + front >= target) {
      hi = mid;
    } else {
      mass += front, lo = mid;
    }
  }
  return *lo;
}

}  // namespace tlt
