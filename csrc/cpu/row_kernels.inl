// Included once per instruction set by row_kernels.cpp, inside a namespace and under #pragma GCC target; hence no
// includes and no templates here. TLT_ISA_LEVEL is 512, 256 or 0 (g++ lexes ahead of that pragma, so __AVX2__ would
// not be set yet). Loops run over fixed-size blocks so that the compiler vectorises them.

constexpr float kInf = __builtin_inff();

// ---------------------------------------------------------------------------------------------------------- Philox
// words[i] belongs to id 4 * first_counter + i, i < 64. Intrinsics: gcc 12 leaves the plain loop scalar (3.7 ns a word
// against 0.5). 64-bit lanes hold 32-bit words; the multiplier reads the low half only, so the high halves need no
// clearing until the end.
constexpr int64_t kWords = 64;

#if TLT_ISA_LEVEL == 512
TLT_INLINE void block_words(const NoiseId& id, uint32_t first_counter, uint32_t* words) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i low = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const uint32_t block = first_counter + (id.purpose << 24);
  __m512i c0[2], c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    c0[h] = _mm512_set1_epi64(id.position), c2[h] = _mm512_set1_epi64(id.sample), c3[h] = _mm512_set1_epi64(id.segment);
    c1[h] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(block) + 8 * h), lanes);
  }
  uint32_t k0 = static_cast<uint32_t>(id.key), k1 = static_cast<uint32_t>(id.key >> 32);
  for (int round = 0; round < 10; ++round) {
    const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
    for (int h = 0; h < 2; ++h) {
      const __m512i p0 = _mm512_mul_epu32(c0[h], m0), p1 = _mm512_mul_epu32(c2[h], m1);
      c0[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), c1[h]), key0);
      c2[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), c3[h]), key1);
      c1[h] = p1, c3[h] = p0;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const __m512i front = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), back = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  for (int h = 0; h < 2; ++h) {
    const __m512i p01 = _mm512_or_si512(_mm512_and_si512(c0[h], low), _mm512_slli_epi64(c1[h], 32));
    const __m512i p23 = _mm512_or_si512(_mm512_and_si512(c2[h], low), _mm512_slli_epi64(c3[h], 32));
    _mm512_storeu_si512(words + 32 * h, _mm512_permutex2var_epi64(p01, front, p23));
    _mm512_storeu_si512(words + 32 * h + 16, _mm512_permutex2var_epi64(p01, back, p23));
  }
}
#elif TLT_ISA_LEVEL == 256
TLT_INLINE void block_words(const NoiseId& id, uint32_t first_counter, uint32_t* words) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
  const __m256i lanes = _mm256_set_epi64x(3, 2, 1, 0);
  const uint32_t block = first_counter + (id.purpose << 24);
  for (int half = 0; half < 2; ++half) {  // two registers at a time: four would spill
    __m256i c0[2], c1[2], c2[2], c3[2];
    for (int h = 0; h < 2; ++h) {
      c0[h] = _mm256_set1_epi64x(id.position), c2[h] = _mm256_set1_epi64x(id.sample);
      c3[h] = _mm256_set1_epi64x(id.segment);
      c1[h] = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(block) + 8 * half + 4 * h), lanes);
    }
    uint32_t k0 = static_cast<uint32_t>(id.key), k1 = static_cast<uint32_t>(id.key >> 32);
    for (int round = 0; round < 10; ++round) {
      const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
      for (int h = 0; h < 2; ++h) {
        const __m256i p0 = _mm256_mul_epu32(c0[h], m0), p1 = _mm256_mul_epu32(c2[h], m1);
        c0[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[h]), key0);
        c2[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[h]), key1);
        c1[h] = p1, c3[h] = p0;
      }
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int h = 0; h < 2; ++h) {
      const __m256i p01 = _mm256_or_si256(_mm256_and_si256(c0[h], low), _mm256_slli_epi64(c1[h], 32));
      const __m256i p23 = _mm256_or_si256(_mm256_and_si256(c2[h], low), _mm256_slli_epi64(c3[h], 32));
      const __m256i even = _mm256_unpacklo_epi64(p01, p23), odd = _mm256_unpackhi_epi64(p01, p23);
      __m256i* out = reinterpret_cast<__m256i*>(words + 32 * half + 16 * h);
      _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
}
#else
TLT_INLINE void block_words(const NoiseId& id, uint32_t first_counter, uint32_t* words) {
  for (int i = 0; i < kWords / 4; ++i) {
    const Words4 four = noise_words(id.key, id.position, first_counter + i, id.purpose, id.sample, id.segment);
    memcpy(words + 4 * i, four.x, sizeof four.x);
  }
}
#endif

