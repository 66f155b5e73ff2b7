// The arithmetic of one tile: scores, masks, online softmax and the product with the values.
// Two layouts. "Narrow" (decode: few query rows) puts head elements and keys in the lanes and reads
// the cache in place. "Wide" puts query rows in the lanes, so K and V are used as scalars in their
// natural order, nothing is transposed, and the softmax needs no sums across lanes.
#pragma once
#include <algorithm>

#include "convert.h"

constexpr int KT = 64;              // keys in a tile
constexpr int PANEL = 3;            // vectors of rows held in registers by the wide kernel
constexpr int NARROW_ROWS = VW / 2; // up to so many rows the narrow layout is the faster one
constexpr int SUM_LENGTH = 32;
constexpr int WIDE_ROWS = 2 * PANEL * VW;
constexpr int NARROW_VECTORS = VW == 16 ? 4 : 2;
constexpr int NARROW_KEYS = VW == 16 ? 4 : 2;

struct RowInfo {  // per query row, padded to whole vectors
  int32_t low[WIDE_ROWS], high[WIDE_ROWS], position[WIDE_ROWS];  // visible keys: [low, high)
  float slope[WIDE_ROWS], maximum[WIDE_ROWS], sum[WIDE_ROWS], decay[WIDE_ROWS];
  int32_t last_low, first_high;  // every row sees [last_low, first_high)
  int64_t count;
};

struct ScoreRules {
  float cap;  // 0: none
  bool alibi;
};

static inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

static inline vf absolute(vf x) { return x < vf{} ? -x : x; }

static inline vf finite_or_zero(vf maximum) {
  return maximum == splat(-INFINITY) ? vf{} : maximum;
}

// Asks for a row of the cache before it is needed: rows of one head lie too far apart, and blocks in
// too random an order, for the hardware to foresee. Into the second level: a tile does not fit the first.
template <class C>
struct Soon {
  const typename C::raw* const* rows;
  int64_t elements;  // of each row, 0 when they have been asked for

  void fetch(int j) const {
    const char* p = reinterpret_cast<const char*>(rows[j]);
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(typename C::raw));
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
};

// ---- narrow -------------------------------------------------------------------------------------

// sums[r][j] = lane-wise products of q[r] and k[j], for NARROW_KEYS keys at a time, so that a query
// vector is loaded once for all of them.
template <class C, int R>
static inline void narrow_products(const float* q, int64_t q_row,
                                   const typename C::raw* const* keys, int d, float* sums) {
  constexpr int J = NARROW_KEYS;
  vf acc[R][J] = {};
  const int whole = d / VW * VW;
  for (int i = 0; i < d; i += VW) {
    vf x[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j)
      x[j] = i < whole ? load_as_float<C>(keys[j] + i) : load_tail<C>(keys[j] + i, d - i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf y = load(q + r * q_row + i);
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) acc[r][j] += x[j] * y;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) store(sums + (r * VW + j) * VW, acc[r][j]);
}

