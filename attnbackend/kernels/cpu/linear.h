// Products of a few rows with a weight, as decode steps make them: the weight is read once, row by row, at the
// memory's speed. Several of its rows at a time would be several streams, which the hardware foresees badly.
#pragma once
#include <omp.h>

#include <vector>

#include "tile.h"

constexpr int64_t LINEAR_ROWS = 8;         // rows of x that are multiplied at a time
constexpr int64_t LINEAR_SHARE = 1 << 17;  // bytes of the weight that are worth a thread
constexpr int64_t LINEAR_BLOCK = 16;       // outputs at a time

// A buffer that is kept never shrinks: what it grows by is set to 0.
template <class T>
static void room_for(std::vector<T>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
}

// How R rows of x are multiplied: rows of the weight at a time, vectors of them with sums of their own, and
// bytes by which the weight is asked for ahead of time.
template <int R>
struct LinearShape {
  static constexpr int WEIGHT_ROWS = R < 4 ? 1 : 2, VECTORS = R < 4 ? 4 : 8 / R;
  static constexpr int AHEAD = R == 1 ? 1024 : R == 2 ? 0 : 4096;
};

template <class C, int R, int J, int U>
static inline void linear_step(const typename Products<C>::operand (&w)[U][J],
                               const typename C::query* const* x, int64_t i, vf (&acc)[U][R * J]) {
  typedef Products<C> P;
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto* place = reinterpret_cast<const typename P::element*>(x[r] + i + u * P::STEP);
      const auto y = in_register(P::get(place));
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) acc[u][r * J + j] = P::add(acc[u][r * J + j], w[u][j], y);
    }
}

// sums[r * J + j], lane by lane: x[r] . weight[j].
template <class C, int R>
static inline void linear_dots(const typename C::raw* const* weight, const typename C::query* const* x,
                               int64_t n, vf* sums) {
  typedef Products<C> P;
  constexpr int J = LinearShape<R>::WEIGHT_ROWS, U = LinearShape<R>::VECTORS;
  constexpr int64_t AHEAD = LinearShape<R>::AHEAD / sizeof(typename C::raw);
  vf acc[U][R * J] = {}, rest[1][R * J] = {};
  typename P::operand w[U][J], one[1][J];
  int64_t i = 0;
  for (; i + U * P::STEP <= n; i += U * P::STEP) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 2
      for (int j = 0; j < J; ++j) {
        w[u][j] = in_register(P::from_cache(weight[j] + i + u * P::STEP));
        if (AHEAD) ask_for(weight[j] + i + u * P::STEP + AHEAD);
      }
    linear_step<C, R, J, U>(w, x, i, acc);
  }
  for (; i < n; i += P::STEP) {
    for (int j = 0; j < J; ++j) one[0][j] = P::from_cache(weight[j] + i);
    linear_step<C, R, J, 1>(one, x, i, rest);
  }
#pragma GCC unroll 16
  for (int k = 0; k < R * J; ++k) {
    sums[k] = rest[0][k];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) sums[k] += acc[u][k];
  }
}

// R rows of x times outputs [first, end) of the weight, into rows of `sums`.
template <class C, int R>
static void linear_rows(const LinearArgs& a, const typename C::query* const* x, int64_t first, int64_t end,
                        float* sums) {
  constexpr int J = LinearShape<R>::WEIGHT_ROWS, B = VW / R < J ? J : VW / R;  // outputs that fill a vector
  const typename C::raw* weight = static_cast<const typename C::raw*>(a.weight);
  for (int64_t o = first; o < end; o += B) {
    vf dots[R * B];
    for (int b = 0; b < B; b += J) {
      const typename C::raw* rows[J];
      for (int j = 0; j < J; ++j) rows[j] = weight + std::min(o + b + j, a.outputs - 1) * a.weight_row;
      linear_dots<C, R>(rows, x, a.inputs, dots + b * R);
    }
    float lanes[R * B];
    for (int v = 0; v < R * B; v += VW) store(lanes + v, Tree<VW>::sums(dots + v));
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r) sums[r * LINEAR_BLOCK + o - first + b] = lanes[b / J * J * R + r * J + b % J];
  }
}

template <class C>
static void linear_block(const LinearArgs& a, const typename C::query* x, int64_t x_row, int64_t first) {
  const int64_t end = std::min(first + LINEAR_BLOCK, a.outputs), size = element_size(a.dtype);
  float sums[LINEAR_ROWS * LINEAR_BLOCK], bias[LINEAR_BLOCK] = {};
  if (a.bias) any_row_to_float(static_cast<const char*>(a.bias) + first * size, bias, end - first, a.dtype);
  for (int64_t r = 0; r < a.rows; r += LINEAR_ROWS) {
    const int64_t n = std::min(a.rows - r, LINEAR_ROWS);
    const typename C::query* rows[LINEAR_ROWS];  // behind the last row: the last again
    for (int64_t k = 0; k < LINEAR_ROWS; ++k) rows[k] = x + (r + std::min(k, n - 1)) * x_row;
    if (n == 1) linear_rows<C, 1>(a, rows, first, end, sums);
    else if (n == 2) linear_rows<C, 2>(a, rows, first, end, sums);
    else if (n <= 4) linear_rows<C, 4>(a, rows, first, end, sums);
    else linear_rows<C, 8>(a, rows, first, end, sums);
    for (int64_t k = 0; k < n; ++k) {
      float* row = sums + k * LINEAR_BLOCK;
      for (int64_t i = 0; i < end - first; ++i) row[i] += bias[i];
      char* target = static_cast<char*>(a.output) + ((r + k) * a.outputs + first) * size;
      row_from_float(row, target, static_cast<int>(end - first), a.dtype);
    }
  }
}

template <class C>
static void linear_of(const LinearArgs& a, const typename C::query* x, int64_t x_row) {
  const int64_t blocks = (a.outputs + LINEAR_BLOCK - 1) / LINEAR_BLOCK;
  const int64_t worth = a.outputs * a.inputs * element_size(a.dtype) / LINEAR_SHARE;
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min(a.threads, worth)));
  if (threads == 1) {
    for (int64_t b = 0; b < blocks; ++b) linear_block<C>(a, x, x_row, b * LINEAR_BLOCK);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t b = 0; b < blocks; ++b) linear_block<C>(a, x, x_row, b * LINEAR_BLOCK);
}

// Rows of x as floats, in a buffer that the thread keeps.
static const float* float_rows(const LinearArgs& a) {
  static thread_local std::vector<float> buffer;
  room_for(buffer, a.rows * a.inputs);
  for (int64_t r = 0; r < a.rows; ++r)
    any_row_to_float(static_cast<const char*>(a.x) + r * a.x_row * element_size(a.dtype),
                     buffer.data() + r * a.inputs, static_cast<int>(a.inputs), a.dtype);
  return buffer.data();
}

static void linear_few(const LinearArgs& a) {
  if (a.dtype == FLOAT32) return linear_of<F32>(a, static_cast<const float*>(a.x), a.x_row);
#if defined(__AVX512BF16__)
  if (a.dtype == BFLOAT16) return linear_of<BF16Pairs>(a, static_cast<const uint16_t*>(a.x), a.x_row);
#endif
  if (a.dtype == BFLOAT16) return linear_of<BF16>(a, float_rows(a), a.inputs);
  linear_of<F16>(a, float_rows(a), a.inputs);
}
