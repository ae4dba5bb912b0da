// The filtered sampler's way for a wide nucleus: top-p alone, where the kept ids are too many to sort.
#pragma once
#include "sample_filtered.cuh"

namespace tlt::cuda {

// Sums whose order is not fixed are taken in units of 2^-40: integers add up to the same in any order.
__device__ __forceinline__ unsigned long long to_fixed(float p) { return static_cast<unsigned long long>(p * 0x1p40f); }

__device__ __forceinline__ unsigned long long warp_sum64(unsigned long long x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const uint32_t low = __shfl_xor_sync(kAll, static_cast<uint32_t>(x), offset);
    const uint32_t high = __shfl_xor_sync(kAll, static_cast<uint32_t>(x >> 32), offset);
    x += static_cast<unsigned long long>(high) << 32 | low;
  }
  return x;
}

// The sum of all threads' parts. A 64-bit atomic in shared memory is a loop of its own for each thread: with one atomic
// a thread this took a fifth of the nucleus's time.
__device__ __forceinline__ float block_fixed(unsigned long long mine, unsigned long long (&scratch)[kBlockWarps]) {
  mine = warp_sum64(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  unsigned long long total = 0;
  for (int i = 0; i < kBlockWarps; ++i) total += scratch[i];
  return static_cast<float>(static_cast<double>(total) * 0x1p-40);
}

// Logits in [low, high), which may or may not be kept; those above surely are. Their ids as the pass meets them, and
// their z once it is over. Until then the room for z holds each warp's next strip.
template <typename T, bool kMods>
struct FilteredRow<T, kMods>::Window {
  float high, low;
  int32_t* ids;  // [kWide]
  float* z;      // [kWide]

  static constexpr bool kStaged = kBlockWarps * kStrip * sizeof(T) <= kWide * sizeof(float);
};

// A sample of one logit in 8 says where the cut lies, to 4.5 standard deviations; one pass then draws what is
// surely kept and lists the few thousand logits in between, among which the exact cut is found. The pass sees their
// noise too: the few that may win wait for the cut. Two reads of the row in all. False where the sample misled or a
// list overflowed: then the slow way decides.
template <typename T, bool kMods>
__device__ __forceinline__ bool FilteredRow<T, kMods>::draw_nucleus() {
  const float need = row.top_p * total;
  const float2 range = place_window(total - need);
  int32_t* const ids = reinterpret_cast<int32_t*>(slots);
  const Window window{range.x, range.y, ids, reinterpret_cast<float*>(ids + kWide)};
  Argmax argmax;
  start_pass();
  const float sum = block_sum(window_pass(window, argmax), sh.scratch);
  const int listed = sh.listed;
  Cut cut{0.0f, 0};
  float kept_sum = 0.0f;
  if (listed == 0 || listed > kWide || sh.undecided > kUndecided || !(sum < need)) return false;
  if (!window_cut(window, listed, sum, need, cut, kept_sum)) return false;
  for (int i = threadIdx.x; i < sh.undecided; i += kBlock) {
    const int id = sh.waiting[i];
    const float x = modified_at(a, row.row, *touched, kMods, id, widen(logits[id]));
    if (cut.keeps(z_of(x), id)) argmax.offer(row, x, row.word(id), id);
  }
  finish(argmax, cut, kept_sum);
  return true;
}

// One pass of noise over the logits above the window; returns the lane's sum of their masses. sh.listed counts the
// window's, as many ids as fit are listed: a strip's at once, since a list a group took a third of all instructions.
template <typename T, bool kMods>
__device__ __forceinline__ float FilteredRow<T, kMods>::window_pass(const Window& window, Argmax& argmax) {
  const Kept surely{{0.0f, 0}, window.high, negative_infinity<float>()};
  const Kept maybe{{0.0f, 0}, window.low, negative_infinity<float>()};
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int strips = strips_of(columns);
  const float y_max = x_max * per_unit, low = fmaxf(window.low, -3.4028234e38f);  // no -inf among the listed
  uint4* const place = reinterpret_cast<uint4*>(window.z) + warp * (kStrip * static_cast<int>(sizeof(T)) / 16) + lane;
  const auto staged = [&](int s) { return Window::kStaged && aligned && (s + 1) * kStrip <= columns; };
  float sum = 0.0f;
  if (warp < strips && staged(warp)) Held<T>::request(logits, first_of(warp), place);
  for (int s = warp; s < strips; s += kBlockWarps) {
    const int first = first_of(s), next = s + kBlockWarps;
    Held<T> held;
    if (staged(s)) {
      held.take(place);
    } else {
      held.load(logits, first, columns, aligned && (s + 1) * kStrip <= columns);
    }
    if (next < strips && staged(next)) Held<T>::request(logits, first_of(next), place);
    if (!kMods && (s + 1) * kStrip > a.limit) held.cut_off(first, a.limit);
    float s8[kStripGroups];
    uint32_t inside = 0;  // bit 8 j + i: logit i of group j
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
      float x[8];
      unpack8(held.raw[j], x);
      if constexpr (kMods) modify8<true>(a, row.row, touched, first + 32 * j, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool above = x[i] >= window.high, below = x[i] < low;
        inside |= above | below ? 0u : 1u << (8 * j + i);
        x[i] = exp2_fast(fmaf(x[i], per_unit, -y_max));
        sum += above ? x[i] : 0.0f;
      }
      s8[j] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
    const int count = __popc(inside);
    int upto = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int below = __shfl_up_sync(kAll, upto, offset);
      if (lane >= offset) upto += below;
    }
    const int base = __shfl_sync(kAll, lane == 31 ? atomicAdd(&sh.listed, upto) : 0, 31);
    for (int at = base + upto - count; inside; ++at) {
      const int bit = __ffs(static_cast<int>(inside)) - 1;
      inside &= inside - 1;
      if (at < kWide) window.ids[at] = first * 8 + (bit & 24) * 32 + (bit & 7);
    }
    __syncwarp();
    draw_strip(first, s8, y_max, argmax, [&](int g, float(&x)[8]) { again(maybe, g, x); },
               [&](int g, float(&x)[8]) { again(surely, g, x); }, [&](float x, uint32_t bits, int id) {
                 if (x >= window.high) return argmax.offer(row, x, bits, id);
                 const int at = atomicAdd(&sh.undecided, 1);
                 if (at < kUndecided) sh.waiting[at] = id;
               });
  }
  return sum;
}

