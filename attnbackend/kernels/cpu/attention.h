// Paged attention: what a work item is, how one is computed, and how split items are merged.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "args.h"
#include "tile.h"

// Rows [row0, row1) of one request and kv head, over keys [key0, key1). A row is one
// (token, query head) pair, numbered token * group + head within the group.
struct Item {
  int32_t request, kv_head;
  int64_t row0, row1;
  int32_t key0, key1;
  int64_t merge;  // index of the merge that it takes part in, -1 for none
  int64_t part;   // its place among that merge's parts
};

struct Merge {
  int64_t parts, first_float;
  std::atomic<int64_t> left;
};

static inline int64_t part_stride(const AttentionArgs& a) { return round_up(a.value_size, VW) + 2; }
static inline int64_t group_size(const AttentionArgs& a) { return a.heads / a.kv_heads; }
static inline int64_t query_length(const AttentionArgs& a, int64_t request) {
  return a.query_start_loc[request + 1] - a.query_start_loc[request];
}

struct Bounds {
  int32_t low, high, position;
};

static inline int64_t floor_div(int64_t n, int64_t m) { return (n >= 0 ? n : n - m + 1) / m; }

// Ranges that hold the position join with the keys it sees anyway, which hold it too: one interval.
static inline void widen(const AttentionArgs& a, int64_t request, int64_t position, int64_t length,
                         int64_t* low, int64_t* high) {
  const int32_t* range = a.ranges + request * a.num_ranges * 2;
  for (int64_t i = 0; i < a.num_ranges; ++i, range += 2) {
    if (position < range[0] || position >= range[1]) continue;
    *low = std::min<int64_t>(*low, std::max(range[0], 0));
    *high = std::max(*high, std::min<int64_t>(range[1], length));
  }
}

// The keys [low, high) that a row sees.
static inline Bounds row_bounds(const AttentionArgs& a, int64_t request, int64_t row) {
  const int64_t length = a.seq_lens[request];
  const int64_t position = length - query_length(a, request) + row / group_size(a);
  int64_t high = a.causal ? std::min(position + 1, length) : length;
  int64_t low = a.window > 0 ? position - a.window + 1 : 0;
  if (a.two_sided) high = std::min(high, position + a.window);
  if (a.chunk > 0) {
    low = floor_div(position, a.chunk) * a.chunk;
    high = std::min(high, low + a.chunk);
  }
  low = std::min(std::max<int64_t>(low, 0), length);
  high = std::max<int64_t>(high, 0);
  if (a.ranges) widen(a, request, position, length, &low, &high);
  return {static_cast<int32_t>(low), static_cast<int32_t>(high), static_cast<int32_t>(position)};
}

// The keys that some of rows [row0, row1) may see: bounds grow with the row, but for ranges.
static inline void key_range(const AttentionArgs& a, int64_t request, int64_t row0, int64_t row1,
                             int32_t* key0, int32_t* key1) {
  *key0 = row_bounds(a, request, row0).low;
  *key1 = row_bounds(a, request, row1 - 1).high;
  for (int64_t row = row0; a.ranges && row < row1; row += group_size(a)) {
    const Bounds bounds = row_bounds(a, request, row);
    *key0 = std::min(*key0, bounds.low);
    *key1 = std::max(*key1, bounds.high);
  }
  *key1 = std::max(*key0, *key1);
}

// ---- refusals -----------------------------------------------------------------------------------

static Refusal check_request(const AttentionArgs& a, int64_t r) {
  const int64_t start = a.query_start_loc[r], end = a.query_start_loc[r + 1];
  if (end < start || (r == 0 && start != 0)) return {BAD_START_LOC, r, end, start};
  if (end == start) return {};
  const int64_t length = a.seq_lens[r];
  if (length < 0) return {NEGATIVE_SEQ_LEN, r, length, 0};
  if (a.paged && length > a.table_width * a.block_size) return {TABLE_TOO_NARROW, r, length, 0};
  if (!a.paged && length > end - start) return {MORE_KEYS_THAN_TOKENS, r, length, end - start};
  if (end > a.tokens) return {TOO_MANY_TOKENS, end, 0, 0};
  if (!a.paged) return {};
  int32_t key0, key1;
  key_range(a, r, 0, (end - start) * group_size(a), &key0, &key1);
  if (key0 == key1) return {};
  const int32_t* row = a.block_table + r * a.table_row;
  for (int64_t c = key0 / a.block_size; c <= (key1 - 1) / a.block_size; ++c)
    if (row[c] < 0 || row[c] >= a.blocks) return {BAD_BLOCK, r, c, row[c]};
  return {};
}

