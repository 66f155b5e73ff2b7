// How a call is cut into items of work, and the keys that each sees.
#pragma once
#include <algorithm>

#include "args.h"

constexpr int KT = 64;              // keys in a tile
constexpr int PANEL = 3;            // vectors of rows held in registers by the wide kernel
constexpr int NARROW_ROWS = VW / 2; // up to so many rows the narrow layout is the faster one
constexpr int WIDE_ROWS = 2 * PANEL * VW;

static inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

// Rows [row0, row1) of one request and kv head, over keys [key0, key1). A row is one
// (token, query head) pair, numbered token * group + head within the group.
struct Item {
  int32_t request, kv_head;
  int64_t row0, row1;
  int32_t key0, key1;
  int64_t merge;  // index of the merge that it takes part in, -1 for none
  int64_t part;   // its place among that merge's parts
};

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

// The keys [low, high) that the rows of a request's token see.
static inline Bounds token_bounds(const AttentionArgs& a, int64_t request, int64_t token) {
  const int64_t length = a.seq_lens[request];
  const int64_t position = length - query_length(a, request) + token;
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

static inline Bounds row_bounds(const AttentionArgs& a, int64_t request, int64_t row) {
  return token_bounds(a, request, row / group_size(a));
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
