// The arithmetic of one tile: scores, masks, online softmax and the product with the values.
// Two layouts. "Narrow" (decode: few query rows) puts head elements and keys in the lanes and reads
// the cache in place. "Wide" puts query rows in the lanes, so K and V are used as scalars in their
// natural order, nothing is transposed, and the softmax needs no sums across lanes.
#pragma once
#include "rows.h"

constexpr int NARROW_VECTORS = VW == 16 ? 4 : 2;

struct RowInfo {  // per query row, padded to whole vectors
  int32_t low[WIDE_ROWS], high[WIDE_ROWS], position[WIDE_ROWS];  // visible keys: [low, high)
  int32_t token[WIDE_ROWS], head[WIDE_ROWS];
  float slope[WIDE_ROWS], maximum[WIDE_ROWS], sum[WIDE_ROWS], decay[WIDE_ROWS];
  int32_t last_low, first_high;  // every row sees [last_low, first_high)
  int64_t count;
};

struct ScoreRules {
  float cap;  // 0: none
  bool alibi;
};

static inline vf absolute(vf x) { return x < vf{} ? -x : x; }

static inline vf finite_or_zero(vf maximum) {
  return maximum == splat(-INFINITY) ? vf{} : maximum;
}

// ---- narrow -------------------------------------------------------------------------------------

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// Keys that R rows are multiplied with at a time, so that the products of all fill one vector.
template <int R>
constexpr int narrow_keys() { return VW / power_of_two(R); }

template <class C, int R>
static inline void narrow_step(const typename Products<C>::operand* x, const typename C::query* q,
                               int64_t q_row, vf* acc) {
  typedef Products<C> P;
  constexpr int J = narrow_keys<R>();
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const auto y = in_register(P::get(reinterpret_cast<const typename P::element*>(q + r * q_row)));
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) acc[r * J + j] = P::add(acc[r * J + j], x[j], y);
  }
}

// Lane r * narrow_keys<R>() + j: q[r] . keys[j].
template <class C, int R>
static inline vf narrow_products(const typename C::query* q, int64_t q_row,
                                 const typename C::raw* const* keys,
                                 const typename C::raw* const* soon, int d) {
  typedef Products<C> P;
  constexpr int J = narrow_keys<R>();
  vf acc[VW] = {};
  typename P::operand x[J];
  int i = 0;
  for (; i + P::STEP <= d; i += P::STEP) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      x[j] = in_register(P::from_cache(keys[j] + i));
      ask_for(soon[j] + i);
    }
    narrow_step<C, R>(x, q + i, q_row, acc);
  }
  if (i < d) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) x[j] = P::from_tail(keys[j] + i, d - i);
    narrow_step<C, R>(x, q + i, q_row, acc);
  }
  return Tree<VW>::sums(acc);
}

// scores[r][j] = q[r] . k[j]; keys[] and soon[], the rows to ask for, are padded to a multiple of VW.
template <class C, int R>
static void narrow_scores(const typename C::query* q, int64_t q_row, const typename C::raw* const* keys,
                          const typename C::raw* const* soon, int count, int d, float factor,
                          float* scores) {
  constexpr int J = narrow_keys<R>();
  for (int j0 = 0; j0 < count; j0 += J) {
    vf products = narrow_products<C, R>(q, q_row, keys + j0, soon + j0, d);
    if (Products<C>::PAIRS) products *= factor;
    float lanes[VW];
    store(lanes, products);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) std::memcpy(scores + r * KT + j0, lanes + r * J, J * sizeof(float));
  }
}

// Soft-cap, alibi and mask for one row's scores of keys first .. first + count.
static inline void narrow_rules(float* scores, const RowInfo& rows, int r, int first, int count,
                                const ScoreRules& rules) {
  const vi low = splat_int(rows.low[r]), high = splat_int(rows.high[r]);
  for (int j = 0; j < count; j += VW) {
    vf s = load(scores + j);
    const vi key = lane_index() + (first + j);
    if (rules.cap > 0) s = tanh_vector(s / rules.cap) * rules.cap;
    if (rules.alibi)
      s -= rows.slope[r] * absolute(__builtin_convertvector(key - rows.position[r], vf));
    s = (key >= low) & (key < high) ? s : splat(-INFINITY);
    store(scores + j, s);
  }
}

// The accumulator of a row, as its probabilities now are relative to maximum `now`, which differs from `old`.
static inline void narrow_decay(RowInfo& rows, int r, float old, vf base, float total, float* acc,
                                int64_t width) {
  if (old == -INFINITY && rows.sum[r] == 0) {  // the first keys that the row sees: acc is 0
    rows.sum[r] = total;
    return;
  }
  const float decay = exp_nonpositive(splat(old) - base)[0];
  rows.sum[r] = rows.sum[r] * decay + total;
  if (decay == 1.0f) return;
  for (int64_t i = 0; i < width; i += VW) store(acc + i, load(acc + i) * decay);
}

