// The attention of one item: some rows of one request with one KV head. Included by attention.cpp once per instruction
// set, inside its namespace, with TLT_LANES (floats of a vector) and TLT_TILE (vectors of a register tile) defined;
// hence no include guard and no includes.
//
// Keys are numbered by place: a committed key's place is its logical slot, the d-th node of a row's root path has
// place prefix + d. A row goes through its places in blocks of 64 aligned to multiples of 64, with online softmax
// across blocks and, within one, sums in a fixed order. So its bits depend on the keys and values at its places and on
// nothing else: not on the other rows, nor on which of its keys are tree nodes.

typedef float Vec __attribute__((vector_size(TLT_LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(TLT_LANES * 4)));
typedef float LooseVec __attribute__((vector_size(TLT_LANES * 4), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }

// exp(x) for x <= 0, relative error below 2e-7; exactly 0 below -87, NaN for NaN. Cody and Waite's reduction with the
// polynomial of Cephes' expf.
static inline Vec exp_negative(Vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  Vec shifted = x * 1.44269504088896341f + magic;
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  IVec power = ((IVec)shifted << 23) + 0x3f800000;
  Vec zero = {};
  return x < -87.0f ? zero : p * (Vec)power;
}

template <int ROWS, int TILE>
static inline void score_tile(const float* q, const float* column, int64_t dim, float* scores, int64_t score_stride) {
  Vec sum[ROWS][TILE] = {};
  for (int64_t d = 0; d < dim; ++d, column += kBlock) {
    Vec key[TILE];
    for (int t = 0; t < TILE; ++t) key[t] = load(column + t * TLT_LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILE; ++t) sum[r][t] += q[r * dim + d] * key[t];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILE; ++t) store(scores + r * score_stride + t * TLT_LANES, sum[r][t]);
}

// scores[r][j] = q[r] . key j, for ROWS rows and j < count; keys_t [dim][64] holds the keys as columns.
template <int ROWS>
static void score_rows(const float* q, const float* keys_t, int count, int64_t dim, float* scores, int64_t stride) {
  int j = 0;
  for (; j + TLT_TILE * TLT_LANES <= count; j += TLT_TILE * TLT_LANES)
    score_tile<ROWS, TLT_TILE>(q, keys_t + j, dim, scores + j, stride);
  for (; j < count; j += TLT_LANES) score_tile<ROWS, 1>(q, keys_t + j, dim, scores + j, stride);
}

static void score(const float* q, int64_t rows, const float* keys_t, int count, int64_t dim, float* scores,
                  int64_t stride) {
  for (int64_t r = 0; r < rows;) {
    const float* from = q + r * dim;
    float* to = scores + r * stride;
    switch (rows - r) {
      case 1: score_rows<1>(from, keys_t, count, dim, to, stride); r += 1; break;
      case 2: score_rows<2>(from, keys_t, count, dim, to, stride); r += 2; break;
      case 3: score_rows<3>(from, keys_t, count, dim, to, stride); r += 3; break;
      default: score_rows<4>(from, keys_t, count, dim, to, stride); r += 4; break;
    }
  }
}

template <int ROWS, int TILE>
static inline void add_tile(const float* weights, int64_t weight_stride, const float* const* values, int64_t offset,
                            int lo, int hi, float* sums, int64_t sum_stride) {
  Vec sum[ROWS][TILE];
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILE; ++t) sum[r][t] = load(sums + r * sum_stride + offset + t * TLT_LANES);
  for (int j = lo; j < hi; ++j) {
    Vec value[TILE];
    for (int t = 0; t < TILE; ++t) value[t] = load(values[j] + offset + t * TLT_LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILE; ++t) sum[r][t] += weights[r * weight_stride + j] * value[t];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < TILE; ++t) store(sums + r * sum_stride + offset + t * TLT_LANES, sum[r][t]);
}

// sums[r] += weights[r][j] * values[j] for j = lo, lo + 1, .. hi - 1 in this order; `width` floats, a multiple of 16.
template <int ROWS>
static void add_rows(const float* weights, int64_t weight_stride, const float* const* values, int lo, int hi,
                     float* sums, int64_t width) {
  int64_t offset = 0;
  for (; offset + TLT_TILE * TLT_LANES <= width; offset += TLT_TILE * TLT_LANES)
    add_tile<ROWS, TLT_TILE>(weights, weight_stride, values, offset, lo, hi, sums, width);
  for (; offset < width; offset += TLT_LANES)
    add_tile<ROWS, 1>(weights, weight_stride, values, offset, lo, hi, sums, width);
}

static void add_values(int64_t rows, const float* weights, int64_t stride, const float* const* values, int lo, int hi,
                       float* sums, int64_t width) {
  for (int64_t r = 0; r < rows;) {
    const float* from = weights + r * stride;
    float* to = sums + r * width;
    switch (rows - r) {
      case 1: add_rows<1>(from, stride, values, lo, hi, to, width); r += 1; break;
      case 2: add_rows<2>(from, stride, values, lo, hi, to, width); r += 2; break;
      case 3: add_rows<3>(from, stride, values, lo, hi, to, width); r += 3; break;
      default: add_rows<4>(from, stride, values, lo, hi, to, width); r += 4; break;
    }
  }
}

// Online softmax over one block: scores become weights relative to the new maximum, 0 outside [lo, hi); the row's
// maximum, total and sums move to that maximum.
static void soften(float* scores, int lo, int hi, float* maximum, float* total, float* sums, int64_t width) {
  for (int j = 0; j < lo; ++j) scores[j] = -INFINITY;
  const int end = (hi + TLT_LANES - 1) / TLT_LANES * TLT_LANES;
  for (int j = hi; j < end; ++j) scores[j] = -INFINITY;
  Vec best = load(scores);
  for (int j = TLT_LANES; j < end; j += TLT_LANES) {
    Vec s = load(scores + j);
    best = s > best ? s : best;
  }
  float top = *maximum;
  for (int i = 0; i < TLT_LANES; ++i) top = best[i] > top ? best[i] : top;
  Vec partial = {};
  for (int j = 0; j < end; j += TLT_LANES) {
    Vec weight = exp_negative(load(scores + j) - top);
    store(scores + j, weight);
    partial += weight;
  }
  float sum = 0.0f;
  for (int i = 0; i < TLT_LANES; ++i) sum += partial[i];
  // Stored before any weight is added to it, so that no compiler fuses this product with the first of those sums.
  if (top != *maximum) {
    const float shrink = std::exp(*maximum - top);
    *total *= shrink;
    for (int64_t d = 0; d < width; d += TLT_LANES) store(sums + d, load(sums + d) * shrink);
    *maximum = top;
  }
  *total += sum;
}

static void widen(const void* from, Float dtype, int64_t n, float* to) {
  if (dtype == Float::bf16) {
    const uint16_t* bits = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = from_bits(static_cast<uint32_t>(bits[i]) << 16);
  } else if (dtype == Float::f16) {
    const uint16_t* bits = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = half_to_float(bits[i]);
  } else {
    std::memcpy(to, from, n * sizeof(float));
  }
}

typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t QuadIndex __attribute__((vector_size(16)));

// keys_t[d][j] = keys[j][d] for j < count, in tiles of 4 x 4.
static void transpose(const float** keys, int count, int64_t dim, float* keys_t) {
  for (int j = count; j % 4 != 0; ++j) keys[j] = keys[count - 1];
  for (int j = 0; j < count; j += 4) {
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      const Quad a = *reinterpret_cast<const Quad*>(keys[j] + d);
      const Quad b = *reinterpret_cast<const Quad*>(keys[j + 1] + d);
      const Quad c = *reinterpret_cast<const Quad*>(keys[j + 2] + d);
      const Quad e = *reinterpret_cast<const Quad*>(keys[j + 3] + d);
      const Quad ab_low = __builtin_shuffle(a, b, QuadIndex{0, 4, 1, 5});
      const Quad ab_high = __builtin_shuffle(a, b, QuadIndex{2, 6, 3, 7});
      const Quad ce_low = __builtin_shuffle(c, e, QuadIndex{0, 4, 1, 5});
      const Quad ce_high = __builtin_shuffle(c, e, QuadIndex{2, 6, 3, 7});
      float* to = keys_t + d * kBlock + j;
      *reinterpret_cast<Quad*>(to) = __builtin_shuffle(ab_low, ce_low, QuadIndex{0, 1, 4, 5});
      *reinterpret_cast<Quad*>(to + kBlock) = __builtin_shuffle(ab_low, ce_low, QuadIndex{2, 3, 6, 7});
      *reinterpret_cast<Quad*>(to + 2 * kBlock) = __builtin_shuffle(ab_high, ce_high, QuadIndex{0, 1, 4, 5});
      *reinterpret_cast<Quad*>(to + 3 * kBlock) = __builtin_shuffle(ab_high, ce_high, QuadIndex{2, 3, 6, 7});
    }
    for (; d < dim; ++d)
      for (int i = 0; i < 4; ++i) keys_t[d * kBlock + j + i] = keys[j + i][d];
  }
}

