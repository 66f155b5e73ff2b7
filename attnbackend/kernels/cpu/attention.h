// Paged attention: how one item of work is computed, and how split items are merged.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "tile.h"

struct Merge {
  int64_t parts, first_float;
  std::atomic<int64_t> left;
};

static inline int64_t part_stride(const AttentionArgs& a) { return round_up(a.value_size, VW) + 2; }

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

static void write_row(const AttentionArgs& a, const Item& item, int64_t token, int64_t head, float* acc,
                      float maximum, float sum) {
  const bool empty = !(sum != 0);  // no visible key; a NaN sum stays
  float factor = empty ? 0.0f : 1.0f / sum;
  float lse = empty || !a.lse ? -INFINITY : maximum + std::log(sum);
  if (a.sinks && a.seq_lens[item.request] > 0) {
    const float sink = a.sinks[head], top = sink > maximum ? sink : maximum;
    const float base = top == -INFINITY ? 0.0f : top;
    const float mine = empty ? 0.0f : std::exp(maximum - base);
    const float total = mine * sum + std::exp(sink - base);
    factor = empty ? 0.0f : mine / total;
    lse = base + std::log(total);
  }
  if (a.v_scale) factor *= a.v_scale[item.kv_head * a.v_scale_step];
  char* target = static_cast<char*>(a.output) + element_size(a.output_dtype) *
                 (token * a.output_token + head * a.output_head);
  const bool in_place = a.output_dtype == FLOAT32 && a.value_size % VW == 0;
  float* scaled = in_place ? reinterpret_cast<float*>(target) : acc;
  for (int64_t i = 0; i < a.value_size; i += VW) store(scaled + i, empty ? vf{} : load(acc + i) * factor);
  if (!in_place) row_from_float(acc, target, static_cast<int>(a.value_size), a.output_dtype);
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
    const int64_t group = group_size(a), row = item.row0 + r;
    write_row(a, item, a.query_start_loc[item.request] + row / group, item.kv_head * group + row % group,
              acc.data(), maximum, sum);
  }
}

// ---- items --------------------------------------------------------------------------------------

struct Scratch {  // carved from one buffer that a thread keeps between calls
  float *q, *scores, *keys, *values, *acc, *out;
  float factor;  // of products of pairs; that of floats is in q
  RowInfo rows;
};

static Scratch& scratch_for(const AttentionArgs& a) {
  static thread_local Scratch scratch;
  static thread_local std::vector<float> buffer;
  const int64_t d = round_up(a.head_size, VW), dv = round_up(a.value_size, VW);
  const int64_t sizes[] = {d * WIDE_ROWS, int64_t(KT) * WIDE_ROWS, KT * d, KT * dv,
                           dv * WIDE_ROWS, std::max(d, dv) * WIDE_ROWS};
  float** places[] = {&scratch.q, &scratch.scores, &scratch.keys, &scratch.values,
                      &scratch.acc, &scratch.out};
  int64_t total = VW;
  for (int64_t size : sizes) total += round_up(size, VW);
  if (static_cast<int64_t>(buffer.size()) < total) buffer.resize(total);
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data());
  float* at = reinterpret_cast<float*>((start + VW * 4 - 1) / (VW * 4) * (VW * 4));
  for (int i = 0; i < 6; ++i) {
    *places[i] = at;
    at += round_up(sizes[i], VW);
  }
  return scratch;
}

static void set_rows(const AttentionArgs& a, const Item& item, int64_t padded, RowInfo& rows) {
  const int64_t group = group_size(a), start = a.query_start_loc[item.request];
  int64_t token = item.row0 / group, member = item.row0 % group;
  Bounds bounds = token_bounds(a, item.request, token);
  rows.count = item.row1 - item.row0;
  rows.last_low = 0;
  rows.first_high = INT32_MAX;
  for (int64_t r = 0; r < padded; ++r) {
    const int64_t head = item.kv_head * group + member;
    rows.low[r] = bounds.low;
    rows.high[r] = bounds.high;
    rows.last_low = std::max(rows.last_low, bounds.low);
    rows.first_high = std::min(rows.first_high, bounds.high);
    rows.position[r] = bounds.position;
    rows.token[r] = static_cast<int32_t>(start + token);
    rows.head[r] = static_cast<int32_t>(head);
    rows.slope[r] = a.alibi_slopes ? a.alibi_slopes[head] : 0.0f;
    rows.maximum[r] = -INFINITY;
    rows.sum[r] = 0;
    if (r + 1 >= rows.count || ++member < group) continue;  // behind the last row: the last again
    member = 0;
    bounds = token_bounds(a, item.request, ++token);
  }
}

