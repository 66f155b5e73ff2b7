// Products of many rows with a weight, as prompts make them: rows of x in the lanes, elements of the weight as
// scalars, so that the weight is read as it lies, and from memory once for each block of rows.
#pragma once
#include "linear.h"

constexpr int64_t COLUMN_BYTES = 1 << 19;  // of a block of rows, which stays in the second-level cache
constexpr int64_t SMALL_WEIGHT = 1 << 22;  // bytes that stay in a cache
constexpr int64_t GATED_VECTORS = 12;      // of rows, whose gates wait for what passes them
constexpr int64_t VECTORS_TO_SHARE = 16;
constexpr int64_t SUM_INPUTS = 192;         // longest chain of additions

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
  const void* rows = static_cast<const char*>(a.x) + x.first_row * a.inputs * element_size(a.dtype);
  if (!AS_IT_IS) rows = float_rows(a, x.first_row, x.rows);
  for (int64_t at = 0, n; at < x.vectors; at += n) {
    n = x.panel_vectors(at);
    for (int64_t v = 0; v < n; ++v)
      take_columns(static_cast<const typename C::query*>(rows) + (at + v) * VW * a.inputs, a.inputs,
                   x.rows - (at + v) * VW, x.lanes, x.panel(at) + v * VW, n * VW);
  }
}

// VW rows of the weight, of which the last is taken for those behind it, as the kernel multiplies them.
template <class C>
static void weight_rows(const LinearArgs& a, const LinearPart& part, int64_t first,
                        typename Products<C>::element* copies, const typename Products<C>::element** rows) {
  typedef typename Products<C>::element Element;
  const typename C::raw* weight = static_cast<const typename C::raw*>(part.weight);
  for (int64_t o = 0; o < VW; ++o) {
    const typename C::raw* row = weight + std::min(first + o, part.outputs - 1) * a.inputs;
    if constexpr (Products<C>::PAIRS || std::is_same_v<C, F32>) {
      rows[o] = reinterpret_cast<const Element*>(row);
    } else {
      row_to_float<C>(row, copies + o * a.inputs, static_cast<int>(a.inputs));
      rows[o] = copies + o * a.inputs;
    }
  }
}

// Rows of a weight that are multiplied later; no place: there are none, or not VW of them.
struct NextRows {
  const char* place;
  int64_t row_bytes, lane_bytes;

  // Lanes from `lane` up to `end` of KR rows from `row` on.
  void ask(int64_t row, int64_t lane, int64_t end) const {
    if (!place) return;
    for (int64_t r = row; r < row + KR; ++r)
      for (int64_t at = lane * lane_bytes; at < end * lane_bytes; at += 64) ask_for(place + r * row_bytes + at);
  }
};

template <class C>
static NextRows rows_at(const LinearArgs& a, const LinearPart& part, int64_t first) {
  const int64_t row_bytes = a.inputs * element_size(a.dtype);
  const char* place = static_cast<const char*>(part.weight) + first * row_bytes;
  return {first + VW <= part.outputs ? place : nullptr, row_bytes,
          Products<C>::PAIRS ? 4 : static_cast<int64_t>(sizeof(typename C::raw))};
}

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

// Asks for the places of outputs ahead of time, which lie a row apart from each other.
static void ask_for_places(const LinearArgs& a, const LinearPart& part, const Columns& x, int64_t at, int64_t n,
                           int64_t first) {
  for (int64_t r = at * VW; r < std::min((at + n) * VW, x.rows); ++r)
    __builtin_prefetch(output_place(a, part, x.first_row + r, first), 1, 2);
}