// Element offsets in the caches of logical slots first, first + 1, .. of the item's request and head.
static void offsets_of(const AttentionArgs& a, const Item& item, int64_t first, int count, int64_t* offsets) {
  const int32_t* table = a.page_table + item.request * a.table_width + first / a.page;
  int64_t offset = first % a.page;
  for (int j = 0; j < count; ++j) {
    offsets[j] = *table * a.page_stride + offset * a.slot_stride + item.kv_head * a.head_stride;
    if (++offset == a.page) {
      offset = 0;
      ++table;
    }
  }
}

// Reads the keys and values at logical slots first .. first + count - 1 (count <= 64) of the item's request and head.
// values[j] is set for j < count; columns of keys_t beyond count are never visible and may hold anything.
static void read_block(const AttentionArgs& a, const Item& item, int64_t first, int count, const Scratch& w,
                       float* value_rows, const float** values) {
  const int64_t size = a.dtype == Float::f32 ? 4 : 2;
  const char* k_cache = static_cast<const char*>(a.k_cache);
  const char* v_cache = static_cast<const char*>(a.v_cache);
  int64_t offsets[kBlock];
  offsets_of(a, item, first, count, offsets);
  const float* keys[kBlock];
  for (int j = 0; j < count; ++j) {
    keys[j] = reinterpret_cast<const float*>(k_cache + offsets[j] * size);
    if (a.dtype == Float::f32) continue;
    widen(keys[j], a.dtype, a.dim, w.key_rows + j * w.width);
    keys[j] = w.key_rows + j * w.width;
  }
  transpose(keys, count, a.dim, w.keys_t);
  for (int j = 0; j < count; ++j) {
    values[j] = reinterpret_cast<const float*>(v_cache + offsets[j] * size);
    if (!w.copy_values) continue;
    widen(values[j], a.dtype, a.dim, value_rows + j * w.width);
    values[j] = value_rows + j * w.width;
  }
}

