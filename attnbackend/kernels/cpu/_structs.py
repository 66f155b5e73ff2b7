"""The structs that one call passes to the C++ kernels, field by field as in args.h."""

from __future__ import annotations

import struct

# Every field is 64 bits wide, so there is no padding and a packed tuple is what C sees; packing is
# several times cheaper than filling a ctypes.Structure.
ATTENTION_FIELDS = """
    query key_cache value_cache output query_start_loc seq_lens block_table
    tokens requests heads kv_heads head_size value_size blocks block_size table_width
    query_token query_head k_block k_slot k_head v_block v_slot v_head
    output_token output_head table_row
    query_dtype output_dtype cache_dtype
    lse lse_token lse_head alibi_slopes sinks k_scale k_scale_step v_scale v_scale_step
    ranges num_ranges paged causal window two_sided chunk threads
"""
ATTENTION_DOUBLES = "scale soft_cap"
WRITE_FIELDS = """
    key value key_cache value_cache slots
    tokens kv_heads head_size value_size blocks block_size
    key_token key_head value_token value_head k_block k_slot k_head v_block v_slot v_head
    k_scale k_scale_step v_scale v_scale_step
    source_dtype cache_dtype threads
"""
# Behind the fields of a write: heads of queries, heads of keys, angles.
TURNED_HEADS_FORMAT = "7qd"
"""source weight output heads token head weight_dtype eps"""
ANGLE_FIELDS = "cos sin rotated cos_token sin_token angle_dtype"

ATTENTION_STRUCT = struct.Struct(f"{len(ATTENTION_FIELDS.split())}q{len(ATTENTION_DOUBLES.split())}d")
WRITE_STRUCT = struct.Struct(f"{len(WRITE_FIELDS.split())}q")
ROPE_STRUCT = struct.Struct(
    f"{len(WRITE_FIELDS.split())}q{TURNED_HEADS_FORMAT}{TURNED_HEADS_FORMAT}{len(ANGLE_FIELDS.split())}q"
)
REFUSAL_STRUCT = struct.Struct("4q")
# What `attnbackend_struct_sizes` must return.
STRUCT_SIZES = (ATTENTION_STRUCT.size * 65536 + WRITE_STRUCT.size) * 65536 + ROPE_STRUCT.size