static float score_factor(const AttentionArgs& a, const Item& item) {
  const float k_scale = a.k_scale ? a.k_scale[item.kv_head * a.k_scale_step] : 1.0f;
  return static_cast<float>(a.scale) * k_scale;
}

static const char* query_row(const AttentionArgs& a, const RowInfo& rows, int64_t row) {
  return static_cast<const char*>(a.query) + element_size(a.query_dtype) *
         (rows.token[row] * a.query_token + rows.head[row] * a.query_head);
}

// One query row: as float, times scale and the key scale, or as it is.
static void read_query(const AttentionArgs& a, const RowInfo& rows, int64_t row, float factor, float* q) {
  const int64_t padded = round_up(a.head_size, VW);
  const char* source = query_row(a, rows, row);
  const bool in_place = a.query_dtype == FLOAT32 && a.head_size == padded;
  if (!in_place) {
    store(q + padded - VW, vf{});
    any_row_to_float(source, q, static_cast<int>(a.head_size), a.query_dtype);
  }
  const float* unscaled = in_place ? reinterpret_cast<const float*>(source) : q;
  for (int64_t i = 0; i < padded; i += VW) store(q + i, load(unscaled + i) * factor);
}
static void read_query(const AttentionArgs& a, const RowInfo& rows, int64_t row, float, uint16_t* q) {
  std::memcpy(q, query_row(a, rows, row), a.head_size * sizeof(uint16_t));
}

static inline bool needs_rules(const RowInfo& rows, int64_t first, int64_t end,
                               const ScoreRules& rules) {
  if (rules.cap > 0 || rules.alibi) return true;
  return rows.last_low > first || rows.first_high < end;
}

