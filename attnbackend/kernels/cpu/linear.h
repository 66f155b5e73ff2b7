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
static void linear_rows(const LinearArgs& a, const LinearPart& part, const typename C::query* const* x,
                        int64_t first, int64_t end, float* sums) {
  constexpr int J = LinearShape<R>::WEIGHT_ROWS, B = VW / R < J ? J : VW / R;  // outputs that fill a vector
  const typename C::raw* weight = static_cast<const typename C::raw*>(part.weight);
  for (int64_t o = first; o < end; o += B) {
    vf dots[R * B];
    for (int b = 0; b < B; b += J) {
      const typename C::raw* rows[J];
      for (int j = 0; j < J; ++j) rows[j] = weight + std::min(o + b + j, part.outputs - 1) * a.inputs;
      linear_dots<C, R>(rows, x, a.inputs, dots + b * R);
    }
    float lanes[R * B];
    for (int v = 0; v < R * B; v += VW) store(lanes + v, Tree<VW>::sums(dots + v));
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r) sums[r * LINEAR_BLOCK + o - first + b] = lanes[b / J * J * R + r * J + b % J];
  }
}

// The bias of N outputs from `first` on; 0 where there is none.
template <int64_t N>
static void read_bias(const LinearArgs& a, const LinearPart& part, int64_t first, float (&bias)[N]) {
  std::fill(bias, bias + N, 0.0f);
  if (!part.bias) return;
  const char* place = static_cast<const char*>(part.bias) + first * element_size(a.dtype);
  any_row_to_float(place, bias, static_cast<int>(std::min(N, part.outputs - first)), a.dtype);
}

// Sums as the type holds them that they would have been written in.
static void round_to(float* sums, int64_t n, int64_t dtype) {
  uint16_t stored[LINEAR_BLOCK * PANEL * VW];
  if (dtype == FLOAT32) return;
  row_from_float(sums, stored, static_cast<int>(n), dtype);
  any_row_to_float(stored, sums, static_cast<int>(n), dtype);
}

// Sums of gates and of what passes them, each as rounded as if it had been an output.
template <class C>
static void pass_gates(float* gates, float* passed, int64_t n, int64_t dtype) {
  if constexpr (!Products<C>::PAIRS) {
    round_to(gates, n, dtype);
    round_to(passed, n, dtype);
  }
  for (int64_t i = 0; i < n; i += VW) {
    const vf gate = Products<C>::rounded(load(gates + i));
    store(gates + i, silu(gate) * Products<C>::rounded(load(passed + i)));
  }
}

// Outputs first .. first + LINEAR_BLOCK of n rows, with the bias.
template <class C>
static void linear_sums(const LinearArgs& a, const LinearPart& part, const typename C::query* const* rows,
                        int64_t n, int64_t first, float* sums) {
  const int64_t end = std::min(first + LINEAR_BLOCK, part.outputs);
  if (n == 1) linear_rows<C, 1>(a, part, rows, first, end, sums);
  else if (n == 2) linear_rows<C, 2>(a, part, rows, first, end, sums);
  else if (n <= 4) linear_rows<C, 4>(a, part, rows, first, end, sums);
  else linear_rows<C, 8>(a, part, rows, first, end, sums);
  float bias[LINEAR_BLOCK];
  read_bias(a, part, first, bias);
  for (int64_t k = 0; k < n; ++k)
    for (int64_t i = 0; i < LINEAR_BLOCK; ++i) sums[k * LINEAR_BLOCK + i] += bias[i];
}

static char* output_place(const LinearArgs& a, const LinearPart& part, int64_t row, int64_t first) {
  return static_cast<char*>(part.output) + (row * part.outputs + first) * element_size(a.dtype);
}

// What is computed at a time: up to LINEAR_ROWS rows, and blocks [begin, end) of outputs.
template <class C>
struct Few {
  const typename C::query* rows[LINEAR_ROWS];  // behind the last row: the last again
  int64_t first_row, count, begin, end;
};

template <class C>
static void write_few(const LinearArgs& a, const LinearPart& part, const Few<C>& x, int64_t block, const float* sums) {
  const int64_t first = block * LINEAR_BLOCK, count = std::min(LINEAR_BLOCK, part.outputs - first);
  for (int64_t k = 0; k < x.count; ++k)
    row_from_float(sums + k * LINEAR_BLOCK, output_place(a, part, x.first_row + k, first), static_cast<int>(count),
                   a.dtype);
}