static Refusal check(const AttentionArgs& a) {
  for (int64_t r = 0; r < a.requests; ++r) {
    const Refusal refusal = check_request(a, r);
    if (refusal.code) return refusal;
  }
  return {};
}

// ---- results ------------------------------------------------------------------------------------

static void write_row(const AttentionArgs& a, const Item& item, int64_t row, float* acc,
                      float maximum, float sum) {
  const int64_t group = group_size(a), head = item.kv_head * group + row % group;
  const int64_t token = a.query_start_loc[item.request] + row / group;
  const bool empty = !(sum != 0);  // no visible key; a NaN sum stays
  float factor = empty ? 0.0f : 1.0f / sum;
  float lse = empty ? -INFINITY : maximum + std::log(sum);
  if (a.sinks && a.seq_lens[item.request] > 0) {
    const float sink = a.sinks[head], top = sink > maximum ? sink : maximum;
    const float base = top == -INFINITY ? 0.0f : top;
    const float mine = empty ? 0.0f : std::exp(maximum - base);
    const float total = mine * sum + std::exp(sink - base);
    factor = empty ? 0.0f : mine / total;
    lse = base + std::log(total);
  }
  if (a.v_scale) factor *= a.v_scale[item.kv_head * a.v_scale_step];
  for (int64_t i = 0; i < a.value_size; ++i) acc[i] = empty ? 0.0f : acc[i] * factor;
  char* target = static_cast<char*>(a.output) + element_size(a.output_dtype) *
                 (token * a.output_token + head * a.output_head);
  row_from_float(acc, target, static_cast<int>(a.value_size), a.output_dtype);
  if (a.lse) a.lse[token * a.lse_token + head * a.lse_head] = lse;
}

static void write_empty_token(const AttentionArgs& a, int64_t token) {
  for (int64_t h = 0; h < a.heads; ++h) {
    char* target = static_cast<char*>(a.output) + element_size(a.output_dtype) *
                   (token * a.output_token + h * a.output_head);
    std::memset(target, 0, a.value_size * element_size(a.output_dtype));
    if (a.lse) a.lse[token * a.lse_token + h * a.lse_head] = -INFINITY;
  }
}

// Parts of one item, each [rows][value_size + 2] with maximum and sum last, into the output.
static void merge_parts(const AttentionArgs& a, const Item& item, const Merge& merge,
                        const float* floats) {
  const int64_t stride = part_stride(a), width = stride - 2, rows = item.row1 - item.row0;
  std::vector<float> acc(width);
  for (int64_t r = 0; r < rows; ++r) {
    const float* first = floats + merge.first_float + r * stride;
    float maximum = -INFINITY, sum = 0;
    for (int64_t p = 0; p < merge.parts; ++p) {
      const float m = first[p * rows * stride + width];
      maximum = m > maximum ? m : maximum;
    }
    std::fill(acc.begin(), acc.end(), 0.0f);
    for (int64_t p = 0; p < merge.parts; ++p) {
      const float* part = first + p * rows * stride;
      const float base = maximum == -INFINITY ? 0.0f : maximum;
      const float weight = std::exp(part[width] - base);
      sum += part[width + 1] == 0 ? 0.0f : weight * part[width + 1];
      if (part[width + 1] == 0) continue;  // saw nothing
      for (int64_t i = 0; i < width; ++i) acc[i] += weight * part[i];
    }
    write_row(a, item, item.row0 + r, acc.data(), maximum, sum);
  }
}

// ---- items --------------------------------------------------------------------------------------