// `sums` [VW][stride] of the rows from `row` on, with the bias, to where they belong.
template <class C>
static void write_sums(const LinearArgs& a, const LinearPart& part, int64_t row, int64_t rows, int64_t first,
                       const float* sums, int64_t stride, const float* bias) {
  const int64_t count = std::min<int64_t>(VW, part.outputs - first);
  float lanes[VW * VW];
  transpose(sums, stride, lanes, VW);
  for (int64_t r = 0; r < std::min<int64_t>(VW, rows); ++r) {
    const vf result = load(lanes + r * VW) + load(bias);
    char* place = output_place(a, part, row + r, first);
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
void write_sums<BF16Pairs>(const LinearArgs& a, const LinearPart& part, int64_t row, int64_t rows, int64_t first,
                           const float* sums, int64_t stride, const float* bias) {
  const int64_t count = std::min<int64_t>(VW, part.outputs - first);
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
    char* place = output_place(a, part, row + r, first);
    if (count == VW) std::memcpy(place, lanes, VW * 2);  // of a known size: no call
    else std::memcpy(place, lanes, count * 2);
  }
}
#endif

// What outputs first .. first + VW are computed of.
template <class C>
struct WeightBlock {
  typedef Products<C> P;
  const typename P::element* rows[VW];
  float bias[VW];
  NextRows next;

  // Where copies of a weight are multiplied, it is good until another is made on this thread.
  WeightBlock(const LinearArgs& a, const LinearPart& part, int64_t first, const NextRows& next) : next(next) {
    static thread_local std::vector<typename P::element> copies;
    if (!P::PAIRS && !std::is_same_v<C, F32>) room_for(copies, VW * a.inputs);
    weight_rows<C>(a, part, first, copies.data(), rows);
    read_bias(a, part, first, bias);
  }

  // Of n vectors of rows; the next block is asked for with the first of them.
  void sums_of(const Columns& x, int64_t at, int64_t n, float* sums) const {
    const NextRows asked = at == 0 ? next : NextRows{};
    if (n == 1) panel_sums<P, 1>(x, at, rows, asked, sums);
    else if (n == 2) panel_sums<P, 2>(x, at, rows, asked, sums);
    else panel_sums<P, 3>(x, at, rows, asked, sums);
  }

  void add_bias(float* sums, int64_t rows) const {
    for (int64_t o = 0; o < VW; ++o)
      for (int64_t r = 0; r < rows; r += VW) store(sums + o * rows + r, load(sums + o * rows + r) + bias[o]);
  }
};

// `sums` of n vectors of rows, from vector `at` of the block on, to where they belong.
template <class C>
static void write_panel(const LinearArgs& a, const LinearPart& part, const Columns& x, int64_t at, int64_t n,
                        int64_t first, const float* sums, const float* bias) {
  for (int64_t v = at; v < at + n; ++v)
    write_sums<C>(a, part, x.first_row + v * VW, x.rows - v * VW, first, sums + (v - at) * VW, n * VW, bias);
}

// Outputs first .. first + VW of a block of rows.
template <class C>
static void many_block(const LinearArgs& a, const LinearPart& part, const Columns& x, int64_t first,
                       const NextRows& next) {
  const WeightBlock<C> weight(a, part, first, next);
  float sums[VW * PANEL * VW];
  for (int64_t at = 0, n; at < x.vectors; at += n) {
    n = x.panel_vectors(at);
    ask_for_places(a, part, x, at, n, first);
    weight.sums_of(x, at, n, sums);
    write_panel<C>(a, part, x, at, n, first, sums, weight.bias);
  }
}

// The same of a gated product: gates of some rows, then what passes them, so that a weight stays in the cache.
template <class C>
static void gated_block(const LinearArgs& a, const Columns& x, int64_t first) {
  static const float no_bias[VW] = {};
  float gates[GATED_VECTORS * VW * VW], passed[VW * PANEL * VW];
  for (int64_t start = 0, end; start < x.vectors; start = end) {
    end = start;
    {
      const WeightBlock<C> weight(a, a.parts[0], first, rows_at<C>(a, a.parts[0], first + VW));
      for (int64_t n; end < x.vectors && end + PANEL <= start + GATED_VECTORS; end += n) {
        n = x.panel_vectors(end);
        float* sums = gates + (end - start) * VW * VW;
        weight.sums_of(x, end, n, sums);
        weight.add_bias(sums, n * VW);
      }
    }
    const WeightBlock<C> weight(a, a.parts[1], first, rows_at<C>(a, a.parts[1], first + VW));
    for (int64_t at = start, n; at < end; at += n) {
      n = x.panel_vectors(at);
      ask_for_places(a, a.parts[0], x, at, n, first);
      weight.sums_of(x, at, n, passed);
      weight.add_bias(passed, n * VW);
      float* sums = gates + (at - start) * VW * VW;
      pass_gates<C>(sums, passed, VW * n * VW, a.dtype);
      write_panel<C>(a, a.parts[0], x, at, n, first, sums, no_bias);
    }
  }
}

// What one thread computes: whole vectors of rows, and a share of the blocks of outputs of each part.
struct Task {
  int64_t row, end_row, place, places;
  int64_t begin(const LinearPart& part) const { return (part.outputs + VW - 1) / VW * place / places; }
  int64_t end(const LinearPart& part) const { return (part.outputs + VW - 1) / VW * (place + 1) / places; }
};

// The rows of weights that a task begins with are asked for while there is other work.
template <class C>
static void ask_for_first(const LinearArgs& a, const Task& task, int64_t lanes) {
  for (int64_t p = 0; p <= a.gated; ++p) {
    const NextRows rows = rows_at<C>(a, a.parts[p], task.begin(a.parts[p]) * VW);
    for (int64_t r = 0; r < VW; r += KR) rows.ask(r, 0, lanes);
  }
}

template <class C>
static void task_blocks(const LinearArgs& a, const Task& task, const Columns& x) {
  for (int64_t p = 0; p < written_parts(a); ++p) {
    const LinearPart &part = a.parts[p], &following = a.parts[std::min(p + 1, a.num_parts - 1)];
    for (int64_t b = task.begin(part), end = task.end(part); b < end; ++b) {
      if (a.gated) gated_block<C>(a, x, b * VW);
      else if (b + 1 < end) many_block<C>(a, part, x, b * VW, rows_at<C>(a, part, (b + 1) * VW));
      else many_block<C>(a, part, x, b * VW, rows_at<C>(a, following, task.begin(following) * VW));
    }
  }
}

// Rows in blocks of about equally many.
template <class C>
static void many_task(const LinearArgs& a, const Task& task) {
  static thread_local std::vector<float> buffer;
  const int64_t lanes = a.inputs * sizeof(typename C::query) / sizeof(float), rows = task.end_row - task.row;
  const int64_t most = std::max<int64_t>(2 * PANEL, COLUMN_BYTES / (lanes * 4 * VW)) * VW;
  const int64_t blocks = (rows + most - 1) / most, each = round_up((rows + blocks - 1) / blocks, VW);
  room_for(buffer, each * lanes + VW);
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data());
  Columns x = {reinterpret_cast<float*>((start + VW * 4 - 1) / (VW * 4) * (VW * 4)), lanes};
  for (x.first_row = task.row; x.first_row < task.end_row; x.first_row += each) {
    x.rows = std::min(each, task.end_row - x.first_row);
    x.vectors = (x.rows + VW - 1) / VW;
    ask_for_first<C>(a, task, lanes);
    take_rows<C>(a, x);
    task_blocks<C>(a, task, x);
  }
}

