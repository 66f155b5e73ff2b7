// Products of many rows with a weight, as prompts make them: rows of x in the lanes, elements of the weight as
// scalars, so that the weight is read as it lies, and from memory once for each block of rows.
#pragma once
#include "linear.h"

constexpr int64_t COLUMN_BYTES = 1 << 19;  // of a block of rows, which stays in the second-level cache
constexpr int64_t SMALL_WEIGHT = 1 << 22;  // bytes that stay in a cache
constexpr int64_t SUM_INPUTS = 128;         // longest chain of additions

// A block of rows as columns: panels of up to PANEL vectors of rows, each [inputs or pairs][rows].
struct Columns {
  float* data;
  int64_t lanes, first_row, rows, vectors;
  int64_t panel_vectors(int64_t at) const { return vectors - at == 4 ? 2 : std::min<int64_t>(PANEL, vectors - at); }
  float* panel(int64_t at) const { return data + at * VW * lanes; }
};

// VW rows of x from `row` on, as columns of a panel with `stride` rows; behind the last row: the last again.
template <class Query>
static void take_columns(const Query* x, int64_t x_row, int64_t rows, int64_t lanes, float* columns,
                         int64_t stride) {
  const float* source = reinterpret_cast<const float*>(x);
  const int64_t step = x_row * sizeof(Query) / sizeof(float);
  if (rows >= VW) {
    for (int64_t i = 0; i < lanes; i += VW) {
      transpose(source + i, step, columns + i * stride, stride);
      for (int64_t r = VW; r < std::min<int64_t>(2 * VW, rows); ++r) ask_for(source + r * step + i);  // the next ones
    }
    return;
  }
  float some[VW * VW];
  for (int64_t i = 0; i < lanes; i += VW) {
    for (int64_t r = 0; r < VW; ++r) store(some + r * VW, load(source + std::min(r, rows - 1) * step + i));
    transpose(some, VW, columns + i * stride, stride);
  }
}

// The rows of a block as columns.
template <class C>
static void take_rows(const LinearArgs& a, const Columns& x) {
  constexpr bool AS_IT_IS = Products<C>::PAIRS || std::is_same_v<C, F32>;
  LinearArgs some = a;
  some.rows = x.rows;
  some.x = static_cast<const char*>(a.x) + x.first_row * a.x_row * element_size(a.dtype);
  const void* rows = AS_IT_IS ? some.x : float_rows(some);
  const int64_t x_row = AS_IT_IS ? a.x_row : a.inputs;
  for (int64_t at = 0, n; at < x.vectors; at += n) {
    n = x.panel_vectors(at);
    for (int64_t v = 0; v < n; ++v)
      take_columns(static_cast<const typename C::query*>(rows) + (at + v) * VW * x_row, x_row,
                   x.rows - (at + v) * VW, x.lanes, x.panel(at) + v * VW, n * VW);
  }
}

// VW rows of the weight, of which the last is taken for those behind it, as the kernel multiplies them.
template <class C>
static void weight_rows(const LinearArgs& a, int64_t first, typename Products<C>::element* copies,
                        const typename Products<C>::element** rows) {
  typedef typename Products<C>::element Element;
  const typename C::raw* weight = static_cast<const typename C::raw*>(a.weight);
  for (int64_t o = 0; o < VW; ++o) {
    const typename C::raw* row = weight + std::min(first + o, a.outputs - 1) * a.weight_row;
    if constexpr (Products<C>::PAIRS || std::is_same_v<C, F32>) {
      rows[o] = reinterpret_cast<const Element*>(row);
    } else {
      row_to_float<C>(row, copies + o * a.inputs, static_cast<int>(a.inputs));
      rows[o] = copies + o * a.inputs;
    }
  }
}

// Where the rows of the weight lie that come next; null where they are asked for already.
struct NextRows {
  const char* place;
  int64_t row_bytes, lane_bytes;

  void ask(int64_t row, int64_t lane, int64_t end) const {
    if (!place) return;
    for (int64_t r = row; r < row + KR; ++r)
      for (int64_t at = lane * lane_bytes; at < end * lane_bytes; at += 64) ask_for(place + r * row_bytes + at);
  }
};

