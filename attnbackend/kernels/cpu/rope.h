// Queries and keys rotated, after norms of their heads where there are any, and keys and values written to a paged
// cache. All of it is in float and rounded once; what the cache gets is the rounded key.
#pragma once
#include "cache_write.h"

template <class C>
constexpr int64_t DTYPE_OF = FLOAT32;
template <>
constexpr int64_t DTYPE_OF<F16> = FLOAT16;
template <>
constexpr int64_t DTYPE_OF<BF16> = BFLOAT16;

// Products are kept apart from sums: the result is then the same on all machines, and that of Inductor's code.
template <class V>
static inline void turn(V& low, V& high, V cos_low, V sin_low, V cos_high, V sin_high) {
  const V x = low, y = high;
  low = in_register(x * cos_low) - in_register(y * sin_low);
  high = in_register(y * cos_high) + in_register(x * sin_high);
}

// The first 2 * half elements of a row.
static inline void turn_row(float* row, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + VW <= half; i += VW) {
    vf low = load(row + i), high = load(row + half + i);
    turn(low, high, load(cos + i), load(sin + i), load(cos + half + i), load(sin + half + i));
    store(row + i, low);
    store(row + half + i, high);
  }
  for (; i < half; ++i) turn(row[i], row[half + i], cos[i], sin[i], cos[half + i], sin[half + i]);
}

// Divided by the root of the mean of its squares, and multiplied.
static inline void normalise_row(float* row, const float* weight, int64_t n, float eps) {
  vf squares = {};
  int64_t i = 0;
  for (; i + VW <= n; i += VW) squares += load(row + i) * load(row + i);
  float sum = sum_lanes(squares);
  for (; i < n; ++i) sum += row[i] * row[i];
  const float factor = 1.0f / std::sqrt(sum / n + eps);
  for (i = 0; i < n; ++i) row[i] = row[i] * factor * weight[i];
}

// A head that is rotated in whole vectors, and nothing else.
template <class C>
static inline void turn_head(const typename C::raw* source, typename C::raw* output, int64_t n, const float* cos,
                             const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += VW) {
    vf low = load_as_float<C>(source + i), high = load_as_float<C>(source + half + i);
    turn(low, high, load(cos + i), load(sin + i), load(cos + half + i), load(sin + half + i));
    store_from_float<C>(output + i, low);
    store_from_float<C>(output + half + i, high);
  }
  if (n > 2 * half) std::memcpy(output + 2 * half, source + 2 * half, (n - 2 * half) * sizeof *output);
}

template <class C>
static void turn_heads(const RopeArgs& a, const TurnedHeads& x, int64_t token, const float* cos, const float* sin) {
  typedef typename C::raw raw;
  const int64_t n = a.write.head_size, half = a.rotated / 2;
  const raw* source = static_cast<const raw*>(x.source) + token * x.token;
  raw* output = static_cast<raw*>(x.output) + token * x.heads * n;
  if (!x.weight && half % VW == 0) {
    for (int64_t h = 0; h < x.heads; ++h) turn_head<C>(source + h * x.head, output + h * n, n, cos, sin, half);
    return;
  }
  float row[MAX_ROW], weight[MAX_ROW];
  if (x.weight) any_row_to_float(x.weight, weight, static_cast<int>(n), x.weight_dtype);
  for (int64_t h = 0; h < x.heads; ++h) {
    row_to_float<C>(source + h * x.head, row, static_cast<int>(n));
    if (x.weight) normalise_row(row, weight, n, static_cast<float>(x.eps));
    turn_row(row, cos, sin, half);
    row_from_float(row, output + h * n, static_cast<int>(n), DTYPE_OF<C>);
  }
}

template <class C>
static void rope_token(const RopeArgs& a, int64_t token) {
  const int64_t size = element_size(a.angle_dtype);
  float cos[MAX_ROW], sin[MAX_ROW];
  any_row_to_float(static_cast<const char*>(a.cos) + token * a.cos_token * size, cos,
                   static_cast<int>(a.rotated), a.angle_dtype);
  any_row_to_float(static_cast<const char*>(a.sin) + token * a.sin_token * size, sin,
                   static_cast<int>(a.rotated), a.angle_dtype);
  turn_heads<C>(a, a.query, token, cos, sin);
  turn_heads<C>(a, a.key, token, cos, sin);
  write_token(a.write, token);
}

constexpr int64_t ROPE_SERIAL = 16384;  // elements of which other threads would be woken in vain

template <class C>
static void rope_of(const RopeArgs& a) {
  const int64_t elements = a.write.tokens * (a.query.heads + a.key.heads) * a.write.head_size;
  const int threads = elements < ROPE_SERIAL ? 1 : static_cast<int>(a.write.threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t t = 0; t < a.write.tokens; ++t) rope_token<C>(a, t);
}

static Refusal rope(const RopeArgs& a) {
  const Refusal refusal = check_slots(a.write);
  if (refusal.code) return refusal;
  if (a.write.source_dtype == FLOAT32) rope_of<F32>(a);
  else if (a.write.source_dtype == FLOAT16) rope_of<F16>(a);
  else rope_of<BF16>(a);
  return refusal;
}
