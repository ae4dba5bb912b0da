// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the float form of the
// noise. The one definition that the CPU twin and the CUDA kernels share: words, w and, because every step is a single
// IEEE operation in a fixed order (build with -ffp-contract=off / --fmad=false), g too are bit-identical everywhere.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TLT_HD __host__ __device__ __forceinline__
#else
#define TLT_HD inline __attribute__((always_inline))
#endif

namespace tlt {

struct Words4 {
  uint32_t x[4];
};

TLT_HD Words4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    // Both halves from one 64-bit product: taken apart, nvcc multiplies twice (6 instead of 4 instructions a round).
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = static_cast<uint32_t>(p1), c2 = n2, c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The counter: (absolute position t, v / 4 + 2^24 * purpose, sample index, segment); id v takes word v % 4.
TLT_HD Words4 noise_words(uint64_t key, uint32_t t, uint32_t v_block, uint32_t purpose, uint32_t sample,
                          uint32_t segment) {
  return philox4x32_10(t, v_block + (purpose << 24), sample, segment, key);
}

// The words of one row's noise. All its counters differ in v / 4 alone, so half of the first three rounds is the row's:
// 16 wide products a counter instead of 20, and what is left of the row are 18 words that fit uniform registers.
struct RowWords {
  uint32_t a, b, c, d, e;  // what the rounds 1, 2, 3, 3, 4 add to the counter's own part
  uint32_t k0[7], k1[6];   // keys of the rounds 4 to 10 and 5 to 10

  TLT_HD static uint32_t high(uint32_t x, uint32_t m) { return static_cast<uint32_t>((uint64_t(x) * m) >> 32); }

  TLT_HD static RowWords of(uint64_t key, uint32_t t, uint32_t sample, uint32_t segment, uint32_t purpose) {
    constexpr uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
    const uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    RowWords r;
    r.a = high(sample, m1) ^ key0 ^ (purpose << 24);  // id blocks have 24 bits: the sum with the purpose is an xor
    const uint32_t n1 = sample * m1, n2 = high(t, m0) ^ segment ^ key1, n3 = t * m0;
    r.b = n3 ^ (key1 + w1);
    const uint32_t u0 = high(n2, m1) ^ n1 ^ (key0 + w0), u1 = n2 * m1;
    r.c = u1 ^ (key0 + 2 * w0);
    r.d = high(u0, m0) ^ (key1 + 2 * w1);
    r.e = (u0 * m0) ^ (key1 + 3 * w1);
    for (uint32_t i = 0; i < 7; ++i) r.k0[i] = key0 + (i + 3) * w0;
    for (uint32_t i = 0; i < 6; ++i) r.k1[i] = key1 + (i + 4) * w1;
    return r;
  }

  // noise_words(key, t, block, purpose, sample, segment)
  TLT_HD Words4 words(uint32_t block) const {
    uint64_t p0 = static_cast<uint64_t>(block ^ a) * 0xD2511F53u;
    uint64_t p1 = static_cast<uint64_t>(static_cast<uint32_t>(p0 >> 32) ^ b) * 0xCD9E8D57u;
    uint32_t c0 = static_cast<uint32_t>(p1 >> 32) ^ c, c1 = static_cast<uint32_t>(p1);
    uint32_t c2 = static_cast<uint32_t>(p0) ^ d, c3;
    p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0[0], c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ e, c3 = static_cast<uint32_t>(p0);
    for (int i = 0; i < 6; ++i) {
      p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0[i + 1], c1 = static_cast<uint32_t>(p1);
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1[i], c3 = static_cast<uint32_t>(p0);
    }
    return {{c0, c1, c2, c3}};
  }
};

// w in (0, 1): w = min((float(x) + 0.5) * 2^-32, 1 - 2^-24). Every operation is one IEEE rounding. The minimum is taken
// on the bits (positive floats order as their bits do): a float select kept gcc 12 from vectorising the loops.
TLT_HD float uniform_from_word(uint32_t x) {
  float w = (static_cast<float>(x) + 0.5f) * 2.3283064365386963e-10f;
  uint32_t bits;
  memcpy(&bits, &w, sizeof bits);
  bits = bits < 0x3f7fffffu ? bits : 0x3f7fffffu;
  memcpy(&w, &bits, sizeof w);
  return w;
}

TLT_HD uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TLT_HD double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Natural logarithm of a positive normal double, error below 1 ulp (about 1e-16 relative). The reduction and the
// minimax coefficients are FreeBSD msun's e_log.c; branch-free, without libm, so that loops over it vectorise and CPU
// and GPU agree to the bit.
TLT_HD double log_positive(double x) {
  constexpr uint64_t sqrt_half = 0x3fe6a09e667f3bcdull;
  const uint64_t shifted = bits_of(x) + (0x3ff0000000000000ull - sqrt_half);
  // The exponent as a double without an integer conversion (AVX2 has none for 64 bits): 1.5 * 2^52 + k, less 1.5 * 2^52.
  const double k = double_of(0x4338000000000000ull + (shifted >> 52)) - (6755399441055744.0 + 1023.0);
  const double m = double_of((shifted & 0x000fffffffffffffull) + sqrt_half);  // in [sqrt(1/2), sqrt(2))
  const double f = m - 1.0;
  const double s = f / (2.0 + f), z = s * s, y = z * z;
  const double odd = z * (6.666666666666735130e-01 + y * (2.857142874366239149e-01 +
                     y * (1.818357216161805012e-01 + y * 1.479819860511658591e-01)));
  const double even = y * (3.999999999940941908e-01 + y * (2.222219843214978396e-01 + y * 1.531383769920937332e-01));
  const double half = 0.5 * f * f;
  return k * 6.93147180369123816490e-01 - ((half - (s * (half + (odd + even)) + k * 1.90821492927058770002e-10)) - f);
}

// Standard Gumbel noise from a word, in [-2.82, 22.9]: E = -log1p(-w), g = -log(E). w near 0 wins, where fp32 is
// finest. In double: neighbouring w are at least 6e-8 apart in g and the error is near 1e-15, so g is monotone in x and
// the correctly rounded fp32 value save about one word in 1e8. fp32 logs would have wiggles of an ulp.
TLT_HD float gumbel_from_word(uint32_t x) {
  const double w = static_cast<double>(uniform_from_word(x));
  const double u = 1.0 - w;
  // log1p(-w) = log(u) + log(1 - lost / u), lost = w - (1 - u) the rounding of u: nonzero for small w only, where u ~ 1.
  const double lost = w - (1.0 - u);
  return static_cast<float>(-log_positive(lost - log_positive(u)));
}

}  // namespace tlt
