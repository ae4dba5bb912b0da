// The filtered sampler: one block a row that has min-p, top-k or top-p.
//
// One pass keeps the maximum of every 16 logits (a slot) in shared memory. The k-th largest slot maximum bounds the
// k-th largest logit from below, so after it only slots above the bound are read again: a few hundred logits, sorted
// exactly in shared memory. Where the survivors do not fit there (a wide nucleus, a loose min-p, a large k), the cut
// comes from a radix select on counts (top-k) and from narrowing histograms with exact sums above them (top-p). All
// sums run in a fixed order; histograms count integers.
#pragma once
#include "block.cuh"
#include "sample_rows.cuh"

namespace tlt::cuda {

constexpr int kList = kBins;
constexpr float kReach = 30.0f;      // slot histogram: this far below the maximum, in units of z
constexpr int kNucleusSlots = 640;   // top-p alone: try the logits above this many slot maxima first
constexpr float kFar = 40.0f;        // e^-40 of the largest mass, times any vocabulary, is below fp32's resolution

constexpr int kWide = 9216;          // entries of a nucleus's window: two blocks fit a multiprocessor's 228 KB
constexpr int kUndecided = 256;
constexpr int kSampled = 8;          // one group of 8 logits in so many places the window
constexpr float kSlotShare = 1.5f;   // a list is tried where so many times the slots' own mass reach the nucleus's
constexpr float kListable = 16.0f;   // nuclei of more than so many times the largest mass are not tried as a list

inline __host__ __device__ int slots_of(int columns) { return strips_of(columns) * 64; }
// The slots; where a wide nucleus needs them no longer, its window: kWide ids, then as many values.
inline int filter_bytes(int columns) {
  return max(slots_of(columns) * static_cast<int>(sizeof(float)),
             kWide * static_cast<int>(sizeof(int32_t) + sizeof(float)));
}

// A slot is two groups of 8 ids, 256 ids apart, so that a warp's loads stay side by side.
__device__ __forceinline__ int first_group(int slot) { return slot / 32 * 64 + slot % 32; }

struct Cut {  // kept: z above, or z equal and the id not above
  float z;
  int id;

  __device__ __forceinline__ bool keeps(float value, int at) const { return value > z || (value == z && at <= id); }
};

struct FilterShared {
  uint64_t list[kList];
  union {
    uint32_t counts[kBins];
    float masses[kBins];
  };
  float more_masses[kBins];
  float scratch[kBlockWarps];
  uint32_t scratch_counts[kBlockWarps];
  Best bests[kBlockWarps];
  unsigned long long fixed[kBlockWarps];
  int listed, found;
  uint32_t bound;
  int undecided;               // ids of a nucleus's window whose noise may win, should the cut keep them
  int32_t waiting[kUndecided];
};

// A value that at least `wanted` slot maxima reach, so at least that many entries of the row: within unit * kReach / 2048
// of the best such value; -inf when fewer reach unit * kReach below the top.
__device__ __forceinline__ float slot_bound(FilterShared& sh, const float* slots, int slot_count, float top, float unit,
                                            int wanted) {
  const float per_value = (kBins - 1) / (kReach * unit);
  for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < slot_count; s += kBlock) {
    atomicAdd(&sh.counts[static_cast<int>(fminf((top - slots[s]) * per_value, kBins - 1.0f))], 1u);
  }
  block_scan(sh.counts, sh.scratch_counts);
  const int bin = block_first(sh.counts, kBins - 1, 0u, static_cast<uint32_t>(wanted), &sh.found);
  return bin >= kBins - 1 ? negative_infinity<float>() : top - (bin + 1) / per_value;
}

template <typename T, bool kMods>
struct FilteredRow {
  const SampleArgs& a;
  const Row& row;
  const Touched* touched;
  const T* logits;
  FilterShared& sh;
  float* slots;  // [slot_count]
  bool aligned;
  int columns, slot_count;
  float per_unit, x_max = 0.0f, z_max = 0.0f, total = 0.0f;
  float2 raw = make_float2(0.0f, 1.0f);
  int kept = 0;  // entries of the list that stay, once narrow() has found the cut

