#include "cpu/noise.h"

#include "philox.h"

namespace tlt {

void gumbel_noise(const int64_t* keys, const int64_t* positions, const int64_t* samples, const int64_t* segments,
                  int64_t rows, int64_t vocab, uint32_t purpose, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = out + r * vocab;
    for (int64_t block = 0; block * 4 < vocab; ++block) {
      const Words4 words =
          noise_words(static_cast<uint64_t>(keys[r]), static_cast<uint32_t>(positions[r]),
                      static_cast<uint32_t>(block), purpose, static_cast<uint32_t>(samples[r]),
                      static_cast<uint32_t>(segments[r]));
      for (int64_t v = block * 4; v < vocab && v < block * 4 + 4; ++v) row[v] = gumbel_from_word(words.x[v % 4]);
    }
  }
}

}  // namespace tlt