// Threads share the outputs, each with columns of its own; or the rows, where there are VECTORS_TO_SHARE for each:
// that takes less work, and every thread reads the whole weight.
template <class C>
static void many_of(const LinearArgs& a, int64_t rows) {
  const int64_t vectors = (rows + VW - 1) / VW, threads = a.threads;
  int64_t shares = threads;
  while (shares > 1 && (threads % shares || vectors < VECTORS_TO_SHARE * shares)) --shares;
  const auto run = [&](int64_t t) {
    const int64_t i = t % shares;
    many_task<C>(a, {vectors * i / shares * VW, std::min(rows, vectors * (i + 1) / shares * VW), t / shares,
                     threads / shares});
  };
  if (threads == 1) return run(0);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t t = 0; t < threads; ++t) run(t);
}

// The first `rows` rows.
static void linear_many(const LinearArgs& a, int64_t rows) {
  if (a.dtype == FLOAT32) return many_of<F32>(a, rows);
#if defined(__AVX512BF16__)
  if (a.dtype == BFLOAT16) return many_of<BF16Pairs>(a, rows);
#endif
  if (a.dtype == BFLOAT16) return many_of<BF16>(a, rows);
  many_of<F16>(a, rows);
}

// Rows that fill at most half a vector are cheaper without one, unless a weight is read from memory again for them.
static void linear(const LinearArgs& a) {
  const bool is_small = a.inputs * outputs_of(a) * element_size(a.dtype) <= SMALL_WEIGHT;
  const int64_t rest = a.rows % VW, few = 2 * rest <= VW && (rest == a.rows || is_small) ? rest : 0;
  if (few < a.rows) linear_many(a, a.rows - few);
  if (few) linear_few(a, a.rows - few);
}