void noise(const NoiseId& id, uint32_t first_counter, int64_t n, float* out) {
  uint32_t words[kWords];
  float g[kWords];
  for (int64_t start = 0; start < n; start += kWords) {
    block_words(id, first_counter + static_cast<uint32_t>(start / 4), words);
    for (int i = 0; i < kWords; ++i) g[i] = gumbel_from_word(words[i]);
    const int64_t count = n - start < kWords ? n - start : kWords;
    memcpy(out + start, g, count * sizeof(float));
  }
}

// ---------------------------------------------------------------------------------------------------- rows of logits
void widen_bf16(const uint16_t* in, float* out) {
  for (int i = 0; i < kPad; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    memcpy(out + i, &bits, sizeof bits);
  }
}

void widen_f16(const uint16_t* in, float* out) {
  for (int i = 0; i < kPad; ++i) {
    // As an fp32 the shifted magnitude is too small by 2^112, subnormals included: one exact product repairs both.
    const uint32_t magnitude = static_cast<uint32_t>(in[i] & 0x7fff) << 13;
    float scaled;
    memcpy(&scaled, &magnitude, sizeof scaled);
    scaled *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    bits |= (in[i] & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // inf and NaN keep their mantissa
    bits |= static_cast<uint32_t>(in[i] & 0x8000) << 16;
    memcpy(out + i, &bits, sizeof bits);
  }
}

TLT_INLINE void widen(const void* logits, Dtype dtype, int64_t start, float* out) {
  if (dtype == Dtype::f32) {
    memcpy(out, static_cast<const float*>(logits) + start, kPad * sizeof(float));
  } else if (dtype == Dtype::bf16) {
    widen_bf16(static_cast<const uint16_t*>(logits) + start, out);
  } else {
    widen_f16(static_cast<const uint16_t*>(logits) + start, out);
  }
}

TLT_INLINE float lanes_max(const float* lanes) {
  float best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

float row_max(const float* z, int64_t padded) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = -kInf;
  for (int64_t start = 0; start < padded; start += 16) {
    for (int i = 0; i < 16; ++i) lanes[i] = z[start + i] > lanes[i] ? z[start + i] : lanes[i];
  }
  return lanes_max(lanes);
}

bool load(const void* logits, Dtype dtype, int64_t n, float* z, float* max) {
  float lanes[16];
  int32_t bad[16] = {0};
  for (int i = 0; i < 16; ++i) lanes[i] = -kInf;
  for (int64_t start = 0; start < n; start += kPad) {
    float* out = z + start;
    if (n - start >= kPad) {
      widen(logits, dtype, start, out);
    } else {
      const int64_t rest = n - start;
      uint32_t tail[kPad] = {0};
      const int64_t size = dtype == Dtype::f32 ? 4 : 2;
      memcpy(tail, static_cast<const char*>(logits) + start * size, rest * size);
      widen(tail, dtype, 0, out);
      for (int64_t i = rest; i < kPad; ++i) out[i] = -kInf;
    }
    for (int64_t row = 0; row < kPad; row += 16) {
      for (int i = 0; i < 16; ++i) {
        const float x = out[row + i];
        bad[i] |= !(x < kInf);
        lanes[i] = x > lanes[i] ? x : lanes[i];
      }
    }
  }
  int32_t any = 0;
  for (int i = 0; i < 16; ++i) any |= bad[i];
  *max = lanes_max(lanes);
  return any == 0;
}

void mask(float* z, int64_t n, const uint32_t* bits) {
  for (int64_t start = 0; start < n; start += 32) {
    const uint32_t word = bits[start / 32];
    for (int i = 0; i < 32; ++i) z[start + i] = (word >> i) & 1u ? z[start + i] : -kInf;
  }
}

float divide(float* z, int64_t padded, float temperature) {
  if (temperature != 1.0f) {
    for (int64_t i = 0; i < padded; ++i) z[i] = z[i] / temperature;
  }
  return row_max(z, padded);
}

void cut(float* z, int64_t padded, float z_cut, int64_t id_cut) {
  for (int64_t i = 0; i < padded; ++i) z[i] = z[i] >= z_cut ? z[i] : -kInf;
  for (int64_t i = id_cut + 1; i < padded; ++i) z[i] = z[i] > z_cut ? z[i] : -kInf;
}

// exp for x <= 0: 2^k * p(r), |r| <= ln2 / 2; the split of ln2 and the polynomial are Cephes' expf. k * 0.693359375 is
// exact (9 bits each), so no fused multiply-add is needed.
TLT_INLINE float exp_lane(float x) {
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float k = shifted - 12582912.0f;
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  uint32_t bits, steps;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&steps, &shifted, sizeof steps);
  bits += steps << 23;
  memcpy(&p, &bits, sizeof p);
  return x < -87.0f ? 0.0f : p;
}

