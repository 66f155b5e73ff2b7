"""The public ops' schemas are a contract: names, order, defaults and what is written."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from op_cases import DENSE_BACKENDS

from attnbackend import resolve_backend
from attnbackend.ops import AttentionCall, backend_op_names
from attnbackend.ops.agnostic import attention, kv_cache_update
from attnbackend.ops.calls import schema_of
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE, role_of


def test_the_schema_of_attention_is_pinned() -> None:
    schema = str(torch.ops.attnbackend.attention.default._schema)
    assert_expected_inline(
        schema.replace(", ", ",\n  "),
        """\
attnbackend::attention(Tensor query,
  Tensor? key,
  Tensor? value,
  Tensor kv_cache,
  Tensor(a!) output,
  Tensor query_start_loc,
  Tensor seq_lens,
  Tensor block_table,
  *,
  float scale,
  Tensor(b!)? lse=None,
  bool causal=True,
  int? sliding_window=None,
  int? attention_chunk_size=None,
  float logits_soft_cap=0.,
  Tensor? alibi_slopes=None,
  Tensor? sinks=None,
  Tensor? bidirectional_ranges=None,
  Tensor? q_scale=None,
  Tensor? k_scale=None,
  Tensor? v_scale=None,
  Tensor? output_scale=None,
  Tensor(c!)? output_block_scale=None,
  str kv_cache_dtype="auto",
  str attn_type="decoder",
  int group=-1) -> ()""",
    )


def test_the_schema_of_kv_cache_update_is_pinned() -> None:
    schema = str(torch.ops.attnbackend.kv_cache_update.default._schema)
    assert_expected_inline(
        schema.replace(", ", ",\n  "),
        """\
attnbackend::kv_cache_update(Tensor key,
  Tensor value,
  Tensor(a!) kv_cache,
  Tensor slot_mapping,
  *,
  Tensor? k_scale=None,
  Tensor? v_scale=None,
  str kv_cache_dtype="auto",
  int group=-1) -> ()""",
    )


def test_every_backend_shares_the_schema_of_its_role() -> None:
    for name in DENSE_BACKENDS:
        resolve_backend(name)
    agnostic = {ATTENTION: attention, KV_CACHE_UPDATE: kv_cache_update}
    ops = [getattr(torch.ops.attnbackend, name).default for name in backend_op_names()]
    dense = [(op, role) for op in ops if (role := role_of(op)) in agnostic]
    assert len(dense) > len(DENSE_BACKENDS)
    for op, role in dense:
        own, shared = (str(x._schema).partition("(")[2] for x in (op, agnostic[role]))
        assert own == shared, op


def test_the_ops_of_the_built_in_backends_are_named_after_them() -> None:
    for name in DENSE_BACKENDS:
        resolve_backend(name)
    assert {
        "torch_sdpa_forward", "triton_attn_forward", "cpu_attn_forward",
        "triton_attn_kv_cache_update", "cpu_attn_kv_cache_update",
    } <= set(backend_op_names())  # fmt: skip
    assert "torch_sdpa_kv_cache_update" not in backend_op_names()


def test_a_schema_marks_each_written_argument_with_its_own_alias() -> None:
    schema = schema_of(AttentionCall, writes=("output", "lse"), keyword_from="scale")
    assert "Tensor(a!) output" in schema
    assert "Tensor(b!)? lse=None" in schema
    assert schema.count("!") == 2