static void give_result(const AttentionArgs& a, const Item& item, const RowInfo& rows, float* acc,
                        int64_t width, Merge* merges, float* floats) {
  if (item.merge < 0) {
    for (int64_t r = 0; r < rows.count; ++r)
      write_row(a, item, rows.token[r], rows.head[r], acc + r * width, rows.maximum[r], rows.sum[r]);
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
  const typename C::query* q = reinterpret_cast<const typename C::query*>(s.q) + r0 * q_row;
  narrow_scores<C, R>(q, q_row, at.keys, at.values, count, static_cast<int>(a.head_size), s.factor,
                      s.scores);
  const bool rule = needs_rules(s.rows, first, first + padded, rules);
  const int row = static_cast<int>(r0);
  for (int r = 0; rule && r < R; ++r)
    narrow_rules(s.scores + r * KT, s.rows, row + r, static_cast<int>(first), padded, rules);
  narrow_softmax<R>(s.scores, s.rows, row, padded, s.acc + r0 * width, width);
  if constexpr (Products<C>::PAIRS)
    for (int r = 0; r < R; ++r) pair_neighbours<C>(s.scores + r * KT, padded);
  narrow_values<C, R>(at.values, next.keys, s.scores, count, static_cast<int>(a.value_size),
                      s.acc + r0 * width, width);
}

// `following`, the item that this thread is likely to run next, is asked for while the last tile is computed.
template <class C>
static void run_narrow(const AttentionArgs& a, const Item& item, const Item& following, Scratch& s,
                       const ScoreRules& rules) {
  const int64_t q_row = round_up(a.head_size, VW), width = round_up(a.value_size, VW);
  typename C::query* q = reinterpret_cast<typename C::query*>(s.q);
  set_rows(a, item, item.row1 - item.row0, s.rows);
  std::fill(s.acc, s.acc + s.rows.count * width, 0.0f);
  for (int64_t r = 0; r < s.rows.count; ++r) read_query(a, s.rows, r, s.factor, q + r * q_row);
  Rows<C> tiles[2];
  tiles[0].find_tile(a, item, item.key0);
  int tile = 0;
  for (int64_t first = item.key0; first < item.key1; first += KT, tile = 1 - tile) {
    const int count = tiles[tile].count;
    const bool last = first + KT >= item.key1;
    tiles[1 - tile].find_tile(a, last ? following : item, last ? following.key0 : first + KT);
    const Rows<C>&at = tiles[tile], &next = tiles[1 - tile].count ? tiles[1 - tile] : at;
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

// The rows of a tile that the wide kernel multiplies: of the cache itself, or of copies in its element type.
template <class C>
struct Tile {
  typedef typename Products<C>::element Element;
  const Element *keys[KT], *values[KT];  // keys up to the count rounded up to KR
};

// K and V of the tile as pairs: of a key's neighbouring elements, of neighbouring values' elements.
template <class C>
static void stage_pairs(const Rows<C>& at, int count, int d, int dv, Scratch& s) {
  typedef Products<C> P;
  uint16_t* keys = reinterpret_cast<uint16_t*>(s.keys);
  for (int j = 0; j < count; ++j) std::memcpy(keys + j * d, at.keys[j], d * sizeof(uint16_t));
  std::fill(keys + count * d, keys + round_up(count, KR) * d, uint16_t(0));
  for (int j = 0; j < count; j += 2)
    for (int i = 0; i < dv; i += P::STEP) {
      const vu x = P::from_cache(at.values[j] + i);
      const vu y = j + 1 < count ? P::from_cache(at.values[j + 1] + i) : vu{};
      const vu zipped[2] = {P::template zip<0>(x, y), P::template zip<1>(x, y)};
      std::memcpy(s.values + j / 2 * dv + i, zipped, sizeof zipped);
    }
}

// K and V of the tile as contiguous float rows, padded with zeros.
template <class C>
static void stage(const AttentionArgs& a, const Rows<C>& at, int count, Scratch& s, int width) {
  const int d = static_cast<int>(a.head_size), dv = static_cast<int>(a.value_size);
  if constexpr (Products<C>::PAIRS) return stage_pairs(at, count, d, dv, s);
  for (int j = 0; j < count; ++j) {
    row_to_float<C>(at.keys[j], s.keys + j * d, d);
    row_to_float<C>(at.values[j], s.values + j * width, dv);
    for (int i = dv; i < width; ++i) s.values[j * width + i] = 0;
  }
  std::fill(s.keys + count * d, s.keys + round_up(count, KR) * d, 0.0f);
}

template <class C, int N>
static void wide_panel(const AttentionArgs& a, Scratch& s, const Tile<C>& tile, const Rows<C>& next, int at,
                       int64_t rows, int count, int64_t first, int width, bool rule,
                       const ScoreRules& rules) {
  typedef Products<C> P;
  typedef const typename P::element* Staged;
  const int per_element = P::PAIRS ? 2 : 1, d = static_cast<int>(a.head_size) / per_element;
  wide_scores<C, N>(reinterpret_cast<Staged>(s.q) + at, rows, tile.keys, count, d, s.factor, s.scores + at, a,
                    at ? nullptr : &next);
  for (int n = 0; n < N; ++n) {
    const int lane = at + n * VW;
    if (rule) wide_rules(s.scores, rows, s.rows, lane, static_cast<int>(first), count, rules);
    wide_softmax(s.scores, rows, s.rows, lane, count);
    if constexpr (P::PAIRS) wide_pairs<P>(s.scores + lane, rows, count);
  }
  wide_values<P, N>(reinterpret_cast<Staged>(s.scores) + at, rows, tile.values,
                    (count + per_element - 1) / per_element, width, s.rows.decay + at, s.acc + at);
}

template <class C>
static Tile<C> copied_tile(const AttentionArgs& a, const Scratch& s, int width) {
  typedef typename Tile<C>::Element Element;
  const int64_t d = a.head_size * (Products<C>::PAIRS ? sizeof(uint16_t) : sizeof(float)) / sizeof(Element);
  Tile<C> tile;
  for (int j = 0; j < KT; ++j) {
    tile.keys[j] = reinterpret_cast<const Element*>(s.keys) + j * d;
    tile.values[j] = reinterpret_cast<const Element*>(s.values) + j * width;
  }
  return tile;
}

// Copies nothing where the cache's rows are floats and need no padding.
template <class C>
static void take_tile(const AttentionArgs& a, const Rows<C>& at, Scratch& s, int width, Tile<C>& tile) {
  if constexpr (std::is_same_v<C, F32>) {
    if (width == a.value_size) {
      std::copy(at.keys, at.keys + KT, tile.keys);
      std::copy(at.values, at.values + KT, tile.values);
      return;
    }
  }
  stage<C>(a, at, at.count, s, width);
}

// Query rows as columns: q[element or pair][row], zeros past the last row.
template <class C>
static void read_queries(const AttentionArgs& a, Scratch& s, int64_t rows) {
  typedef typename C::query Query;
  const int64_t lanes = round_up(a.head_size * sizeof(Query) / sizeof(float), VW);
  for (int64_t r0 = 0; r0 < rows; r0 += VW) {
    std::fill(s.out, s.out + VW * lanes, 0.0f);
    for (int64_t r = 0; r < std::min<int64_t>(VW, s.rows.count - r0); ++r)
      read_query(a, s.rows, r0 + r, s.factor, reinterpret_cast<Query*>(s.out + r * lanes));
    for (int64_t i = 0; i < lanes; i += VW) transpose(s.out + i, lanes, s.q + i * rows + r0, rows);
  }
}

// The end of the keys that some row of a panel sees.
static inline int64_t panel_high(const RowInfo& info, int64_t first, int64_t rows) {
  return *std::max_element(info.high + first, info.high + std::min<int64_t>(rows, first + PANEL * VW));
}

template <class C>
static void run_wide(const AttentionArgs& a, const Item& item, Scratch& s,
                     const ScoreRules& rules) {
  const int64_t rows = round_up(item.row1 - item.row0, VW), out = round_up(a.value_size, VW);
  const int width = static_cast<int>(round_up(a.value_size, KR));
  set_rows(a, item, rows, s.rows);
  read_queries<C>(a, s, rows);
  std::fill(s.acc, s.acc + rows * width, 0.0f);
  Rows<C> at;
  at.find_tile(a, item, item.key0);
  Tile<C> tile = copied_tile<C>(a, s, width);
  for (int64_t first = item.key0; first < item.key1; first += KT) {
    const int count = at.count;
    take_tile(a, at, s, width, tile);
    at.find_tile(a, item, first + KT);  // the next, to be asked for
    const bool rule = needs_rules(s.rows, first, first + count, rules);
    for (int64_t r = 0; r < rows; r += PANEL * VW) {
      const int row = static_cast<int>(r);
      const int seen = static_cast<int>(std::min<int64_t>(count, panel_high(s.rows, r, rows) - first));
      if (seen <= 0) continue;
      switch (std::min<int64_t>(PANEL, (rows - r) / VW)) {
        case 1: wide_panel<C, 1>(a, s, tile, at, row, rows, seen, first, width, rule, rules); break;
        case 2: wide_panel<C, 2>(a, s, tile, at, row, rows, seen, first, width, rule, rules); break;
        default: wide_panel<C, 3>(a, s, tile, at, row, rows, seen, first, width, rule, rules); break;
      }
    }
  }
  for (int64_t r = 0; r < rows; r += VW)
    for (int64_t i = 0; i < out; i += VW) transpose(s.acc + i * rows + r, rows, s.out + r * out + i, out);
}

template <class C>
static void run_item(const AttentionArgs& a, const Item& item, const Item& following, Scratch& s,
                     Merge* merges, float* floats) {
  s.factor = score_factor(a, item);
  const ScoreRules rules = {static_cast<float>(a.soft_cap), a.alibi_slopes != nullptr};
  const bool narrow = item.row1 - item.row0 <= NARROW_ROWS;
  if (narrow) run_narrow<C>(a, item, following, s, rules);
  else run_wide<C>(a, item, s, rules);
  give_result(a, item, s.rows, narrow ? s.acc : s.out, round_up(a.value_size, VW), merges, floats);
}