// sums[o][row] of VW outputs, in turns of KR, and of N vectors of rows.
template <class P, int N>
static void panel_sums(const Columns& x, int64_t at, const typename P::element* const* weight,
                       const NextRows& next, float* sums) {
  const auto* panel = reinterpret_cast<const typename P::element*>(x.panel(at));
  for (int64_t i = 0; i < x.lanes; i += SUM_INPUTS) {
    const int64_t end = std::min(x.lanes, i + SUM_INPUTS);
    for (int64_t o = 0; o < VW; o += KR) {
      next.ask(o, i, end);
      wide_products<P, N>(panel, N * VW, weight + o, static_cast<int>(i), static_cast<int>(end), 1.0f,
                          sums + o * N * VW);
    }
  }
}

static char* output_place(const LinearArgs& a, int64_t row, int64_t first) {
  return static_cast<char*>(a.output) + (row * a.outputs + first) * element_size(a.dtype);
}

// Asks for the places of outputs ahead of time, which lie a row apart from each other.
static void ask_for_places(const LinearArgs& a, int64_t row, int64_t rows, int64_t first) {
  for (int64_t r = row; r < row + rows; ++r) __builtin_prefetch(output_place(a, r, first), 1, 2);
}

// `sums` [VW][stride] of the rows from `row` on, with the bias, to where they belong.
template <class C>
static void write_sums(const LinearArgs& a, int64_t row, int64_t rows, int64_t first, const float* sums,
                       int64_t stride, const float* bias) {
  const int64_t count = std::min<int64_t>(VW, a.outputs - first);
  float lanes[VW * VW];
  transpose(sums, stride, lanes, VW);
  for (int64_t r = 0; r < std::min<int64_t>(VW, rows); ++r) {
    const vf result = load(lanes + r * VW) + load(bias);
    char* place = output_place(a, row + r, first);
    if (a.dtype == FLOAT32 && count == VW) {
      store(reinterpret_cast<float*>(place), result);
    } else {
      store(lanes + r * VW, result);
      row_from_float(lanes + r * VW, place, static_cast<int>(count), a.dtype);
    }
  }
}

#if defined(__AVX512BF16__)
// Two outputs become a pair before they are transposed, which halves that.
template <>
void write_sums<BF16Pairs>(const LinearArgs& a, int64_t row, int64_t rows, int64_t first, const float* sums,
                           int64_t stride, const float* bias) {
  const int64_t count = std::min<int64_t>(VW, a.outputs - first);
  vf pairs[VW / 2];
#pragma GCC unroll 8
  for (int o = 0; o < VW / 2; ++o) {
    const float* place = sums + 2 * o * stride;
    pairs[o] = (vf)Products<BF16Pairs>::round(load(place) + bias[2 * o], load(place + stride) + bias[2 * o + 1]);
  }
#pragma GCC unroll 3
  for (int n = 1; n < VW / 2; n *= 2) zip_halves(pairs);
#pragma GCC unroll 16
  for (int r = 0; r < VW; ++r) {
    const char* lanes = reinterpret_cast<const char*>(pairs) + r * VW * 2;
    if (r >= rows) continue;
    char* place = output_place(a, row + r, first);
    if (count == VW) std::memcpy(place, lanes, VW * 2);  // of a known size: no call
    else std::memcpy(place, lanes, count * 2);
  }
}
#endif