// One block of places whose keys all rows share: place and logical slot are the same. Row r sees the places below
// limit(r), from start(r) on.
static void attend_shared(const AttentionArgs& a, const Item& item, const Scratch& w, int64_t first, int count) {
  const int64_t group = a.heads / a.kv_heads;
  int64_t skip = 0;  // rows that see nothing here: an earlier chunk row, or one whose window starts later
  while (skip < item.rows && item.limit(skip) <= first) ++skip;
  int64_t end = item.rows;
  while (end > skip && item.start(a, end - 1) >= first + count) --end;
  if (skip >= end) return;
  read_block(a, item, first, count, w, w.value_rows, w.values);
  score(w.q + skip * group * a.dim, (end - skip) * group, w.keys_t, count, a.dim, w.scores, kBlock);
  for (int64_t r = skip; r < end;) {
    const int lo = static_cast<int>(std::max<int64_t>(item.start(a, r) - first, 0));
    const int hi = static_cast<int>(std::min<int64_t>(item.limit(r) - first, count));
    int64_t same = r + 1;  // rows with one range share the loads of the values
    while (same < end && std::max<int64_t>(item.start(a, same) - first, 0) == lo &&
           std::min<int64_t>(item.limit(same) - first, count) == hi)
      ++same;
    if (lo < hi) {
      float* weights = w.scores + (r - skip) * group * kBlock;
      for (int64_t i = r * group; i < same * group; ++i)
        soften(weights + (i - r * group) * kBlock, lo, hi, w.maxima + i, w.totals + i, w.sums + i * w.width, w.width);
      add_values((same - r) * group, weights, kBlock, w.values, lo, hi, w.sums + r * group * w.width, w.width);
    }
    r = same;
  }
}

// The places of one row of a tree from `first` (a multiple of 64) on: the rest of the prefix, then its root path.
// tail[place - first] is the key's number among those that attend_tail has scored; hidden[..] marks keys before the
// window. Returns the number of places.
static int path_of(const AttentionArgs& a, const Item& item, int64_t row, int64_t first, uint8_t* tail, bool* hidden) {
  const int prefix = static_cast<int>(item.prefix - first);
  const int64_t start = item.start(a, row);
  for (int j = 0; j < prefix; ++j) {
    tail[j] = static_cast<uint8_t>(j);
    hidden[j] = first + j < start;
  }
  int places = prefix;
  const int64_t own = item.node0 + item.row0 + row;
  for (int node = 0; node < item.nodes; ++node) {
    if (!(static_cast<uint64_t>(a.ancestors[own * 2 + node / 64]) >> (node % 64) & 1)) continue;
    tail[places] = static_cast<uint8_t>(prefix + node);
    hidden[places++] = a.window > 0 && a.positions[item.node0 + node] <= a.positions[own] - a.window;
  }
  return places;
}