struct Scratch {  // carved from one buffer that a thread keeps between calls
  float *q, *scores, *keys, *values, *acc, *out, *sums;
  RowInfo rows;
};

static Scratch& scratch_for(const AttentionArgs& a) {
  static thread_local Scratch scratch;
  static thread_local std::vector<float> buffer;
  const int64_t d = round_up(a.head_size, VW), dv = round_up(a.value_size, VW);
  const int64_t sizes[] = {d * WIDE_ROWS, int64_t(KT) * WIDE_ROWS, KT * d, KT * dv,
                           dv * WIDE_ROWS, dv * WIDE_ROWS, 4 * VW * VW};
  float** places[] = {&scratch.q, &scratch.scores, &scratch.keys, &scratch.values,
                      &scratch.acc, &scratch.out, &scratch.sums};
  int64_t total = VW;
  for (int64_t size : sizes) total += round_up(size, VW);
  if (static_cast<int64_t>(buffer.size()) < total) buffer.resize(total);
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data());
  float* at = reinterpret_cast<float*>((start + VW * 4 - 1) / (VW * 4) * (VW * 4));
  for (int i = 0; i < 7; ++i) {
    *places[i] = at;
    at += round_up(sizes[i], VW);
  }
  return scratch;
}

static void set_rows(const AttentionArgs& a, const Item& item, int64_t padded, RowInfo& rows) {
  rows.count = item.row1 - item.row0;
  rows.last_low = 0;
  rows.first_high = INT32_MAX;
  for (int64_t r = 0; r < padded; ++r) {
    const int64_t row = item.row0 + std::min(r, rows.count - 1);
    const Bounds bounds = row_bounds(a, item.request, row);
    rows.low[r] = bounds.low;
    rows.high[r] = bounds.high;
    rows.last_low = std::max(rows.last_low, bounds.low);
    rows.first_high = std::min(rows.first_high, bounds.high);
    rows.position[r] = bounds.position;
    const int64_t head = item.kv_head * group_size(a) + row % group_size(a);
    rows.slope[r] = a.alibi_slopes ? a.alibi_slopes[head] : 0.0f;
    rows.maximum[r] = -INFINITY;
    rows.sum[r] = 0;
  }
}

// One query row as float, times scale and the key scale.
static void read_query(const AttentionArgs& a, const Item& item, int64_t row, float* q) {
  const int64_t group = group_size(a), head = item.kv_head * group + row % group;
  const int64_t token = a.query_start_loc[item.request] + row / group;
  const char* source = static_cast<const char*>(a.query) + element_size(a.query_dtype) *
                       (token * a.query_token + head * a.query_head);
  any_row_to_float(source, q, static_cast<int>(a.head_size), a.query_dtype);
  const float k_scale = a.k_scale ? a.k_scale[item.kv_head * a.k_scale_step] : 1.0f;
  const float scale = static_cast<float>(a.scale) * k_scale;
  for (int64_t i = 0; i < a.head_size; ++i) q[i] *= scale;
}

// Pointers to the K and V rows of a tile's keys.
template <class C>
struct Rows {
  typedef typename C::raw raw;
  const raw *keys[KT], *values[KT];

  void find_in_blocks(const AttentionArgs& a, const int32_t* table, int64_t first, int count,
                      const raw* k, const raw* v) {
    int64_t column = first / a.block_size, slot = first % a.block_size;
    for (int j = 0; j < count; ++column, slot = 0) {
      const int64_t block = table[column];
      for (; slot < a.block_size && j < count; ++slot, ++j) {
        keys[j] = k + block * a.k_block + slot * a.k_slot;
        values[j] = v + block * a.v_block + slot * a.v_slot;
      }
    }
  }

