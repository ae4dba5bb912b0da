// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the float form of the
// noise. The one definition that the CPU twin and the CUDA kernels share: words and w are bit-identical everywhere.
#pragma once
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TLT_HD __host__ __device__ __forceinline__
#else
#define TLT_HD inline
#endif

namespace tlt {

struct Words4 {
  uint32_t x[4];
};

TLT_HD uint32_t mulhi32(uint32_t a, uint32_t b) { return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32); }

TLT_HD Words4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint32_t hi0 = mulhi32(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const uint32_t hi1 = mulhi32(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    const uint32_t n0 = hi1 ^ c1 ^ k0, n2 = hi0 ^ c3 ^ k1;
    c0 = n0, c1 = lo1, c2 = n2, c3 = lo0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// DESIGN of the counter: (absolute position t, v / 4 + 2^24 * purpose, sample index, segment); word v % 4.
TLT_HD Words4 noise_words(uint64_t key, uint32_t t, uint32_t v_block, uint32_t purpose, uint32_t sample,
                          uint32_t segment) {
  return philox4x32_10(t, v_block + (purpose << 24), sample, segment, key);
}

// w in (0, 1): w = min((float(x) + 0.5) * 2^-32, 1 - 2^-24). Every operation is one IEEE rounding.
TLT_HD float uniform_from_word(uint32_t x) {
  const float w = (static_cast<float>(x) + 0.5f) * 0x1p-32f;
  return w < 0x1.fffffep-1f ? w : 0x1.fffffep-1f;
}

// Standard Gumbel noise from a word, in [-2.82, 22.9]: the winning end (w near 0) keeps fp32's fine resolution.
TLT_HD float gumbel_from_word(uint32_t x) { return -logf(-log1pf(-uniform_from_word(x))); }

}  // namespace tlt
