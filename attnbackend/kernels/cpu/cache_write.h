// Keys and values into their slots of a paged cache.
#pragma once
#include <omp.h>

#include "args.h"

static void scale_and_clamp(float* x, int64_t n, const float* scale, int64_t dtype) {
  if (scale)
    for (int64_t i = 0; i < n; ++i) x[i] /= *scale;
  if (dtype != E4M3FN && dtype != E5M2) return;
  const float largest = dtype == E4M3FN ? 448.0f : 57344.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] < -largest ? -largest : x[i];
    x[i] = y > largest ? largest : y;
  }
}

constexpr int MAX_ROW = 1024;

static void write_rows(const char* source, int64_t source_head, char* target, int64_t target_head,
                       const float* scale, int64_t scale_step, int64_t n, const WriteArgs& w) {
  const int64_t from = element_size(w.source_dtype), to = element_size(w.cache_dtype);
  float row[MAX_ROW];
  for (int64_t h = 0; h < w.kv_heads; ++h) {
    const char* s = source + h * source_head * from;
    char* t = target + h * target_head * to;
    if (w.source_dtype == w.cache_dtype && !scale) {
      std::memcpy(t, s, n * to);
      continue;
    }
    any_row_to_float(s, row, static_cast<int>(n), w.source_dtype);
    scale_and_clamp(row, n, scale ? scale + h * scale_step : nullptr, w.cache_dtype);
    row_from_float(row, t, static_cast<int>(n), w.cache_dtype);
  }
}

static void write_token(const WriteArgs& w, int64_t token) {
  if (w.slots[token] < 0) return;
  const int64_t block = w.slots[token] / w.block_size, slot = w.slots[token] % w.block_size;
  const int64_t from = element_size(w.source_dtype), to = element_size(w.cache_dtype);
  write_rows(static_cast<const char*>(w.key) + token * w.key_token * from, w.key_head,
             static_cast<char*>(w.key_cache) + (block * w.k_block + slot * w.k_slot) * to,
             w.k_head, w.k_scale, w.k_scale_step, w.head_size, w);
  write_rows(static_cast<const char*>(w.value) + token * w.value_token * from, w.value_head,
             static_cast<char*>(w.value_cache) + (block * w.v_block + slot * w.v_slot) * to,
             w.v_head, w.v_scale, w.v_scale_step, w.value_size, w);
}

static Refusal check_slots(const WriteArgs& w) {
  for (int64_t t = 0; t < w.tokens; ++t)
    if (w.slots[t] >= w.blocks * w.block_size) return {BAD_SLOT, t, w.slots[t], 0};
  return {};
}

static Refusal cache_write(const WriteArgs& w) {
  const Refusal refusal = check_slots(w);
  if (refusal.code) return refusal;
  const int threads = w.tokens * w.kv_heads < 64 ? 1 : static_cast<int>(w.threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t t = 0; t < w.tokens; ++t) write_token(w, t);
  return refusal;
}
