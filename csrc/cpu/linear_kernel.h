// One block of weight rows against some rows of x. Included by linear.cpp once per instruction set, inside its namespace,
// with TLT_LANES (floats of a vector) and TLT_ROWS (rows of x in a register tile) defined; hence no include guard.
//
// Every dot product has one vector of partial sums, filled in the order of k and folded in a fixed order: a tile's size
// changes which products run together, never how one of them is summed.

typedef float Vec __attribute__((vector_size(TLT_LANES * 4)));
typedef float LooseVec __attribute__((vector_size(TLT_LANES * 4), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }

// Lane i + lane i + 4 + ..: sums of quarters, then of their four lanes.
static inline Quad fold_to_quad(Vec v) {
  Quad parts[TLT_LANES / 4];
  std::memcpy(parts, &v, sizeof(v));
  for (int width = TLT_LANES / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}

static inline Quad fold_four(Vec a, Vec b, Vec c, Vec d) {
  const Quad qa = fold_to_quad(a), qb = fold_to_quad(b), qc = fold_to_quad(c), qd = fold_to_quad(d);
  const Quad ab = __builtin_shuffle(qa, qb, QuadIndex{0, 4, 1, 5}) + __builtin_shuffle(qa, qb, QuadIndex{2, 6, 3, 7});
  const Quad cd = __builtin_shuffle(qc, qd, QuadIndex{0, 4, 1, 5}) + __builtin_shuffle(qc, qd, QuadIndex{2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, QuadIndex{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, QuadIndex{2, 3, 6, 7});
}

// ROWS rows of x, from m on, against the weight rows w[0..3], numbered from n on. FETCH: also ask for weight rows ahead.
// Into L2, whose misses in flight are more than L1's: a pass of SmolLM2-135M over one row took 24 ms so, 36 ms with
// prefetches into L1 and 38 ms without any; how far ahead (4 to 32 rows) did not matter.
template <int ROWS, bool FETCH>
static inline void tile(const LinearArgs& a, int64_t m, int64_t n, const float* const* w) {
  Vec sums[ROWS][kWeightRows] = {};
  const float* x = a.x + m * a.x_stride;
  int64_t k = 0;
  for (; k + TLT_LANES <= a.in_dim; k += TLT_LANES) {
    Vec column[kWeightRows];
    for (int j = 0; j < kWeightRows; ++j) {
      column[j] = load(w[j] + k);
      if (FETCH) __builtin_prefetch(w[j] + kRowsAhead * a.in_dim + k, 0, 2);
    }
    for (int r = 0; r < ROWS; ++r) {
      const Vec value = load(x + r * a.x_stride + k);
      for (int j = 0; j < kWeightRows; ++j) sums[r][j] += value * column[j];
    }
  }
  if (k < a.in_dim) {
    float rest[TLT_LANES] = {};
    Vec column[kWeightRows];
    for (int j = 0; j < kWeightRows; ++j) {
      std::memcpy(rest, w[j] + k, (a.in_dim - k) * sizeof(float));
      column[j] = load(rest);
    }
    for (int r = 0; r < ROWS; ++r) {
      std::memcpy(rest, x + r * a.x_stride + k, (a.in_dim - k) * sizeof(float));
      const Vec value = load(rest);
      for (int j = 0; j < kWeightRows; ++j) sums[r][j] += value * column[j];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const Quad dots = fold_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    float* out = a.out + (m + r) * a.out_dim + n;
    for (int j = 0; j < kWeightRows && n + j < a.out_dim; ++j) {
      const float dot = a.bias ? dots[j] + a.bias[n + j] : dots[j];
      out[j] = a.base ? a.base[(m + r) * a.base_stride + n + j] + dot : dot;
    }
  }
}

template <int ROWS>
static void few_rows(const LinearArgs& a, int64_t m, int64_t end, int64_t n, const float* const* w, bool fetch) {
  if constexpr (ROWS > 0) {
    if (end - m != ROWS) return few_rows<ROWS - 1>(a, m, end, n, w, fetch);
    fetch ? tile<ROWS, true>(a, m, n, w) : tile<ROWS, false>(a, m, n, w);
  }
}

static void run_block(const LinearArgs& a, int64_t begin, int64_t end, int64_t n) {
  const float* w[kWeightRows];
  for (int j = 0; j < kWeightRows; ++j) w[j] = a.weight + std::min(n + j, a.out_dim - 1) * a.in_dim;
  if (end - begin < TLT_ROWS) return few_rows<TLT_ROWS - 1>(a, begin, end, n, w, true);
  tile<TLT_ROWS, true>(a, begin, n, w);
  int64_t m = begin + TLT_ROWS;
  for (; m + TLT_ROWS <= end; m += TLT_ROWS) tile<TLT_ROWS, false>(a, m, n, w);
  few_rows<TLT_ROWS - 1>(a, m, end, n, w, false);
}