static void attend_tail(const AttentionArgs& a, const Item& item, const Scratch& w, int64_t first) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t last = item.prefix + item.nodes;
  for (int64_t slot = first, block = 0; slot < last; slot += kBlock, ++block) {
    const int count = static_cast<int>(std::min<int64_t>(last - slot, kBlock));
    read_block(a, item, slot, count, w, w.value_rows + block * kBlock * w.width, w.values + block * kBlock);
    score(w.q, item.rows * group, w.keys_t, count, a.dim, w.scores + block * kBlock, kTail);
  }
  for (int64_t r = 0; r < item.rows; ++r) {
    uint8_t tail[kTail];
    bool hidden[kTail];
    const int places = path_of(a, item, r, first, tail, hidden);
    for (int from = 0; from < places; from += kBlock) {
      const int count = std::min(places - from, kBlock);
      const float* values[kBlock];
      int lo = 0;
      while (lo < count && hidden[from + lo]) ++lo;
      if (lo == count) continue;
      for (int j = lo; j < count; ++j) values[j] = w.values[tail[from + j]];
      const int64_t i = r * group;
      for (int64_t g = 0; g < group; ++g) {
        float* weights = w.path_scores + g * kBlock;
        const float* scores = w.scores + (i + g) * kTail;
        for (int j = lo; j < count; ++j) weights[j] = hidden[from + j] ? -INFINITY : scores[tail[from + j]];
        soften(weights, lo, count, w.maxima + i + g, w.totals + i + g, w.sums + (i + g) * w.width, w.width);
      }
      add_values(group, w.path_scores, kBlock, values, lo, count, w.sums + i * w.width, w.width);
    }
  }
}

static void load_queries(const AttentionArgs& a, const Item& item, const Scratch& w) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t size = a.dtype == Float::f32 ? 4 : 2;
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t at = (item.node0 + item.row0 + r) * a.q_stride + item.kv_head * group * a.dim;
    widen(static_cast<const char*>(a.q) + at * size, a.dtype, group * a.dim, w.q + r * group * a.dim);
  }
  for (int64_t i = 0; i < item.rows * group * a.dim; ++i) w.q[i] *= a.scale;
  std::fill(w.maxima, w.maxima + item.rows * group, -INFINITY);
  std::fill(w.totals, w.totals + item.rows * group, 0.0f);
  std::fill(w.sums, w.sums + item.rows * group * w.width, 0.0f);
}

static void store_results(const AttentionArgs& a, const Item& item, const Scratch& w) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t i = 0; i < item.rows * group; ++i) {
    const int64_t row = item.node0 + item.row0 + i / group;
    const int64_t at = (row * a.heads + item.kv_head * group + i % group) * a.dim;
    const float inverse = 1.0f / w.totals[i];
    const float* sums = w.sums + i * w.width;
    if (a.dtype == Float::f32) {
      float* to = static_cast<float*>(a.out) + at;
      for (int64_t d = 0; d < a.dim; ++d) to[d] = sums[d] * inverse;
    } else {
      uint16_t* to = static_cast<uint16_t*>(a.out) + at;
      for (int64_t d = 0; d < a.dim; ++d)
        to[d] = a.dtype == Float::bf16 ? float_to_bf16(sums[d] * inverse) : float_to_half(sums[d] * inverse);
    }
  }
}

static void run_item(const AttentionArgs& a, const Item& item, const Scratch& w) {
  load_queries(a, item, w);
  if (item.causal) {
    const int64_t end = item.prefix + item.row0 + item.rows;
    for (int64_t first = 0; first < end; first += kBlock)
      attend_shared(a, item, w, first, static_cast<int>(std::min<int64_t>(end - first, kBlock)));
  } else {
    const int64_t full = item.prefix / kBlock * kBlock;
    for (int64_t first = 0; first < full; first += kBlock) attend_shared(a, item, w, first, kBlock);
    attend_tail(a, item, w, full);
  }
  store_results(a, item, w);
}