// Logits x >= .x are kept, x < .y dropped, unless the sample misleads. tail: the mass to drop.
template <typename T, bool kMods>
__device__ __forceinline__ float2 FilteredRow<T, kMods>::place_window(float tail) {
  // What lies below the bins weighs less than a thousandth of the tail, however many ids it is.
  const float reach = tail > 0.0f ? fminf(fmaxf(logf(1e3f * columns / tail), 1.0f), kFar) : kFar;
  const float per_x = (kBins - 1) / (reach * row.temperature);
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
  __syncthreads();
  const int groups = (columns + 7) / 8;
  constexpr int kAtOnce = 4;  // loads on their way together
  for (int start = threadIdx.x * kSampled + threadIdx.x % kSampled; start < groups;
       start += kAtOnce * kBlock * kSampled) {
    Raw8<T> raw[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int g = start + j * kBlock * kSampled;
      if (g < groups) raw[j] = load8(logits, g, columns, aligned);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int g = start + j * kBlock * kSampled;
      if (g >= groups) break;
      float x[8];
      unpack8(raw[j], x);
      modify8<kMods>(a, row.row, touched, g, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (x[i] > negative_infinity<float>()) {
          atomicAdd(&sh.counts[static_cast<int>(fminf((x_max - x[i]) * per_x, kBins - 1.0f))], 1u);
        }
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

// The cut among the window's logits, `above` being the mass above them, and the mass of all it keeps. False when it
// lies at the window's edge, where equal z may stand outside, or too many are equal.
template <typename T, bool kMods>
__device__ __forceinline__ bool FilteredRow<T, kMods>::window_cut(const Window& window, int listed, float above,
                                                                  float need, Cut& cut, float& mass_kept) {
  const float high = z_of(window.high), low = fmaxf(z_of(window.low), z_max - kFar);
  const float per_z = (kBins - 1) / (high - low);
  const auto bin_of = [&](float z) { return static_cast<int>(fminf(fmaxf((high - z) * per_z, 0.0f), kBins - 1.0f)); };
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < listed; i += kBlock) {
    const int id = window.ids[i];
    const float z = z_of(modified_at(a, row.row, *touched, kMods, id, widen(logits[id])));
    window.z[i] = z;
    atomicAdd(&sh.counts[bin_of(z)], 1u);
  }
  const int2 range = nucleus_bins(high, per_z, above, need);
  if (range.x < 1 || range.x >= kBins || range.y >= kBins - 1) return false;
  if (threadIdx.x == 0) sh.listed = 0;
  __syncthreads();
  unsigned long long fixed = 0;
  for (int i = threadIdx.x; i < listed; i += kBlock) {
    const float z = window.z[i];
    const int bin = bin_of(z);
    if (bin < range.x) fixed += to_fixed(mass(z));
    if (bin >= range.x && bin <= range.y) push(z, window.ids[i]);
  }
  const float start = above + block_fixed(fixed, sh.fixed);
  const int few = sh.listed;
  if (few == 0 || few > kList) return false;
  block_sort(sh.list, few);
  sum_list(few);
  const int last = block_first(sh.masses, few, start, need, &sh.found);
  if (last >= few) return false;
  cut = {entry_score(sh.list[last]), entry_id(sh.list[last])};
  mass_kept = start + sh.masses[last];
  return true;
}

}  // namespace tlt::cuda