// Scores of rows r0 .. r0 + R -> probabilities relative to the new maximum; the old accumulators are scaled to
// match. The rows take turns, since each step of one waits for the step before.
template <int R>
static inline void narrow_softmax(float* scores, RowInfo& rows, int r0, int count, float* acc,
                                  int64_t width) {
  vf best[R], base[R], total[R] = {};
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) best[r] = splat(rows.maximum[r0 + r]);
  for (int j = 0; j < count; j += VW)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf s = load(scores + r * KT + j);
      best[r] = s > best[r] ? s : best[r];
    }
  float now[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    now[r] = max_lanes(best[r]);
    base[r] = finite_or_zero(splat(now[r]));
  }
  for (int j = 0; j < count; j += VW)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* place = scores + r * KT + j;
      const vf p = exp_nonpositive(load(place) - base[r]);
      store(place, p);
      total[r] += p;
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    narrow_decay(rows, r0 + r, rows.maximum[r0 + r], base[r], sum_lanes(total[r]), acc + r * width, width);
    rows.maximum[r0 + r] = now[r];
  }
}

template <class C, int R, int N>
static inline void narrow_values_chunk(const typename C::raw* const* values,
                                       const typename C::raw* const* soon, int at, const float* p,
                                       int count, float* acc, int64_t width) {
  vf sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * width + n * VW);
  for (int j = 0; j < count; ++j) {
    vf x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      x[n] = load_as_float<C>(values[j] + at + n * VW);
      if (n * VW * sizeof(typename C::raw) % 64 == 0) ask_for(soon[j] + at + n * VW);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += x[n] * p[r * KT + j];
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(acc + r * width + n * VW, sum[r][n]);
}

// The same for two keys at a time, whose probabilities are rounded to pairs; N is even.
template <class C, int R, int N>
static inline void narrow_pairs_chunk(const typename C::raw* const* values,
                                      const typename C::raw* const* soon, int at, const float* p,
                                      int count, float* acc, int64_t width) {
  typedef Products<C> P;
  vf sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * width + n * VW);
  for (int j = 0; j < count; j += 2) {
    vu x[N];
    const bool second = j + 1 < count;
#pragma GCC unroll 2
    for (int n = 0; n < N; n += 2) {
      const vu a = P::from_cache(values[j] + at + n * VW);
      const vu b = second ? P::from_cache(values[j + 1] + at + n * VW) : vu{};
      ask_for(soon[j] + at + n * VW);
      ask_for(soon[j + 1] + at + n * VW);
      x[n] = P::template zip<0>(a, b);
      x[n + 1] = P::template zip<1>(a, b);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, p + r * KT + j / 2, sizeof pair);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = P::add(sum[r][n], x[n], P::spread(pair));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(acc + r * width + n * VW, sum[r][n]);
}

// A row's probabilities as pairs of neighbours, in the first half of their place.
template <class C>
static inline void pair_neighbours(float* p, int count) {
  uint16_t* target = reinterpret_cast<uint16_t*>(p);
  for (int j = 0; j < count; j += VW) {
    const vu rounded = Products<C>::round(load(p + j), vf{});
    const vu16 halves = __builtin_convertvector(rounded, vu16);
    std::memcpy(target + j, &halves, sizeof halves);
  }
}

template <class C, int R>
static void narrow_values(const typename C::raw* const* values, const typename C::raw* const* soon,
                          const float* p, int count, int dv, float* acc, int64_t width) {
  constexpr int N = NARROW_VECTORS;
  int i = 0;
  if constexpr (Products<C>::PAIRS) {
    for (; i + N * VW <= dv; i += N * VW)
      narrow_pairs_chunk<C, R, N>(values, soon, i, p, count, acc + i, width);
    for (; i < dv; i += 2 * VW)
      narrow_pairs_chunk<C, R, 2>(values, soon, i, p, count, acc + i, width);
    return;
  }
  for (; i + N * VW <= dv; i += N * VW)
    narrow_values_chunk<C, R, N>(values, soon, i, p, count, acc + i, width);
  for (; i + VW <= dv; i += VW)
    narrow_values_chunk<C, R, 1>(values, soon, i, p, count, acc + i, width);
  if (i == dv) return;
  for (int j = 0; j < count; ++j) {
    const vf x = load_tail<C>(values[j] + i, dv - i);
    for (int r = 0; r < R; ++r) {
      float* sum = acc + r * width + i;
      store(sum, load(sum) + x * p[r * KT + j]);
    }
  }
}

// ---- wide ---------------------------------------------------------------------------------------

