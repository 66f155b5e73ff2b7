"""The structs that one call passes to the C++ kernels, field by field as in args.h."""

from __future__ import annotations

import struct

# Pointers and integers are all 64 bits wide and floats are doubles, so there is no padding and a
# packed struct is what C sees. Packing a tuple is several times cheaper than ctypes.Structure.
ATTENTION_POINTERS = (
    "query key_cache value_cache output lse query_start_loc seq_lens block_table "
    "alibi_slopes sinks k_scale v_scale"
).split()
ATTENTION_INTEGERS = (
    "tokens requests heads kv_heads head_size value_size blocks block_size table_width "
    "query_token query_head k_block k_slot k_head v_block v_slot v_head "
    "output_token output_head lse_token lse_head table_row k_scale_step v_scale_step "
    "query_dtype output_dtype cache_dtype causal window threads"
).split()
ATTENTION_DOUBLES = "scale soft_cap".split()
WRITE_POINTERS = "key value key_cache value_cache slots k_scale v_scale".split()
WRITE_INTEGERS = (
    "tokens kv_heads head_size value_size blocks block_size key_token key_head value_token "
    "value_head k_block k_slot k_head v_block v_slot v_head k_scale_step v_scale_step "
    "source_dtype cache_dtype threads"
).split()

ATTENTION_STRUCT = struct.Struct(
    f"{len(ATTENTION_POINTERS)}Q{len(ATTENTION_INTEGERS)}q{len(ATTENTION_DOUBLES)}d"
)
WRITE_STRUCT = struct.Struct(f"{len(WRITE_POINTERS)}Q{len(WRITE_INTEGERS)}q")
REFUSAL_STRUCT = struct.Struct("4q")
# What `attnbackend_struct_sizes` must return.
STRUCT_SIZES = ATTENTION_STRUCT.size * 65536 + WRITE_STRUCT.size