  void find_tile(const AttentionArgs& a, const Item& item, int64_t first) {
    const int count = static_cast<int>(std::min<int64_t>(KT, item.key1 - first));
    const raw* k = static_cast<const raw*>(a.key_cache) + item.kv_head * a.k_head;
    const raw* v = static_cast<const raw*>(a.value_cache) + item.kv_head * a.v_head;
    if (a.paged) {
      find_in_blocks(a, a.block_table + item.request * a.table_row, first, count, k, v);
    } else {
      const int64_t token = a.query_start_loc[item.request] + first;
      for (int j = 0; j < count; ++j) {
        keys[j] = k + (token + j) * a.k_slot;
        values[j] = v + (token + j) * a.v_slot;
      }
    }
    if (count <= 0) return;
    for (int j = count; j < round_up(count, VW); ++j) keys[j] = keys[count - 1];
  }
};

static inline bool needs_rules(const RowInfo& rows, int64_t first, int64_t end,
                               const ScoreRules& rules) {
  if (rules.cap > 0 || rules.alibi) return true;
  return rows.last_low > first || rows.first_high < end;
}

static void give_result(const AttentionArgs& a, const Item& item, const RowInfo& rows, float* acc,
                        int64_t width, Merge* merges, float* floats) {
  if (item.merge < 0) {
    for (int64_t r = 0; r < rows.count; ++r)
      write_row(a, item, item.row0 + r, acc + r * width, rows.maximum[r], rows.sum[r]);
    return;
  }
  Merge& merge = merges[item.merge];
  const int64_t stride = part_stride(a);
  float* part = floats + merge.first_float + item.part * rows.count * stride;
  for (int64_t r = 0; r < rows.count; ++r, part += stride) {
    std::memcpy(part, acc + r * width, (stride - 2) * sizeof(float));
    part[stride - 2] = rows.maximum[r];
    part[stride - 1] = rows.sum[r];
  }
  if (merge.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
    merge_parts(a, item, merge, floats);
}

template <class C, int R>
static void narrow_block(const AttentionArgs& a, const Rows<C>& at, const Rows<C>& next,
                         Scratch& s, int64_t r0, int64_t first, int count,
                         const ScoreRules& rules) {
  const int64_t q_row = round_up(a.head_size, VW), width = round_up(a.value_size, VW);
  const int padded = static_cast<int>(round_up(count, VW));
  narrow_scores<C, R>(s.q + r0 * q_row, q_row, at.keys, count, static_cast<int>(a.head_size),
                      s.scores, s.sums, {at.values, r0 ? 0 : a.value_size});
  const bool rule = needs_rules(s.rows, first, first + padded, rules);
  for (int r = 0; r < R; ++r) {
    const int row = static_cast<int>(r0) + r;
    float* scores = s.scores + r * KT;
    if (rule) narrow_rules(scores, s.rows, row, static_cast<int>(first), padded, rules);
    narrow_softmax(scores, s.rows, row, padded, s.acc + row * width, width);
  }
  narrow_values<C, R>(at.values, s.scores, count, static_cast<int>(a.value_size),
                      s.acc + r0 * width, width, {next.keys, r0 ? 0 : a.head_size});
}

template <class C>
static void run_narrow(const AttentionArgs& a, const Item& item, Scratch& s,
                       const ScoreRules& rules) {
  const int64_t q_row = round_up(a.head_size, VW), width = round_up(a.value_size, VW);
  set_rows(a, item, item.row1 - item.row0, s.rows);
  std::fill(s.q, s.q + s.rows.count * q_row, 0.0f);
  std::fill(s.acc, s.acc + s.rows.count * width, 0.0f);
  for (int64_t r = 0; r < s.rows.count; ++r) read_query(a, item, item.row0 + r, s.q + r * q_row);
  Rows<C> tiles[2];
  tiles[0].find_tile(a, item, item.key0);
  int tile = 0;
  for (int64_t first = item.key0; first < item.key1; first += KT, tile = 1 - tile) {
    const int count = static_cast<int>(std::min<int64_t>(KT, item.key1 - first));
    const bool last = first + KT >= item.key1;
    if (!last) tiles[1 - tile].find_tile(a, item, first + KT);
    const Rows<C>&at = tiles[tile], &next = tiles[last ? tile : 1 - tile];
    for (int64_t r = 0; r < s.rows.count; r += 4) {
      switch (std::min<int64_t>(4, s.rows.count - r)) {
        case 1: narrow_block<C, 1>(a, at, next, s, r, first, count, rules); break;
        case 2: narrow_block<C, 2>(a, at, next, s, r, first, count, rules); break;
        case 3: narrow_block<C, 3>(a, at, next, s, r, first, count, rules); break;
        default: narrow_block<C, 4>(a, at, next, s, r, first, count, rules); break;
      }
    }
  }
}

// K and V of the tile as contiguous float rows, padded with zeros.
template <class C>
static void stage(const AttentionArgs& a, const Rows<C>& at, int count, Scratch& s, int width) {
  const int d = static_cast<int>(a.head_size), dv = static_cast<int>(a.value_size);
  for (int j = 0; j < count; ++j) {
    row_to_float<C>(at.keys[j], s.keys + j * d, d);
    row_to_float<C>(at.values[j], s.values + j * width, dv);
    for (int i = dv; i < width; ++i) s.values[j * width + i] = 0;
  }
  std::fill(s.keys + count * d, s.keys + round_up(count, KR) * d, 0.0f);
}

template <int N>
static void wide_panel(const AttentionArgs& a, Scratch& s, int at, int64_t rows, int count,
                       int64_t first, int width, bool rule, const ScoreRules& rules) {
  wide_scores<N>(s.q + at, rows, s.keys, count, static_cast<int>(a.head_size), s.scores + at);
  for (int n = 0; n < N; ++n) {
    const int lane = at + n * VW;
    if (rule) wide_rules(s.scores, rows, s.rows, lane, static_cast<int>(first), count, rules);
    wide_softmax(s.scores, rows, s.rows, lane, count);
  }
  wide_values<N>(s.scores + at, rows, s.values, count, width, s.rows.decay + at, s.acc + at);
}

static void read_queries(const AttentionArgs& a, const Item& item, Scratch& s, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r < s.rows.count) read_query(a, item, item.row0 + r, s.out);
    else std::fill(s.out, s.out + a.head_size, 0.0f);
    for (int64_t i = 0; i < a.head_size; ++i) s.q[i * rows + r] = s.out[i];
  }
}

