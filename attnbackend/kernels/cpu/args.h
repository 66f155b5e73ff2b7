// What Python passes: one struct a call. The field order is repeated in _structs.py, and
// `attnbackend_struct_sizes` lets it check that both sides agree.
#pragma once
#include "convert.h"

struct AttentionArgs {
  const void *query, *key_cache, *value_cache;
  void* output;
  const int32_t *query_start_loc, *seq_lens, *block_table;
  int64_t tokens, requests, heads, kv_heads, head_size, value_size;
  int64_t blocks, block_size, table_width;
  // Strides, in elements.
  int64_t query_token, query_head, k_block, k_slot, k_head, v_block, v_slot, v_head;
  int64_t output_token, output_head, table_row;
  int64_t query_dtype, output_dtype, cache_dtype;
  float* lse;  // null where not wanted, like the four below
  int64_t lse_token, lse_head;
  const float *alibi_slopes, *sinks;
  const float* k_scale;
  int64_t k_scale_step;  // 0: one scale for all heads, 1: one each
  const float* v_scale;
  int64_t v_scale_step;
  const int32_t* ranges;  // [requests][num_ranges][2] positions, null for none
  int64_t num_ranges;
  int64_t paged;  // 0: no cache; a request's keys are its own tokens, and the slots are tokens
  int64_t causal, window, two_sided, chunk, threads;  // window, chunk 0: none
  double scale, soft_cap;           // soft_cap 0: none
};

struct WriteArgs {
  const void *key, *value;
  void *key_cache, *value_cache;
  const int64_t* slots;
  int64_t tokens, kv_heads, head_size, value_size, blocks, block_size;
  int64_t key_token, key_head, value_token, value_head;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  const float* k_scale;
  int64_t k_scale_step;
  const float* v_scale;
  int64_t v_scale_step;
  int64_t source_dtype, cache_dtype, threads;
};

// Heads [tokens, heads, head_size] that are normalised, where there is a weight for it, and rotated.
struct TurnedHeads {
  const void *source, *weight;
  void* output;  // contiguous
  int64_t heads, token, head, weight_dtype;
  double eps;
};
struct RopeArgs {
  WriteArgs write;  // of the rotated keys
  TurnedHeads query, key;
  const void *cos, *sin;  // [tokens, rotated]
  int64_t rotated, cos_token, sin_token, angle_dtype;
};

// `inputs` is a multiple of so many: whole vectors of every kind.
constexpr int64_t LINEAR_MULTIPLE = 32;
// output [rows, outputs] = x [rows, inputs] . weight [outputs, inputs] + bias [outputs], all of one dtype.
struct LinearPart {
  const void *weight, *bias;  // bias: null for none
  void* output;
  int64_t outputs;
};
// Several products of the same x; or gated: what goes to the first output is SiLU(first) * second.
struct LinearArgs {
  const void* x;
  LinearPart parts[3];
  int64_t num_parts, gated, rows, inputs, dtype, threads;
};

// Why a call was refused: the code names the rule, a, b and c are the numbers of its message.
struct Refusal {
  int64_t code, a, b, c;
};
enum RefusalCode : int64_t {
  BAD_START_LOC = 1,   // a row, b its end, c its start
  TOO_MANY_TOKENS,     // a query_start_loc[-1]
  NEGATIVE_SEQ_LEN,    // a row, b value
  TABLE_TOO_NARROW,    // a row, b seq_len
  BAD_BLOCK,           // a row, b column, c value
  BAD_SLOT,            // a token, b value
  MORE_KEYS_THAN_TOKENS  // a row, b seq_len, c its tokens
};
