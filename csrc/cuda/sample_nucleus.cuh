// The filtered sampler's way for a wide nucleus: top-p alone, where the kept ids are too many to sort.
#pragma once
#include "sample_filtered.cuh"

namespace tlt::cuda {

// Sums whose order is not fixed are taken in units of 2^-40: integers add up to the same in any order.
__device__ __forceinline__ unsigned long long to_fixed(float p) { return static_cast<unsigned long long>(p * 0x1p40f); }

template <typename T, bool kMods>
__device__ __forceinline__ float FilteredRow<T, kMods>::block_fixed(unsigned long long mine) {
  __syncthreads();
  if (threadIdx.x == 0) sh.fixed = 0;
  __syncthreads();
  if (mine) atomicAdd(&sh.fixed, mine);
  __syncthreads();
  return static_cast<float>(static_cast<double>(sh.fixed) * 0x1p-40);
}

// A sample of one logit in 8 says where the cut lies, to 4.5 standard deviations; one pass then draws what is
// surely kept and lists the few thousand logits in between, among which the exact cut is found. Two reads of the row
// in all. False where the sample misled or the list overflowed: then the slow way decides.
template <typename T, bool kMods>
__device__ __forceinline__ bool FilteredRow<T, kMods>::draw_nucleus() {
  const float need = row.top_p * total;
  const float2 window = place_window(total - need);
  uint64_t* wide = reinterpret_cast<uint64_t*>(slots);
  const Kept surely{{0.0f, 0}, window.x, negative_infinity<float>()};
  Argmax argmax;
  start_pass();
  const float sum = block_sum(draw_pass<true>(surely, false, window.y, wide, argmax), sh.scratch);
  const int listed = sh.listed;
  Cut cut{0.0f, 0};
  if (listed == 0 || listed > kWide || !(sum < need)) return false;
  const float high = z_of(window.x), low = fmaxf(z_of(window.y), z_max - kFar);
  if (!window_cut(wide, listed, high, low, sum, need, cut)) return false;
  unsigned long long fixed = 0;
  offer_entries(wide, listed, cut, argmax, [&](float p) { fixed += to_fixed(p); });
  finish(argmax, cut, sum + block_fixed(fixed));
  return true;
}

// Logits x >= .x are kept, x < .y dropped, unless the sample misleads. tail: the mass to drop.
template <typename T, bool kMods>
__device__ __forceinline__ float2 FilteredRow<T, kMods>::place_window(float tail) {
  const float per_x = (kBins - 1) / (kFar * row.temperature);
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
  __syncthreads();
  const int groups = (columns + 7) / 8;
  for (int g = threadIdx.x * kSampled + threadIdx.x % kSampled; g < groups; g += kBlock * kSampled) {
    float x[8];
    unpack8(load8(logits, g, columns, aligned), x);
    modify8<kMods>(a, row.row, touched, g, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (x[i] > negative_infinity<float>()) {
        atomicAdd(&sh.counts[static_cast<int>(fminf((x_max - x[i]) * per_x, kBins - 1.0f))], 1u);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kBlock) {
    const float count = static_cast<float>(sh.counts[i]), each = kSampled * exp2_fast(-(i + 0.5f) / per_x * per_unit);
    sh.masses[i] = count * each;  // counts' own place: read before
    sh.more_masses[i] = count * each * each;
  }
  block_scan(sh.masses, sh.scratch);
  block_scan(sh.more_masses, sh.scratch);
  // below[i]: mass and variance of the bins from i on. The window: from the last bin that surely has more than the
  // tail below it to the first that surely has less.
  int first = 0, last = kBins - 1;
  for (int i = threadIdx.x; i < kBins; i += kBlock) {
    const float below = sh.masses[kBins - 1] - (i ? sh.masses[i - 1] : 0.0f);
    const float spread = 4.5f * sqrtf(fmaxf(sh.more_masses[kBins - 1] - (i ? sh.more_masses[i - 1] : 0.0f), 0.0f));
    if (below - spread >= tail) first = max(first, i);
    if (below + spread < tail) last = min(last, i);
  }
  first = static_cast<int>(block_max(static_cast<float>(first), sh.scratch)) - 1;
  last = -static_cast<int>(block_max(static_cast<float>(-last), sh.scratch)) + 1;
  const float bottom = last >= kBins - 1 ? negative_infinity<float>() : x_max - last / per_x;
  return make_float2(x_max - first / per_x, bottom);
}

// The cut among the listed entries, z in [low, high], `above` being the mass above them. False when it lies at the
// window's edge, where equal z may stand outside, or too many are equal.
template <typename T, bool kMods>
__device__ __forceinline__ bool FilteredRow<T, kMods>::window_cut(const uint64_t* wide, int listed, float high,
                                                                  float low, float above, float need, Cut& cut) {
  const float per_z = (kBins - 1) / (high - low);
  const auto bin_of = [&](float z) { return static_cast<int>(fminf(fmaxf((high - z) * per_z, 0.0f), kBins - 1.0f)); };
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < listed; i += kBlock) atomicAdd(&sh.counts[bin_of(entry_score(wide[i]))], 1u);
  const int2 range = nucleus_bins(high, per_z, above, need);
  if (range.x < 1 || range.x >= kBins || range.y >= kBins - 1) return false;
  if (threadIdx.x == 0) sh.listed = 0;
  __syncthreads();
  unsigned long long fixed = 0;
  for (int i = threadIdx.x; i < listed; i += kBlock) {
    const float z = entry_score(wide[i]);
    const int bin = bin_of(z);
    if (bin < range.x) fixed += to_fixed(mass(z));
    if (bin >= range.x && bin <= range.y) push(z, entry_id(wide[i]));
  }
  const float start = above + block_fixed(fixed);
  const int few = sh.listed;
  if (few == 0 || few > kList) return false;
  block_sort(sh.list, few);
  sum_list(few);
  const int last = block_first(sh.masses, few, start, need, &sh.found);
  if (last >= few) return false;
  cut = {entry_score(sh.list[last]), entry_id(sh.list[last])};
  return true;
}

}  // namespace tlt::cuda
