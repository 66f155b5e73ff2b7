// Where a tile's keys and values lie in the cache, and asking for them ahead of time.
#pragma once
#include "products.h"
#include "work.h"

// The cache's rows are asked for before they are needed: those of one head lie too far apart, and blocks in
// too random an order, for the hardware to foresee. Into the second level: a tile does not fit the first.
// A few lines at a time among the arithmetic: more would wait for each other. Inlined always: GCC takes
// calls of a function that only prefetches for calls without effect.
template <class T>
__attribute__((always_inline)) static inline void ask_for(const T* elements) {
  __builtin_prefetch(elements, 0, 2);
}

// Pointers to the K and V rows of a tile's keys.
template <class C>
struct Rows {
  typedef typename C::raw raw;
  const raw *keys[KT], *values[KT];  // behind the last key: the last again
  int count;

  void find_in_blocks(const AttentionArgs& a, const int32_t* table, int64_t first, const raw* k,
                      const raw* v) {
    int64_t column = first / a.block_size, slot = first % a.block_size;
    for (int j = 0; j < count; ++column, slot = 0) {
      const int64_t block = table[column];
      const int n = static_cast<int>(std::min<int64_t>(a.block_size - slot, count - j));
      const raw* key = k + block * a.k_block + slot * a.k_slot;
      const raw* value = v + block * a.v_block + slot * a.v_slot;
      for (int i = 0; i < n; ++i) {
        keys[j + i] = key + i * a.k_slot;
        values[j + i] = value + i * a.v_slot;
      }
      j += n;
    }
  }

  // None where `first` is behind the item's keys.
  void find_tile(const AttentionArgs& a, const Item& item, int64_t first) {
    count = static_cast<int>(std::min<int64_t>(KT, std::max<int64_t>(0, item.key1 - first)));
    const raw* k = static_cast<const raw*>(a.key_cache) + item.kv_head * a.k_head;
    const raw* v = static_cast<const raw*>(a.value_cache) + item.kv_head * a.v_head;
    if (a.paged) {
      find_in_blocks(a, a.block_table + item.request * a.table_row, first, k, v);
    } else {
      const int64_t token = a.query_start_loc[item.request] + first;
      for (int j = 0; j < count; ++j) {
        keys[j] = k + (token + j) * a.k_slot;
        values[j] = v + (token + j) * a.v_slot;
      }
    }
    for (int j = count; count > 0 && j < KT; ++j) {
      keys[j] = keys[count - 1];
      values[j] = values[count - 1];
    }
  }

  __attribute__((always_inline)) void ask_for_rows(const AttentionArgs& a, int begin, int end) const {
    for (int j = begin; j < std::min(end, count); ++j) {
      for (int64_t i = 0; i < a.head_size; i += 64 / sizeof(raw)) ask_for(keys[j] + i);
      for (int64_t i = 0; i < a.value_size; i += 64 / sizeof(raw)) ask_for(values[j] + i);
    }
  }
};