// scores[r][j] = q[r] . k[j]; keys[] is padded to a multiple of VW with readable rows.
template <class C, int R>
static void narrow_scores(const float* q, int64_t q_row, const typename C::raw* const* keys,
                          int count, int d, float* scores, float* sums,
                          Soon<C> soon) {
  for (int j0 = 0; j0 < count; j0 += VW) {
    for (int j = j0; j < std::min(count, j0 + VW); ++j) soon.fetch(j);
    for (int j = 0; j < VW; j += NARROW_KEYS)
      narrow_products<C, R>(q, q_row, keys + j0 + j, d, sums + j * VW);
    for (int r = 0; r < R; ++r) store(scores + r * KT + j0, sum_each(sums + r * VW * VW));
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

// Scores -> probabilities relative to the new maximum; the old accumulator is scaled to match.
static inline void narrow_softmax(float* scores, RowInfo& rows, int r, int count, float* acc,
                                  int64_t width) {
  vf best = splat(-INFINITY);
  for (int j = 0; j < count; j += VW) {
    const vf s = load(scores + j);
    best = s > best ? s : best;
  }
  const float old = rows.maximum[r], top = max_lanes(best), now = top > old ? top : old;
  const vf base = finite_or_zero(splat(now));
  vf total = {};
  for (int j = 0; j < count; j += VW) {
    const vf p = exp_nonpositive(load(scores + j) - base);
    store(scores + j, p);
    total += p;
  }
  const float decay = exp_nonpositive(splat(old) - base)[0];
  rows.maximum[r] = now;
  rows.sum[r] = rows.sum[r] * decay + sum_lanes(total);
  if (decay == 1.0f) return;
  for (int64_t i = 0; i < width; i += VW) store(acc + i, load(acc + i) * decay);
}

template <class C, int R, int N>
static inline void narrow_values_chunk(const typename C::raw* const* values, int at,
                                       const float* p, int count, float* acc, int64_t width,
                                       Soon<C> soon) {
  vf sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * width + n * VW);
  for (int j = 0; j < count; ++j) {
    vf x[N];
    soon.fetch(j);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load_as_float<C>(values[j] + at + n * VW);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] += x[n] * p[r * KT + j];
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(acc + r * width + n * VW, sum[r][n]);
}

template <class C, int R>
static void narrow_values(const typename C::raw* const* values, const float* p, int count, int dv,
                          float* acc, int64_t width, Soon<C> soon) {
  constexpr int N = NARROW_VECTORS;
  int i = 0;
  for (; i + N * VW <= dv; i += N * VW, soon.elements = 0)
    narrow_values_chunk<C, R, N>(values, i, p, count, acc + i, width, soon);
  for (; i + VW <= dv; i += VW, soon.elements = 0)
    narrow_values_chunk<C, R, 1>(values, i, p, count, acc + i, width, soon);
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

// For KR keys: elements begin .. end of the dot products, added to the scores unless begin is 0.
template <int N>
static inline void wide_products(const float* q, int64_t rows, const float* key, int64_t d,
                                 int begin, int end, float* scores) {
  vf acc[KR][N] = {};
  for (int i = begin; i < end; ++i) {
    vf x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(q + i * rows + n * VW);
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r) {
      const vf y = splat(key[r * d + i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] += x[n] * y;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* place = scores + r * rows + n * VW;
      store(place, begin == 0 ? acc[r][n] : load(place) + acc[r][n]);
    }
}

// scores[j][row] = k[j] . q[:, row]; q is [d][rows], k is [count rounded up to KR][d]. Sums run over
// SUM_LENGTH elements at a time: one long chain of additions would lose digits.
template <int N>
static void wide_scores(const float* q, int64_t rows, const float* k, int count, int d,
                        float* scores) {
  for (int i0 = 0; i0 < d; i0 += SUM_LENGTH) {
    const int end = std::min(d, i0 + SUM_LENGTH);
    for (int j = 0; j < count; j += KR)
      wide_products<N>(q, rows, k + static_cast<int64_t>(j) * d, d, i0, end, scores + j * rows);
  }
}

// acc[i][row] = acc[i][row] * decay[row] + sum_j v[j][i] * p[j][row]; width is a multiple of KR.
template <int N>
static void wide_values(const float* p, int64_t rows, const float* v, int count, int width,
                        const float* decay, float* acc) {
  for (int i = 0; i < width; i += KR) {
    vf sum[KR][N];
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sum[r][n] = load(acc + (i + r) * rows + n * VW) * load(decay + n * VW);
    for (int j = 0; j < count; ++j) {
      vf x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) x[n] = load(p + j * rows + n * VW);
      const float* value = v + static_cast<int64_t>(j) * width + i;
#pragma GCC unroll 8
      for (int r = 0; r < KR; ++r) {
        const vf y = splat(value[r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] += x[n] * y;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < KR; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(acc + (i + r) * rows + n * VW, sum[r][n]);
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