// For the KR keys at `keys`: elements begin .. end of the dot products, added to the scores unless begin is 0.
template <class P, int N>
static inline void wide_products(const typename P::element* q, int64_t rows,
                                 const typename P::element* const* keys, int begin, int end, float factor,
                                 float* scores) {
  vf acc[KR][N] = {};
  const typename P::element* key[KR];
  std::copy(keys, keys + KR, key);
  for (int i = begin; i < end; ++i) {
    typename P::operand x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = in_register(P::get(q + i * rows + n * VW));
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r) {
      const typename P::operand y = P::spread(key[r][i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = P::add(acc[r][n], x[n], y);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* place = scores + r * rows + n * VW;
      if (P::PAIRS) acc[r][n] *= factor;
      store(place, begin == 0 ? acc[r][n] : load(place) + acc[r][n]);
    }
}

// scores[j][row] = keys[j] . q[:, row]; q is [d][rows], there are keys up to the count rounded up to KR. Sums run
// over SUM_LENGTH elements at a time: one long chain of additions would lose digits.
template <class C, int N>
static void wide_scores(const typename Products<C>::element* q, int64_t rows,
                        const typename Products<C>::element* const* keys, int count, int d, float factor,
                        float* scores, const AttentionArgs& a, const Rows<C>* soon) {
  typedef Products<C> P;
  for (int i0 = 0; i0 < d; i0 += P::SUM_LENGTH) {
    const int end = d - i0 < P::SUM_LENGTH ? d : i0 + P::SUM_LENGTH;
    for (int j = 0; j < count; j += KR) {
      if (i0 == 0 && soon) soon->ask_for_rows(a, j, j + KR);
      wide_products<P, N>(q, rows, keys + j, i0, end, factor, scores + j * rows);
    }
  }
}

// acc[i][row] = acc[i][row] * decay[row] + sum_j values[j][i] * p[j][row]; width is a multiple of KR.
template <class P, int N>
static void wide_values(const typename P::element* p, int64_t rows, const typename P::element* const* values,
                        int count, int width, const float* decay, float* acc) {
  for (int i = 0; i < width; i += KR) {
    vf sum[KR][N];
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sum[r][n] = load(acc + (i + r) * rows + n * VW) * load(decay + n * VW);
    for (int j = 0; j < count; ++j) {
      typename P::operand x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) x[n] = in_register(P::get(p + j * rows + n * VW));
      const typename P::element* value = values[j] + i;
#pragma GCC unroll 8
      for (int r = 0; r < KR; ++r) {
        const typename P::operand y = P::spread(value[r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = P::add(sum[r][n], x[n], y);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(acc + (i + r) * rows + n * VW, sum[r][n]);
  }
}

// The probabilities of VW rows as pairs of neighbouring keys, in the first half of their place.
template <class P>
static inline void wide_pairs(float* scores, int64_t rows, int count) {
  for (int j = 0; j < count; j += 2) {
    const vf second = j + 1 < count ? load(scores + (j + 1) * rows) : vf{};
    const vu pair = P::round(load(scores + j * rows), second);
    std::memcpy(scores + j / 2 * rows, &pair, sizeof pair);
  }
}

// The rules for the VW rows at `at`, over the tile's keys.
static inline void wide_rules(float* scores, int64_t rows, const RowInfo& info, int at, int first,
                              int count, const ScoreRules& rules) {
  const vi low = load_raw<vi>(info.low + at), high = load_raw<vi>(info.high + at);
  const vi position = load_raw<vi>(info.position + at);
  const vf slope = load(info.slope + at);
  for (int j = 0; j < count; ++j) {
    float* place = scores + j * rows + at;
    vf s = load(place);
    const vi key = splat_int(first + j);
    if (rules.cap > 0) s = tanh_vector(s / rules.cap) * rules.cap;
    if (rules.alibi) s -= slope * absolute(__builtin_convertvector(key - position, vf));
    store(place, (key >= low) & (key < high) ? s : splat(-INFINITY));
  }
}

static inline void wide_softmax(float* scores, int64_t rows, RowInfo& info, int at, int count) {
  const vf old = load(info.maximum + at);
  vf now = old;
  for (int j = 0; j < count; ++j) {
    const vf s = load(scores + j * rows + at);
    now = s > now ? s : now;
  }
  const vf base = finite_or_zero(now);
  vf total = {};
  for (int j = 0; j < count; ++j) {
    const vf p = exp_nonpositive(load(scores + j * rows + at) - base);
    store(scores + j * rows + at, p);
    total += p;
  }
  const vf decay = exp_nonpositive(old - base);
  store(info.maximum + at, now);
  store(info.decay + at, decay);
  store(info.sum + at, load(info.sum + at) * decay + total);
}
