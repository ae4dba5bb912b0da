#include "cpu/noise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "cpu/parallel.h"
#include "philox.h"

namespace tlt {

namespace {

constexpr int64_t kChunk = 4096;  // ids a task: a vocabulary of 152k in one row still feeds 37 tasks
constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

void gumbel_noise(const NoiseRows& ids, int64_t rows, int64_t vocab, uint32_t purpose, int threads, float* out) {
  const RowKernels& kernels = row_kernels();
  const int64_t chunks = (vocab + kChunk - 1) / kChunk;
  parallel_for(rows * chunks, threads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / chunks, start = task % chunks * kChunk;
      kernels.noise(ids.row(r, purpose), static_cast<uint32_t>(start / 4), std::min(kChunk, vocab - start),
                    out + r * vocab + start);
    }
  });
}

void gumbel_noise_at(const NoiseRows& ids, const int64_t* tokens, int64_t rows, uint32_t purpose, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const NoiseId id = ids.row(r, purpose);
    const Words4 words = noise_words(id.key, id.position, static_cast<uint32_t>(tokens[r] / 4), purpose, id.sample,
                                     id.segment);
    out[r] = gumbel_from_word(words.x[tokens[r] % 4]);
  }
}

WordReport check_all_words(int threads) {
  constexpr uint64_t kSlice = 1u << 22, kSlices = (1ull << 32) / kSlice;
  WordReport total = {0, 0, 0, 0, kInf, -kInf};
  std::mutex mutex;
  parallel_for(kSlices, threads, [&](int64_t begin, int64_t end) {
    WordReport part = {0, 0, 0, 0, kInf, -kInf};
    for (int64_t slice = begin; slice < end; ++slice) row_kernels().check_words(slice * kSlice, kSlice, &part);
    std::lock_guard<std::mutex> lock(mutex);
    total.count += part.count, total.not_finite += part.not_finite;
    total.increases += part.increases, total.not_bounded += part.not_bounded;
    total.lowest = std::min(total.lowest, part.lowest), total.highest = std::max(total.highest, part.highest);
  });
  return total;
}

TailReport noise_tail(uint64_t key, int64_t rows, int64_t vocab, const std::vector<float>& thresholds, int threads) {
  const RowKernels& kernels = row_kernels();
  const int64_t chunks = (vocab + kChunk - 1) / kChunk;
  const TailReport none = {0, 0, kInf, -kInf, std::vector<int64_t>(thresholds.size(), 0)};
  TailReport total = none;
  std::mutex mutex;
  parallel_for(rows * chunks, threads, [&](int64_t begin, int64_t end) {
    TailReport part = none;
    std::vector<float> g(kChunk);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t start = task % chunks * kChunk, count = std::min(kChunk, vocab - start);
      kernels.noise({key, static_cast<uint32_t>(task / chunks), 0, 0, 0}, static_cast<uint32_t>(start / 4), count,
                    g.data());
      kernels.count_above(g.data(), count, thresholds.data(), static_cast<int>(thresholds.size()), part.above.data());
      part.count += count;
      for (int64_t i = 0; i < count; ++i) {
        part.not_finite += !std::isfinite(g[i]);
        part.lowest = std::min(part.lowest, g[i]), part.highest = std::max(part.highest, g[i]);
      }
    }
    std::lock_guard<std::mutex> lock(mutex);
    total.count += part.count, total.not_finite += part.not_finite;
    total.lowest = std::min(total.lowest, part.lowest), total.highest = std::max(total.highest, part.highest);
    for (size_t k = 0; k < thresholds.size(); ++k) total.above[k] += part.above[k];
  });
  return total;
}

}  // namespace tlt