// Outputs first .. first + VW of a block of rows.
template <class C>
static void many_block(const LinearArgs& a, const Columns& x, int64_t first) {
  typedef Products<C> P;
  static thread_local std::vector<typename P::element> copies;
  if (!P::PAIRS && !std::is_same_v<C, F32>) room_for(copies, VW * a.inputs);
  const typename P::element* weight[VW];
  weight_rows<C>(a, first, copies.data(), weight);
  const int64_t size = element_size(a.dtype), count = std::min<int64_t>(VW, a.outputs - first);
  float bias[VW] = {}, sums[VW * PANEL * VW];
  if (a.bias) any_row_to_float(static_cast<const char*>(a.bias) + first * size, bias, static_cast<int>(count), a.dtype);
  const int64_t row_bytes = a.weight_row * size;
  const char* following = static_cast<const char*>(a.weight) + (first + VW) * row_bytes;
  for (int64_t at = 0, n; at < x.vectors; at += n) {
    n = x.panel_vectors(at);
    const bool asks = at == 0 && first + 2 * VW <= a.outputs;
    const NextRows next = {asks ? following : nullptr, row_bytes, P::PAIRS ? 4 : int64_t(sizeof(typename C::raw))};
    ask_for_places(a, x.first_row + at * VW, std::min(n * VW, x.rows - at * VW), first);
    if (n == 1) panel_sums<P, 1>(x, at, weight, next, sums);
    else if (n == 2) panel_sums<P, 2>(x, at, weight, next, sums);
    else panel_sums<P, 3>(x, at, weight, next, sums);
    for (int64_t v = 0; v < n; ++v)
      write_sums<C>(a, x.first_row + (at + v) * VW, x.rows - (at + v) * VW, first, sums + v * VW, n * VW, bias);
  }
}

// What one thread computes: whole vectors of rows, whole blocks of outputs.
struct Part {
  int64_t row, end_row, block, end_block;
};

// Rows in blocks of about equally many.
template <class C>
static void many_part(const LinearArgs& a, const Part& part) {
  static thread_local std::vector<float> buffer;
  const int64_t lanes = a.inputs * sizeof(typename C::query) / sizeof(float), rows = part.end_row - part.row;
  const int64_t most = std::max<int64_t>(2 * PANEL, COLUMN_BYTES / (lanes * 4 * VW)) * VW;
  const int64_t blocks = (rows + most - 1) / most, each = round_up((rows + blocks - 1) / blocks, VW);
  room_for(buffer, each * lanes + VW);
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data());
  Columns x = {reinterpret_cast<float*>((start + VW * 4 - 1) / (VW * 4) * (VW * 4)), lanes};
  for (x.first_row = part.row; x.first_row < part.end_row; x.first_row += each) {
    x.rows = std::min(each, part.end_row - x.first_row);
    x.vectors = (x.rows + VW - 1) / VW;
    take_rows<C>(a, x);
    for (int64_t b = part.block; b < part.end_block; ++b) many_block<C>(a, x, b * VW);
  }
}

// Threads share the rows, as far as there are two vectors of them for each, and then the outputs.
template <class C>
static void many_of(const LinearArgs& a) {
  const int64_t vectors = (a.rows + VW - 1) / VW, blocks = (a.outputs + VW - 1) / VW, threads = a.threads;
  int64_t shares = threads;
  while (shares > 1 && (threads % shares || vectors < 2 * shares)) --shares;
  const int64_t others = threads / shares;
  const auto run = [&](int64_t t) {
    const int64_t i = t % shares, j = t / shares;
    many_part<C>(a, {vectors * i / shares * VW, std::min(a.rows, vectors * (i + 1) / shares * VW),
                     blocks * j / others, blocks * (j + 1) / others});
  };
  if (threads == 1) return run(0);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t t = 0; t < threads; ++t) run(t);
}

static void linear_many(const LinearArgs& a) {
  if (a.dtype == FLOAT32) return many_of<F32>(a);
#if defined(__AVX512BF16__)
  if (a.dtype == BFLOAT16) return many_of<BF16Pairs>(a);
#endif
  if (a.dtype == BFLOAT16) return many_of<BF16>(a);
  many_of<F16>(a);
}

// Rows that fill at most half a vector are cheaper without one, unless a weight is read from memory again for them.
static void linear(const LinearArgs& a) {
  const bool is_small = a.inputs * a.outputs * element_size(a.dtype) <= SMALL_WEIGHT;
  const int64_t rest = a.rows % VW, few = 2 * rest <= VW && (rest == a.rows || is_small) ? rest : 0;
  const int64_t many = a.rows - few;
  LinearArgs some = a;
  some.rows = many;
  if (many) linear_many(some);
  if (!few) return;
  some.rows = few;
  some.x = static_cast<const char*>(a.x) + many * a.x_row * element_size(a.dtype);
  some.output = static_cast<char*>(a.output) + many * a.outputs * element_size(a.dtype);
  linear_few(some);
}