template <class C>
static void run_wide(const AttentionArgs& a, const Item& item, Scratch& s,
                     const ScoreRules& rules) {
  const int64_t rows = round_up(item.row1 - item.row0, VW), out = round_up(a.value_size, VW);
  const int width = static_cast<int>(round_up(a.value_size, KR));
  set_rows(a, item, rows, s.rows);
  read_queries(a, item, s, rows);
  std::fill(s.acc, s.acc + rows * width, 0.0f);
  Rows<C> at;
  for (int64_t first = item.key0; first < item.key1; first += KT) {
    const int count = static_cast<int>(std::min<int64_t>(KT, item.key1 - first));
    at.find_tile(a, item, first);
    stage<C>(a, at, count, s, width);
    const bool rule = needs_rules(s.rows, first, first + count, rules);
    for (int64_t r = 0; r < rows; r += PANEL * VW) {
      const int row = static_cast<int>(r);
      switch (std::min<int64_t>(PANEL, (rows - r) / VW)) {
        case 1: wide_panel<1>(a, s, row, rows, count, first, width, rule, rules); break;
        case 2: wide_panel<2>(a, s, row, rows, count, first, width, rule, rules); break;
        default: wide_panel<3>(a, s, row, rows, count, first, width, rule, rules); break;
      }
    }
  }
  for (int64_t r = 0; r < s.rows.count; ++r)
    for (int64_t i = 0; i < a.value_size; ++i) s.out[r * out + i] = s.acc[i * rows + r];
}

template <class C>
static void run_item(const AttentionArgs& a, const Item& item, Merge* merges, float* floats) {
  Scratch& s = scratch_for(a);
  const ScoreRules rules = {static_cast<float>(a.soft_cap), a.alibi_slopes != nullptr};
  const bool narrow = item.row1 - item.row0 <= NARROW_ROWS;
  if (narrow) run_narrow<C>(a, item, s, rules);
  else run_wide<C>(a, item, s, rules);
  give_result(a, item, s.rows, narrow ? s.acc : s.out, round_up(a.value_size, VW), merges, floats);
}