  __device__ __forceinline__ float mass(float z) const { return exp2_fast((z - z_max) * kLog2e); }
  __device__ __forceinline__ float z_of(float x) const { return row.z_of(x); }

  // f(group, x[8]) for every group; whole warps stay together.
  template <typename F>
  __device__ __forceinline__ void each_group(F&& f) const {
    for (int g = threadIdx.x; g < slot_count * 2; g += kBlock) {
      float x[8];
      unpack8(load8(logits, g, columns, aligned), x);
      modify8<kMods>(a, row.row, touched, g, x);
      f(g, x);
    }
  }

  // f(z, id) for every id that is a candidate at all.
  template <typename F>
  __device__ __forceinline__ void each_z(F&& f) const {
    each_group([&](int g, const float(&x)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (x[i] > negative_infinity<float>()) f(z_of(x[i]), g * 8 + i);
      }
    });
  }

  // The pass over all logits. False: the row holds NaN or +inf, or no candidate.
  __device__ __forceinline__ bool scan_all() {
    const bool want_total = row.top_p < 1.0f && row.top_k == 0;
    RunningSum sum, raw_sum;
    float top_all = negative_infinity<float>();
    bool bad = false;
    const auto load = [&](int s, Held<T>& held) {
      if (s < strips_of(columns)) held.load(logits, first_of(s), columns, aligned && (s + 1) * kStrip <= columns);
    };
    Held<T> next;
    load(threadIdx.x / 32, next);
    for (int s = threadIdx.x / 32; s < strips_of(columns); s += kBlockWarps) {
      const int first = first_of(s);
      const Held<T> held = next;
      load(s + kBlockWarps, next);  // on its way while this one is added up
      if (a.raw_logprobs) add(raw_sum, held, kLog2e);
      float top[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Raw8<T> pair[2] = {held.raw[2 * half], held.raw[2 * half + 1]};
        top[half] = max_raw<true>(pair);
        bad |= !(top[half] <= 3.4028234e38f);
      }
      if (kMods || (s + 1) * kStrip > a.limit) {
        Held<float> changed;
        change(held, first, changed);
        if (want_total) add(sum, changed, per_unit);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Raw8<float> pair[2] = {changed.raw[2 * half], changed.raw[2 * half + 1]};
          top[half] = max_raw<false>(pair);
        }
      } else if (want_total) {
        add(sum, held, per_unit);
      }
      slots[s * 64 + threadIdx.x % 32] = top[0];
      slots[s * 64 + 32 + threadIdx.x % 32] = top[1];
      top_all = fmaxf(top_all, fmaxf(top[0], top[1]));
    }
    x_max = block_max(top_all, sh.scratch);
    z_max = z_of(x_max);
    if (want_total) total = whole(sum, x_max * per_unit);
    if (a.raw_logprobs) {
      raw.x = block_max(raw_sum.y_max, sh.scratch);
      raw.y = whole(raw_sum, raw.x);
    }
    return !__syncthreads_or(bad) && x_max > negative_infinity<float>() && x_max <= 3.4028234e38f;
  }

  static __device__ __forceinline__ int first_of(int s) {
    return s * (kStrip / 8) + static_cast<int>(threadIdx.x % 32);
  }

  // Held logits as they are before the temperature, masks, bias and penalties applied.
  __device__ __forceinline__ void change(const Held<T>& held, int first, Held<float>& out) const {
#pragma unroll
    for (int j = 0; j < kStripGroups; ++j) {
      float x[8];
      unpack8(held.raw[j], x);
      modify8<kMods>(a, row.row, touched, first + 32 * j, x);
      float* to = reinterpret_cast<float*>(&out.raw[j]);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = x[i];
    }
  }

  template <typename U>
  static __device__ __forceinline__ void add(RunningSum& sum, const Held<U>& held, float unit) {
    sum.raise(max_raw<false>(held.raw), unit);
    float s8[kStripGroups];
    sum.sum += StripScan<T, kMods>::sum(held, unit, sum.y_max, s8);
  }

  __device__ __forceinline__ float whole(const RunningSum& sum, float y_max) const {
    return block_sum(sum.sum * exp2_fast(sum.y_max - y_max), sh.scratch);
  }

  // Lists the logits >= floor_x as (z, id), sorted; returns how many there are, kList + 1 when they do not fit.
  __device__ __forceinline__ int list_above(float floor_x) {
    if (threadIdx.x == 0) sh.listed = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slot_count; slot += kBlock) {
      if (!(slots[slot] >= floor_x) || slots[slot] == negative_infinity<float>()) continue;
      for (int half = 0; half < 2; ++half) {
        const int group = first_group(slot) + 32 * half;
        float x[8];
        unpack8(load8(logits, group, columns, aligned), x);
        modify8<kMods>(a, row.row, touched, group, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (x[i] >= floor_x && x[i] > negative_infinity<float>()) push(z_of(x[i]), group * 8 + i);
        }
      }
    }
    __syncthreads();
    const int listed = sh.listed;
    __syncthreads();
    if (listed > kList) return kList + 1;
    block_sort(sh.list, listed);
    return listed;
  }

  __device__ __forceinline__ void push(float z, int id) {
    const int at = atomicAdd(&sh.listed, 1);
    if (at < kList) sh.list[at] = pack_entry(z, id);
  }

  __device__ __forceinline__ float min_p_floor() const {
    if (!(row.min_p > 0.0f)) return negative_infinity<float>();
    return static_cast<float>(static_cast<double>(z_max) + log_positive(static_cast<double>(row.min_p)));
  }

  // Prefix sums of the listed masses, 0 beyond n.
  __device__ __forceinline__ void sum_list(int n) {
    __syncthreads();
    for (int i = threadIdx.x; i < kList; i += kBlock) sh.masses[i] = i < n ? mass(entry_score(sh.list[i])) : 0.0f;
    block_scan(sh.masses, sh.scratch);
  }

  // The common case: the survivors fit into the list. True when `cut` has been found.
  __device__ __forceinline__ bool narrow(Cut& cut) {
    const float floor_z = min_p_floor(), slack = (fabsf(z_max) + kFar) * row.temperature * 1e-6f;
    const float by_min_p = row.min_p > 0.0f ? floor_z * row.temperature - slack : negative_infinity<float>();
    const bool nucleus_only = row.top_k == 0 && row.top_p < 1.0f;
    float bound = negative_infinity<float>();
    if (row.top_k > 0 || nucleus_only) {
      if (row.top_k > kList) return false;
      bound = slot_bound(sh, slots, slot_count, x_max, row.temperature, row.top_k > 0 ? row.top_k : kNucleusSlots) -
              slack;
    }
    const bool complete = !nucleus_only || by_min_p >= bound;
    if (!complete && row.min_p > 0.0f) return false;  // `total` covers more than min-p's survivors
    if (!complete && kSlotShare * mass_of_slots(bound) < row.top_p * total) return false;
    int n = list_above(fmaxf(by_min_p, bound));
    if (n > kList) return false;
    if (row.min_p > 0.0f) n = first_below(n, floor_z);
    if (row.top_k > 0) n = min(n, row.top_k);
    if (row.top_p < 1.0f) {
      sum_list(n);
      const float need = row.top_p * (complete ? sh.masses[n - 1] : total);
      const int last = block_first(sh.masses, n, 0.0f, need, &sh.found);
      if (last >= n && !complete) return false;
      n = min(n, last + 1);
    }
    cut = {entry_score(sh.list[n - 1]), entry_id(sh.list[n - 1])};
    kept = n;
    return true;
  }

  // Mass of the largest of each slot that reaches `bound`: most of what a list of all logits there would hold.
  __device__ __forceinline__ float mass_of_slots(float bound) const {
    float sum = 0.0f;
    for (int slot = threadIdx.x; slot < slot_count; slot += kBlock) {
      if (slots[slot] >= bound) sum += mass(z_of(slots[slot]));
    }
    return block_sum(sum, sh.scratch);
  }

  __device__ __forceinline__ int first_below(int n, float floor_z) {
    __syncthreads();
    if (threadIdx.x == 0) sh.found = n;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kBlock) {
      if (entry_score(sh.list[i]) < floor_z) atomicMin(&sh.found, i);
    }
    __syncthreads();
    return max(sh.found, 1);
  }

  // The id up to which `wanted` of the ids with exactly this z lie. Ids ascend tile by tile.
  __device__ __forceinline__ int tie_id(float z, uint32_t wanted) {
    uint32_t before = 0;
    for (int base = 0; base < columns; base += kBins) {
      __syncthreads();
      for (int i = threadIdx.x; i < kBins; i += kBlock) {
        const int id = base + i;
        bool equal = false;
        if (id < columns) {
          const float x = modified_at(a, row.row, *touched, kMods, id, widen(logits[id]));
          equal = x > negative_infinity<float>() && z_of(x) == z;
        }
        sh.counts[i] = equal;
      }
      block_scan(sh.counts, sh.scratch_counts);
      const uint32_t here = sh.counts[kBins - 1];
      if (before + here >= wanted) return base + block_first(sh.counts, kBins, before, wanted, &sh.found);
      before += here;
    }
    return columns;
  }

  // Radix select: the k-th largest z, ties to the lower id. Digits of 11, 11 and 10 bits from the top.
  __device__ __forceinline__ Cut top_k_cut() {
    uint32_t prefix = 0, need = static_cast<uint32_t>(row.top_k), equal = 0;
    for (int digit = 0; digit < 3; ++digit) {
      const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
      const uint32_t last = (1u << bits) - 1;
      __syncthreads();
      for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
      __syncthreads();
      each_z([&](float z, int) {
        const uint32_t key = ordered_key(z);
        if (digit == 0 || key >> (shift + bits) == prefix) atomicAdd(&sh.counts[last - (key >> shift & last)], 1u);
      });
      block_scan(sh.counts, sh.scratch_counts);
      const int bin = block_first(sh.counts, kBins, 0u, need, &sh.found);
      if (bin >= kBins) return {negative_infinity<float>(), columns};  // fewer than k candidates
      const uint32_t above = bin ? sh.counts[bin - 1] : 0u;
      equal = sh.counts[bin] - above;
      need -= above;
      prefix = prefix << bits | (last - static_cast<uint32_t>(bin));
      __syncthreads();
    }
    const float z = from_key(prefix);
    return {z, need < equal ? tie_id(z, need) : columns};
  }

  // The smallest set of survivors of `floor` that reaches top_p of their mass.
  __device__ __forceinline__ Cut top_p_cut(Cut floor) {
    float all = total;  // of the pass over all logits, where nothing else cuts
    if (row.top_k > 0 || row.min_p > 0.0f) {
      all = 0.0f;
      each_z([&](float z, int id) { all += floor.keeps(z, id) ? mass(z) : 0.0f; });
      all = block_sum(all, sh.scratch);
    }
    const float need = row.top_p * all;
    float high = z_max, low = fmaxf(floor.z, z_max - kFar), above = 0.0f;
    for (int round = 0; round < 64 && high > low; ++round) {
      const float per_z = (kBins - 1) / (high - low);
      const auto bin_of = [&](float z) { return static_cast<int>(fminf((high - z) * per_z, kBins - 1.0f)); };
      __syncthreads();
      for (int i = threadIdx.x; i < kBins; i += kBlock) sh.counts[i] = 0;
      __syncthreads();
      each_z([&](float z, int id) {
        if (z <= high && z >= low && floor.keeps(z, id)) atomicAdd(&sh.counts[bin_of(z)], 1u);
      });
      const int2 range = nucleus_bins(high, per_z, above, need);
      if (range.x >= kBins) return floor;  // the mass is reached by the last survivor only
      float more = 0.0f, low_seen = high, high_seen = negative_infinity<float>();
      if (threadIdx.x == 0) sh.listed = 0;
      __syncthreads();
      each_z([&](float z, int id) {
        if (z > high || z < low || !floor.keeps(z, id)) return;
        const int bin = bin_of(z);
        if (bin < range.x) more += mass(z);
        if (bin < range.x || bin > range.y) return;
        low_seen = fminf(low_seen, z);
        high_seen = fmaxf(high_seen, z);
        push(z, id);
      });
      above += block_sum(more, sh.scratch);
      low = -block_max(-low_seen, sh.scratch);
      high = block_max(high_seen, sh.scratch);
      const int listed = sh.listed;
      if (listed <= kList) return listed_cut(listed, above, need, floor);
    }
    const float wanted = ceilf((need - above) / mass(high));
    return {high, tie_id(high, static_cast<uint32_t>(fminf(fmaxf(wanted, 1.0f), 2e9f)))};
  }

  __device__ __forceinline__ Cut listed_cut(int listed, float above, float need, Cut floor) {
    if (listed == 0) return floor;
    block_sort(sh.list, listed);
    sum_list(listed);
    const int last = min(block_first(sh.masses, listed, above, need, &sh.found), listed - 1);
    return {entry_score(sh.list[last]), entry_id(sh.list[last])};
  }

  // The bins among which the cut lies, from bounds on each bin's mass: sh.counts -> (first, last); first = kBins if
  // even the upper bounds do not reach `need`. The bounds carry 2e-5 for the rounding of bins, masses and sums.
  __device__ __forceinline__ int2 nucleus_bins(float high, float per_z, float above, float need) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kBlock) {
      const float count = static_cast<float>(sh.counts[i]);
      sh.masses[i] = count * mass(high - i / per_z) * (1.0f + 2e-5f);
      sh.more_masses[i] = count * mass(high - (i + 1) / per_z) * (1.0f - 2e-5f);
    }
    block_scan(sh.masses, sh.scratch);
    const int first = block_first(sh.masses, kBins, above, need, &sh.found);
    block_scan(sh.more_masses, sh.scratch);
    const int last = block_first(sh.more_masses, kBins, above, need, &sh.found);
    return make_int2(first, min(last, kBins - 1));
  }

  // Two reads of the row where one number cuts it: min-p alone, or a nucleus too wide to list.
  __device__ __forceinline__ void run() {
    const bool min_p = row.min_p > 0.0f, top_p = row.top_p < 1.0f, alone = row.top_k == 0 && min_p != top_p;
    Cut cut{min_p_floor(), columns};
    bool use_slots = true;
    if (!(alone && min_p)) {
      cut = {negative_infinity<float>(), columns};
      if (!(alone && row.top_p * total > kListable) && narrow(cut)) return draw_listed(cut);
      if (alone && draw_nucleus()) return;
      cut = slow_cut();
      use_slots = !alone;  // the window's list lies where the slots were
    }
    draw(cut, use_slots);
  }

  __device__ __forceinline__ Cut slow_cut() {
    Cut cut{negative_infinity<float>(), columns};
    cut = {min_p_floor(), columns};
    if (row.top_k > 0) {
      const Cut by_count = top_k_cut();
      if (by_count.z >= cut.z) cut = by_count;
    }
    return row.top_p < 1.0f ? top_p_cut(cut) : cut;
  }

  // What a pass of drawing keeps: x > sure, or x >= least where keeps() says so.
  struct Kept {
    Cut cut;
    float least, sure;
  };

  __device__ __forceinline__ Kept kept_by(Cut cut) const {
    if (cut.z == negative_infinity<float>()) return {cut, cut.z, cut.z};  // all that is a candidate
    const float x = cut.z * row.temperature, slack = 1e-6f * fabsf(x);
    return {cut, x - slack, x + slack};
  }

  __device__ __forceinline__ bool keeps(const Kept& kept, float x, int id) const {
    return x > kept.sure || (x >= kept.least && kept.cut.keeps(z_of(x), id));
  }

  // Logits of a group that a pass may draw, -inf for the rest.
  __device__ __forceinline__ void again(const Kept& kept, int group, float (&x)[8]) const {
    unpack8(load8(logits, group, columns, aligned), x);
    modify8<kMods>(a, row.row, touched, group, x);
    drop(kept, group, x);
  }

  __device__ __forceinline__ void drop(const Kept& kept, int group, float (&x)[8]) const {
    bool close = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(x[i] >= kept.least)) x[i] = negative_infinity<float>();
      close |= x[i] <= kept.sure && x[i] > negative_infinity<float>();
    }
    if (!close) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!keeps(kept, x[i], group * 8 + i)) x[i] = negative_infinity<float>();
    }
  }

  // A strip of a drawing pass, as Argmax::strip.
  template <typename F, typename G, typename O>
  __device__ __forceinline__ void draw_strip(int first, const float (&s8)[kStripGroups], float y_max, Argmax& argmax,
                                             F&& logits_of, G&& sure_of, O&& take_up) {
    const float before = fmaxf(argmax.bound, bound_of(read_bound(&sh.bound)));
    argmax.bound = before;
    argmax.template strip<kStripGroups>(row, first, s8, per_unit, y_max, logits_of, sure_of,
                                        [&](float bound) { return share_bound(&sh.bound, bound); }, take_up);
    if (threadIdx.x % 32 == 0 && argmax.bound > before) atomicMax(&sh.bound, ordered_key(argmax.bound));
  }

  // One pass of noise over what `kept` keeps; returns the lane's sum of masses.
  __device__ __forceinline__ float draw_pass(const Kept& kept, bool use_slots, Argmax& argmax) {
    const float y_max = x_max * per_unit;
    float sum = 0.0f;
    for (int s = threadIdx.x / 32; s < strips_of(columns); s += kBlockWarps) {
      const int lane = static_cast<int>(threadIdx.x % 32), first = first_of(s);
      const float top = fmaxf(slots[s * 64 + lane], slots[s * 64 + 32 + lane]);
      if (use_slots && !__any_sync(kAll, top >= kept.least)) continue;
      Held<T> held;
      held.load(logits, first, columns, aligned && (s + 1) * kStrip <= columns);
      if (!kMods && (s + 1) * kStrip > a.limit) held.cut_off(first, a.limit);
      float s8[kStripGroups];
#pragma unroll
      for (int j = 0; j < kStripGroups; ++j) {
        float x[8];
        unpack8(held.raw[j], x);
        if constexpr (kMods) modify8<true>(a, row.row, touched, first + 32 * j, x);
        drop(kept, first + 32 * j, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = exp2_fast(fmaf(x[i], per_unit, -y_max));
        s8[j] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
      }
      sum += (s8[0] + s8[1]) + (s8[2] + s8[3]);
      const auto logits_of = [&](int g, float(&x)[8]) { again(kept, g, x); };
      draw_strip(first, s8, y_max, argmax, logits_of, logits_of,
                 [&](float x, uint32_t bits, int at) { argmax.offer(row, x, bits, at); });
    }
    return sum;
  }

  __device__ __forceinline__ void start_pass() {
    __syncthreads();
    if (threadIdx.x == 0) sh.bound = 0, sh.listed = 0, sh.undecided = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void finish(const Argmax& argmax, Cut cut, float whole_sum) {
    const Best mine = warp_best(argmax.best(row));
    if (threadIdx.x % 32 == 0) sh.bests[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) write(cut, make_float2(x_max * per_unit, whole_sum));
  }

  // Draws among the kept ids and writes the row.
  __device__ __forceinline__ void draw(Cut cut, bool use_slots) {
    Argmax argmax;
    start_pass();
    const float sum = draw_pass(kept_by(cut), use_slots, argmax);
    finish(argmax, cut, block_sum(sum, sh.scratch));
  }

  // A wide nucleus, top-p alone: sample_nucleus.cuh.
  struct Window;
  __device__ __forceinline__ bool draw_nucleus();
  __device__ __forceinline__ float2 place_window(float tail);
  __device__ __forceinline__ float window_pass(const Window& window, Argmax& argmax);
  __device__ __forceinline__ bool window_cut(const Window& window, int listed, float above, float need, Cut& cut,
                                             float& mass_kept);

  // What narrow() kept stands in the list, sorted: no second read of the row.
  __device__ __forceinline__ void draw_listed(Cut cut) {
    Argmax argmax;
    argmax.bound = Argmax::least_of_max(x_max * per_unit);
    const float most = argmax.scale(x_max * per_unit) * 1.0001f;  // mass() and the bound's p may differ by 1e-6
    float sum = 0.0f;
    for (int i = threadIdx.x; i < kept; i += kBlock) {
      const int id = entry_id(sh.list[i]);
      const float p = mass(entry_score(sh.list[i]));
      sum += p;
      const uint32_t word = row.word(id);
      if (!(static_cast<float>(word) <= p * most && p > 0.0f)) continue;
      argmax.offer(row, modified_at(a, row.row, *touched, kMods, id, widen(logits[id])), word, id);
    }
    finish(argmax, cut, block_sum(sum, sh.scratch));
  }

  __device__ __forceinline__ void write(Cut cut, float2 sum) {
    Best best = sh.bests[0];
    for (int i = 1; i < kBlockWarps; ++i) {
      if (beats(sh.bests[i], best)) best = sh.bests[i];
    }
    int64_t token = best.id;
    float x = best.x;
    if (a.forced && a.forced[row.row] >= 0) {
      token = a.forced[row.row];
      x = modified_at(a, row.row, *touched, kMods, static_cast<int>(token), widen(logits[token]));
      if (!cut.keeps(z_of(x), static_cast<int>(token))) x = negative_infinity<float>();
    }
    a.tokens[row.row] = token;
    a.logprobs[row.row] = log_probability(x, per_unit, sum);
    write_raw(a, row.row, logits, token, raw);
  }

  __device__ __forceinline__ void fail() {
    if (threadIdx.x != 0) return;
    a.tokens[row.row] = -1;
    a.logprobs[row.row] = __uint_as_float(0x7fc00000u);
    write_raw(a, row.row, logits, -1, raw);
  }
};

template <typename T, bool kMods>
__global__ void __launch_bounds__(kBlock, 2) sample_filtered(const __grid_constant__ SampleArgs a) {
  extern __shared__ float slots[];
  __shared__ FilterShared shared;
  __shared__ Touched touched;
  const int r = blockIdx.x;
  const Row row = load_row(a, r);
  if (!row.filtered()) return;  // sample_rows draws it
  if constexpr (kMods) fill_touched(a, r, touched);
  const T* logits = static_cast<const T*>(a.logits) + r * a.row_stride;
  const int columns = a.vocab;
  FilteredRow<T, kMods> state{a, row, &touched, logits, shared, slots,
                                    reinterpret_cast<uintptr_t>(logits) % 16 == 0, columns, slots_of(columns),
                                    kLog2e / row.temperature};
  if (!state.scan_all()) {
    state.fail();
    return;
  }
  state.run();
}

}  // namespace tlt::cuda