template <class C>
static void few_outputs(const LinearArgs& a, const LinearPart& part, const Few<C>& x) {
  float sums[LINEAR_ROWS * LINEAR_BLOCK] = {};
  for (int64_t b = x.begin; b < x.end; ++b) {
    linear_sums<C>(a, part, x.rows, x.count, b * LINEAR_BLOCK, sums);
    write_few<C>(a, part, x, b, sums);
  }
}

// All gates, then what passes them: each weight is one stream.
template <class C>
static void few_gated(const LinearArgs& a, const Few<C>& x) {
  static thread_local std::vector<float> gates;
  const int64_t size = x.count * LINEAR_BLOCK;
  room_for(gates, (x.end - x.begin) * size + LINEAR_ROWS * LINEAR_BLOCK);  // as many rows may be written at the end
  float passed[LINEAR_ROWS * LINEAR_BLOCK] = {};
  for (int64_t b = x.begin; b < x.end; ++b)
    linear_sums<C>(a, a.parts[0], x.rows, x.count, b * LINEAR_BLOCK, gates.data() + (b - x.begin) * size);
  for (int64_t b = x.begin; b < x.end; ++b) {
    float* sums = gates.data() + (b - x.begin) * size;
    linear_sums<C>(a, a.parts[1], x.rows, x.count, b * LINEAR_BLOCK, passed);
    pass_gates<C>(sums, passed, size, a.dtype);
    write_few<C>(a, a.parts[0], x, b, sums);
  }
}

static int64_t outputs_of(const LinearArgs& a) {
  int64_t outputs = 0;
  for (int64_t p = 0; p < a.num_parts; ++p) outputs += a.parts[p].outputs;
  return outputs;
}

// Parts that have an output of their own.
static int64_t written_parts(const LinearArgs& a) { return a.gated ? 1 : a.num_parts; }

// The rows from `row0` on, where x begins.
template <class C>
static void linear_of(const LinearArgs& a, const typename C::query* x, int64_t row0) {
  const int64_t worth = outputs_of(a) * a.inputs * element_size(a.dtype) / LINEAR_SHARE;
  const int64_t threads = std::max<int64_t>(1, std::min(a.threads, worth));
  const auto run = [&](int64_t t) {
    for (int64_t p = 0; p < written_parts(a); ++p) {
      const int64_t blocks = (a.parts[p].outputs + LINEAR_BLOCK - 1) / LINEAR_BLOCK;
      for (int64_t r = row0; r < a.rows; r += LINEAR_ROWS) {
        Few<C> some = {{}, r, std::min(a.rows - r, LINEAR_ROWS), blocks * t / threads, blocks * (t + 1) / threads};
        for (int64_t k = 0; k < LINEAR_ROWS; ++k)
          some.rows[k] = x + (r - row0 + std::min(k, some.count - 1)) * a.inputs;
        a.gated ? few_gated<C>(a, some) : few_outputs<C>(a, a.parts[p], some);
      }
    }
  };
  if (threads == 1) return run(0);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t t = 0; t < threads; ++t) run(t);
}

// Rows of x as floats, in a buffer that the thread keeps.
static const float* float_rows(const LinearArgs& a, int64_t first, int64_t rows) {
  static thread_local std::vector<float> buffer;
  room_for(buffer, rows * a.inputs);
  const char* place = static_cast<const char*>(a.x) + first * a.inputs * element_size(a.dtype);
  any_row_to_float(place, buffer.data(), static_cast<int>(rows * a.inputs), a.dtype);
  return buffer.data();
}

static void linear_few(const LinearArgs& a, int64_t row0) {
  const void* place = static_cast<const char*>(a.x) + row0 * a.inputs * element_size(a.dtype);
  if (a.dtype == FLOAT32) return linear_of<F32>(a, static_cast<const float*>(place), row0);
#if defined(__AVX512BF16__)
  if (a.dtype == BFLOAT16) return linear_of<BF16Pairs>(a, static_cast<const uint16_t*>(place), row0);
#endif
  const float* x = float_rows(a, row0, a.rows - row0);
  if (a.dtype == BFLOAT16) return linear_of<BF16>(a, x, row0);
  linear_of<F16>(a, x, row0);
}