// 16 float lanes over 256 ids, added to 16 double lanes, then a fixed tree: fp32 rounding stays at 16 terms.
double exp_sum(const float* z, int64_t padded, float max) {
  double sums[16] = {0};
  for (int64_t start = 0; start < padded; start += kPad) {
    float lanes[16] = {0};
    for (int64_t row = 0; row < kPad; row += 16) {
      for (int i = 0; i < 16; ++i) lanes[i] += exp_lane(z[start + row + i] - max);
    }
    for (int i = 0; i < 16; ++i) sums[i] += static_cast<double>(lanes[i]);
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

void group_max(const float* z, int64_t padded, float* out) {
  for (int64_t start = 0; start < padded; start += kPad) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = z[start + i];
    for (int64_t row = 16; row < kPad; row += 16) {
      for (int i = 0; i < 16; ++i) lanes[i] = z[start + row + i] > lanes[i] ? z[start + row + i] : lanes[i];
    }
    memcpy(out + start / kGroup, lanes, sizeof lanes);
  }
}

TLT_INLINE float max64(const float* z) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    const float a = z[i] > z[i + 16] ? z[i] : z[i + 16], b = z[i + 32] > z[i + 48] ? z[i + 32] : z[i + 48];
    lanes[i] = a > b ? a : b;
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

int64_t collect(const float* z, int64_t padded, float threshold, Entry* out) {
  int64_t count = 0;
  for (int64_t start = 0; start < padded; start += 64) {
    const float best = max64(z + start);
    if (!(best >= threshold && best > -kInf)) continue;
    for (int64_t i = start; i < start + 64; ++i) {
      if (z[i] >= threshold && z[i] > -kInf) out[count++] = {z[i], static_cast<int32_t>(i)};
    }
  }
  return count;
}

int64_t find(const float* z, int64_t padded, float max) {
  for (int64_t start = 0; start < padded; start += 64) {
    int32_t any = 0;
    for (int i = 0; i < 64; ++i) any |= z[start + i] == max;
    if (!any) continue;
    for (int64_t i = start;; ++i) {
      if (z[i] == max) return i;
    }
  }
  return -1;
}

// ---------------------------------------------------------------------------------------- perturbed argmax, few logs
// Upper bound of g from the bits of w, without a log. Let w = 2^e (1 + m), 0 <= m < 1, and I = 127 * 2^23 - bits(w), so
// that I * 2^-23 = -(e + m) exactly. log2(1 + m) >= m on [0, 1] (concave, equal at both ends), hence
//   G = -log(-log1p(-w)) <= -log(w) = -ln2 * (e + log2(1 + m)) <= ln2 * 2^-23 * I,
// the first step as -log1p(-w) >= w. In floats: I -> float, the constant and the product each err by at most 2^-24
// relative, 3 * 2^-24 * 23 < 4.2e-6 in all; the sum below and the rounding of g itself by 1e-6 each. 1e-5 covers them.
// check_words compares the bound with g for all 2^32 words.
TLT_INLINE float gumbel_bound(uint32_t x) {
  const float w = uniform_from_word(x);
  int32_t bits;
  memcpy(&bits, &w, sizeof bits);
  return static_cast<float>(0x3f800000 - bits) * 8.262958405176314e-8f + 1e-5f;
}

// Safe skips. Floating-point addition is monotone: g <= b implies fl(z + g) <= fl(z + b). So an id with
// fl(z + b) < best cannot win or tie, and a block with fl(max z + kGumbelMax) < best holds none that can. `best` starts
// at fl(max + kGumbelMin), which the id of the largest z reaches by the same argument, with no id attached; barred ids
// have z + b = -inf < best.
int64_t argmax_noise(const float* z, int64_t padded, const NoiseId& id, float max, int64_t first, bool skip) {
  uint32_t words[kWords];
  float bound[kWords];
  float best = max + kGumbelMin;
  int64_t token = padded;
  const int64_t blocks = padded / kWords, hot = first / kWords;
  for (int64_t step = 0; step < blocks; ++step) {  // the block of the largest z first: it lifts `best` early
    const int64_t block = step == 0 ? hot : step <= hot ? step - 1 : step;
    const float* zb = z + block * kWords;
    if (skip && max64(zb) + kGumbelMax < best) continue;
    block_words(id, static_cast<uint32_t>(block * (kWords / 4)), words);
    for (int i = 0; i < kWords; ++i) bound[i] = zb[i] + gumbel_bound(words[i]);
    if (skip && max64(bound) < best) continue;
    for (int i = 0; i < kWords; ++i) {
      if (skip ? bound[i] < best : zb[i] == -kInf) continue;
      const float score = zb[i] + gumbel_from_word(words[i]);
      const int64_t candidate = block * kWords + i;
      if (score > best || (score == best && candidate < token)) best = score, token = candidate;
    }
  }
  return token;
}

// Entries with z + g >= threshold among the n ids from `start` on (both multiples of kWords), in id order, barred ids
// left out; returns how many. The same skips.
int64_t collect_noise(const float* z, int64_t start, int64_t n, const NoiseId& id, float threshold, Entry* out) {
  uint32_t words[kWords];
  float bound[kWords];
  int64_t count = 0;
  for (int64_t at = start; at < start + n; at += kWords) {
    const float most = max64(z + at);
    if (most == -kInf || most + kGumbelMax < threshold) continue;
    block_words(id, static_cast<uint32_t>(at / 4), words);
    for (int i = 0; i < kWords; ++i) bound[i] = z[at + i] + gumbel_bound(words[i]);
    if (max64(bound) < threshold) continue;
    for (int i = 0; i < kWords; ++i) {
      if (z[at + i] == -kInf || bound[i] < threshold) continue;
      const float score = z[at + i] + gumbel_from_word(words[i]);
      if (score >= threshold) out[count++] = {score, static_cast<int32_t>(at + i)};
    }
  }
  return count;
}

// ------------------------------------------------------------------------------------------------------------ checks
void check_words(uint64_t first, uint64_t n, WordReport* report) {
  constexpr int64_t kChunk = 1024;
  float g[kChunk];
  float previous = first == 0 ? kInf : gumbel_from_word(static_cast<uint32_t>(first - 1));
  for (uint64_t start = first; start < first + n; start += kChunk) {
    int32_t increases = 0, not_finite = 0, not_bounded = 0;
    float low = kInf, high = -kInf;
    for (int i = 0; i < kChunk; ++i) g[i] = gumbel_from_word(static_cast<uint32_t>(start) + static_cast<uint32_t>(i));
    for (int i = 0; i < kChunk; ++i) {
      not_bounded += !(g[i] <= gumbel_bound(static_cast<uint32_t>(start) + static_cast<uint32_t>(i)));
      not_finite += !(g[i] < kInf && g[i] > -kInf);
    }
    for (int i = 1; i < kChunk; ++i) increases += !(g[i] <= g[i - 1]);
    increases += !(g[0] <= previous);
    previous = g[kChunk - 1];
    for (int i = 0; i < kChunk; ++i) {
      low = g[i] < low ? g[i] : low;
      high = g[i] > high ? g[i] : high;
    }
    report->count += kChunk;
    report->increases += increases, report->not_finite += not_finite, report->not_bounded += not_bounded;
    report->lowest = low < report->lowest ? low : report->lowest;
    report->highest = high > report->highest ? high : report->highest;
  }
}

void count_above(const float* g, int64_t n, const float* thresholds, int count, int64_t* counts) {
  for (int k = 0; k < count; ++k) {
    int32_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += g[i] > thresholds[k];
    counts[k] += above;
  }
}

const RowKernels kernels = {TLT_ISA_LEVEL == 512 ? "avx512" : TLT_ISA_LEVEL == 256 ? "avx2" : "baseline",
                            noise, load, mask, divide, cut, exp_sum, group_max, collect, find, argmax_noise,
                            collect_noise, check_words, count_above};
