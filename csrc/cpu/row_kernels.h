// Loops over one row of logits or noise. One source (row_kernels.inl) is compiled for AVX-512, AVX2 and the baseline;
// row_kernels() picks at run time. Lane counts and the order of sums are fixed in the source and nothing fuses a
// multiply-add, so results are bit-identical on all of them.
#pragma once
#include <cstdint>
#include <string>

namespace tlt {

constexpr int64_t kPad = 256;           // rows in scratch are padded with -inf to a multiple of this
constexpr int64_t kGroup = 16;          // ids in one group of group_max
constexpr float kGumbelMax = 22.9f;     // bounds of the noise over all 2^32 words, proved by check_all_words
constexpr float kGumbelMin = -2.82f;

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// Whose noise: the 64-bit key and the counter words that do not depend on the id.
struct NoiseId {
  uint64_t key;
  uint32_t position, sample, segment, purpose;
};

struct Entry {
  float z;
  int32_t id;
};

struct WordReport {
  uint64_t count, not_finite, increases, not_bounded;
  float lowest, highest;
};

struct RowKernels {
  const char* isa;
  // out[i] = g of id 4 * first_counter + i, i < n.
  void (*noise)(const NoiseId& id, uint32_t first_counter, int64_t n, float* out);
  // z = the logits as fp32, padded; *max their maximum. False when one is NaN or +inf.
  bool (*load)(const void* logits, Dtype dtype, int64_t n, float* z, float* max);
  // Bars the ids below n whose bit is clear.
  void (*mask)(float* z, int64_t n, const uint32_t* bits);
  // z /= temperature in place; returns the new maximum. Temperature 1 changes nothing.
  float (*divide)(float* z, int64_t padded, float temperature);
  // Bars everything that comes after (z_cut, id_cut) in the order (z descending, id ascending).
  void (*cut)(float* z, int64_t padded, float z_cut, int64_t id_cut);
  // Sum of exp(z - max); barred ids add 0. Relative error below 1e-6.
  double (*exp_sum)(const float* z, int64_t padded, float max);
  // out[padded / kGroup]: maxima of disjoint groups of kGroup ids.
  void (*group_max)(const float* z, int64_t padded, float* out);
  // Entries with z >= threshold and z > -inf in id order; returns how many.
  int64_t (*collect)(const float* z, int64_t padded, float threshold, Entry* out);
  // The lowest id whose z equals max.
  int64_t (*find)(const float* z, int64_t padded, float max);
  // The perturbed argmax over ids with z > -inf. first: find(max). skip = false takes every log (tests).
  int64_t (*argmax_noise)(const float* z, int64_t padded, const NoiseId& id, float max, int64_t first, bool skip);
  // Entries with z > -inf and z + g >= threshold of the n ids from `start` on (multiples of 64), in id order.
  int64_t (*collect_noise)(const float* z, int64_t start, int64_t n, const NoiseId& id, float threshold, Entry* out);
  // g of words first .. first + n - 1, compared with its predecessor's and with the argmax's bound.
  void (*check_words)(uint64_t first, uint64_t n, WordReport* report);
  // counts[k] += how many of g[0 .. n) exceed thresholds[k].
  void (*count_above)(const float* g, int64_t n, const float* thresholds, int count, int64_t* counts);
};

const RowKernels& row_kernels();

// Switches to "avx512", "avx2" or "baseline"; false when this CPU cannot. For tests: results are the same.
bool use_isa(const std::string& isa);

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87. The same value as in exp_sum.
float exp_nonpositive(float x);

}  // namespace tlt
