"""The ops of latent attention: right by the relative rule, honest by opcheck and audit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from mla_op_cases import (
    BATCHES,
    DEVICE,
    FEATURES,
    MLA_BACKENDS,
    SPARSE_BACKENDS,
    mla_case,
    mla_op,
    require_mla,
)

from attnbackend import resolve_backend, set_config
from attnbackend.backends.mla.planning import plan_mla_step
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.ops import backend_op_names
from attnbackend.ops.library import MLA_ATTENTION, MLA_CACHE_UPDATE, MLA_MIXED, MLA_PREFILL
from attnbackend.testing import AuditLedger, assert_within_rule
from attnbackend.testing.mla_batches import (
    MLABatch,
    expected_mla_cache,
    make_mla_batch,
    mixed_arguments,
    mqa_arguments,
    update_arguments,
)
from attnbackend.testing.mla_judgement import assert_mixed_within_rule, assert_mqa_within_rule
from attnbackend.testing.reference_mla import plain_torch_mla, reference_mla

AGNOSTIC_AND_OWN = ("agnostic", *MLA_BACKENDS)
CASES = [
    *((f, "mixed") for f in FEATURES),
    *(("plain", b) for b in BATCHES if b != "mixed"),
    ("packed", "mixed"),
]


def _call(backend: str, role: str, batch: MLABatch) -> None:
    arguments = {"forward_mqa": mqa_arguments, "forward_mixed": mixed_arguments}.get(role, update_arguments)
    positional, keyword = arguments(batch)
    mla_op(backend, role)(*positional, **keyword)


def _require_rows_of(feature: str, backend: str) -> None:
    if feature == "packed" and backend != "agnostic":
        require_mla(backend, torch.bfloat16, kv_cache_dtype="fp8_ds_mla", head_size=576, kv_lora_rank=512)


@pytest.mark.parametrize(("feature", "batch"), CASES)
@pytest.mark.parametrize("backend", AGNOSTIC_AND_OWN)
def test_queries_on_latents_are_right(backend: str, feature: str, batch: str) -> None:
    _require_rows_of(feature, backend)
    made = make_mla_batch(mla_case(feature, batch), DEVICE)
    _call(backend, "forward_mqa", made)
    assert_mqa_within_rule(made)


@pytest.mark.parametrize("prefill", ["TORCH", "CPU"])
@pytest.mark.parametrize("context_tokens", [32, 4096])
@pytest.mark.parametrize(("feature", "batch"), CASES)
def test_whole_steps_are_right(feature: str, batch: str, context_tokens: int, prefill: str) -> None:
    """Few context tokens at once, so that contexts are cut in chunks, and more than there are."""
    if prefill == "CPU":
        require_mla("CPU_MLA")
    made = make_mla_batch(mla_case(feature, batch), DEVICE)
    with set_config(mla_context_tokens=context_tokens, mla_prefill=prefill):
        _call("TORCH_MLA", "forward_mixed", made)
    assert_mixed_within_rule(made)


@pytest.mark.parametrize("tokens", [1, 7, 48, 4096])
def test_chunks_hold_every_context_token_once_and_no_more_than_fit(tokens: int) -> None:
    """Also where requests of much and of little context, or of none, are many for a small workspace."""
    case = mla_case("plain", query_lens=(2,) * 6, context_lens=(3, 0, 40, 1, 0, 5))
    made = make_mla_batch(case)
    common = CommonAttentionMetadata.from_tensors(
        made.query_start_loc, made.seq_lens, made.block_table, num_tokens=12, block_size=case.block_size
    )
    with set_config(mla_context_tokens=tokens):
        plan = plan_mla_step(
            common, lambda batch: AttentionMetadata(common=batch), lambda metadata: metadata,
            block_size=case.block_size, threshold=1,
        )  # fmt: skip
    assert plan.prefill is not None
    sizes = [len(chunk.slots) for chunk in plan.prefill.chunks]
    assert sizes == [tokens] * (49 // tokens) + [49 % tokens] * (49 % tokens > 0)
    positions = [(row, i) for row, n in enumerate(case.context_lens) for i in range(n)]
    size = case.block_size
    wanted = [int(made.block_table[row, i // size]) * size + i % size for row, i in positions]
    assert torch.cat([chunk.slots for chunk in plan.prefill.chunks]).tolist() == wanted


def test_a_step_of_nothing_but_padding_is_judged_too() -> None:
    for query_lens, context_lens in (((2,), (-2,)), ((0,), (5,))):
        lengths = {"query_lens": query_lens, "context_lens": context_lens, "num_padded_tokens": 1}
        made = make_mla_batch(mla_case("plain", "one_token", **lengths), DEVICE)
        _call("TORCH_MLA", "forward_mixed", made)
        assert_mixed_within_rule(made)
        made.output[-1] = 1
        with pytest.raises(AssertionError):
            assert_mixed_within_rule(made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", MLA_BACKENDS)
def test_half_precision_is_right(backend: str, dtype: torch.dtype) -> None:
    require_mla(backend, dtype)
    made = make_mla_batch(mla_case("plain", "mixed", dtype=dtype), DEVICE)
    _call(backend, "forward_mqa", made)
    assert_mqa_within_rule(made)
    with set_config(mla_context_tokens=32):
        _call(backend, "forward_mixed", made)
    assert_mixed_within_rule(made)


@pytest.mark.parametrize("batch", ["mixed", "decode", "padded", "graph_padding_requests"])
@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_selected_tokens_alone_are_seen(backend: str, batch: str) -> None:
    made = make_mla_batch(mla_case("plain", batch, top_k=8), DEVICE)
    _call(backend, "forward_mqa", made)
    assert_mqa_within_rule(made)


@pytest.mark.parametrize(
    "feature", ["plain", "layers_interleaved", "fp8_e4m3", "fp8_unscaled", "fp8_e5m2", "packed"]
)
@pytest.mark.parametrize("backend", AGNOSTIC_AND_OWN)
def test_cache_writes_leave_the_right_bits(backend: str, feature: str) -> None:
    _require_rows_of(feature, backend)
    made = make_mla_batch(mla_case(feature, "padded", new_tokens_written=False), DEVICE)
    expected, before = expected_mla_cache(made), made.kv_buffer.clone()
    _call(backend, "mla_kv_cache_update", made)
    assert torch.equal(_bits(made.kv_cache.cpu()), _bits(expected))
    layer = made.case.num_layers // 2
    others = [i for i in range(made.case.num_layers) if i != layer]
    assert torch.equal(_bits(made.kv_buffer[:, others]), _bits(before[:, others]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", MLA_BACKENDS)
def test_sequences_with_keys_of_their_own_are_right(backend: str, causal: bool) -> None:
    """Sequences without queries, without keys, with fewer keys than queries, and padding behind the last."""
    resolve_backend(backend)
    generator = torch.Generator().manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8, 12], [0, 7, 9, 9, 11]))
    query = torch.randn(14, 4, 48, generator=generator)
    key = torch.randn(11, 4, 48, generator=generator)
    value = torch.randn(11, 4, 56, generator=generator)[..., 32:]
    output, lse = torch.full((14, 4, 24), torch.nan), torch.full((14, 4), torch.nan)
    op = getattr(torch.ops.attnbackend, f"{backend.lower()}_forward_mha").default
    arguments = [x.to(DEVICE) for x in (query, key, value, output, cu_q, cu_k)]
    lse = lse.to(DEVICE)
    op(*arguments, scale=0.2, lse=lse, causal=causal)
    plain, exact = (
        attend.mha(query, key, value, cu_q, cu_k, scale=0.2, causal=causal)
        for attend in (plain_torch_mla, reference_mla)
    )
    for what, x, e, p in zip(("output", "lse"), (arguments[3], lse), exact, plain, strict=True):
        assert_within_rule(x, e, p, what=what)


def _for_opcheck(made: MLABatch) -> MLABatch:
    """Without NaN and float8, which opcheck cannot compare."""
    if made.kv_cache.dtype.itemsize == 1:
        made = replace(made, kv_cache=made.kv_cache.view(torch.uint8))
        made.kv_cache.clamp_(max=0x70)
    for x in (made.kv_cache, made.query, made.query_latent, made.query_rope, made.kv_c, made.k_pe):
        if x.is_floating_point():
            x.copy_(x.nan_to_num(0.5))
    for x in (made.output, made.latent_output, made.lse):
        if x is not None:
            x.zero_()
    return made


OPCHECK_CASES = {
    "everything_given": mla_case("plain"),
    "nothing_given": mla_case("no_lse", "one_token"),
    "padded": mla_case("plain", "padded"),
    "layers_interleaved": mla_case("layers_interleaved", "decode"),
    "strided_tensors": mla_case("strided_tensors", "decode"),
    "fp8_scale": mla_case("fp8_e4m3", "decode"),
}


@pytest.mark.parametrize("name", OPCHECK_CASES)
@pytest.mark.parametrize("role", ["forward_mqa", "forward_mixed", "mla_kv_cache_update"])
def test_opcheck_passes(role: str, name: str) -> None:
    made = _for_opcheck(make_mla_batch(OPCHECK_CASES[name], DEVICE))
    arguments = {"forward_mqa": mqa_arguments, "forward_mixed": mixed_arguments}.get(role, update_arguments)
    positional, keyword = arguments(made)
    for backend in AGNOSTIC_AND_OWN:
        torch.library.opcheck(mla_op(backend, role), positional, keyword)


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_opcheck_passes_for_selected_tokens(backend: str) -> None:
    made = _for_opcheck(make_mla_batch(mla_case("plain", top_k=8), DEVICE))
    positional, keyword = mqa_arguments(made)
    torch.library.opcheck(mla_op(backend, "forward_mqa"), positional, keyword)


@pytest.mark.parametrize("backend", AGNOSTIC_AND_OWN)
@pytest.mark.parametrize("role", ["forward_mixed", "mla_kv_cache_update"])
def test_state_audit_passes(backend: str, role: str) -> None:
    ledger, op = AuditLedger(), mla_op(backend, role)
    arguments = {"forward_mixed": mixed_arguments}.get(role, update_arguments)
    for case in OPCHECK_CASES.values():
        made = make_mla_batch(replace(case, new_tokens_written=role == "forward_mixed"), DEVICE)
        positional, keyword = arguments(made)
        ledger.audit(op, positional, keyword)
    ledger.verdict(op).assert_ok()


def test_state_audit_passes_for_queries_on_latents() -> None:
    for names, top_k in ((MLA_BACKENDS, None), (SPARSE_BACKENDS, 8)):
        for backend in names:
            op = mla_op(backend, "forward_mqa")
            for case in OPCHECK_CASES.values():
                positional, keyword = mqa_arguments(make_mla_batch(replace(case, top_k=top_k), DEVICE))
                ledger = AuditLedger()
                ledger.audit(op, positional, keyword)
                assert not ledger.verdict(op).findings


def test_the_schemas_are_pinned() -> None:
    lines = [
        str(getattr(torch.ops.attnbackend, name).default._schema)
        for name in ("mla_attention", "mla_mixed_attention", "mla_kv_cache_update")
    ]
    resolve_backend("TORCH_MLA")
    lines.append(str(torch.ops.attnbackend.torch_mla_forward_mha.default._schema))
    assert_expected_inline(
        "\n".join(lines).replace(", ", ",\n  "),
        """\
attnbackend::mla_attention(Tensor query_latent,
  Tensor query_rope,
  Tensor kv_cache,
  Tensor(a!) output,
  Tensor query_start_loc,
  Tensor seq_lens,
  Tensor block_table,
  *,
  float scale,
  Tensor(b!)? lse=None,
  Tensor? topk_indices=None,
  Tensor? k_scale=None,
  str kv_cache_dtype="auto",
  int group=-1) -> ()
attnbackend::mla_mixed_attention(Tensor query,
  Tensor kv_c,
  Tensor k_pe,
  Tensor kv_cache,
  Tensor kv_b_weight,
  Tensor(a!) output,
  Tensor query_start_loc,
  Tensor seq_lens,
  Tensor block_table,
  *,
  float scale,
  Tensor? k_scale=None,
  str kv_cache_dtype="auto",
  int group=-1) -> ()
attnbackend::mla_kv_cache_update(Tensor kv_c,
  Tensor k_pe,
  Tensor(a!) kv_cache,
  Tensor slot_mapping,
  *,
  Tensor? k_scale=None,
  str kv_cache_dtype="auto",
  int group=-1) -> ()
attnbackend::torch_mla_forward_mha(Tensor query,
  Tensor key,
  Tensor value,
  Tensor(a!) output,
  Tensor cu_seqlens_q,
  Tensor cu_seqlens_k,
  *,
  float scale,
  Tensor(b!)? lse=None,
  bool causal=True) -> ()""",
    )


def test_every_backend_shares_the_schema_of_its_role() -> None:
    for name in (*MLA_BACKENDS, *SPARSE_BACKENDS):
        resolve_backend(name)
    names = {n for n in backend_op_names() if "_mla_" in n}
    assert {"torch_mla_forward_mqa", "torch_mla_forward_mixed", "torch_mla_forward_mha"} <= names
    assert "torch_mla_sparse_forward_mqa" in names
    assert not {"torch_mla_sparse_forward_mha", "torch_mla_sparse_forward_mixed"} & names
    for role in (MLA_ATTENTION, MLA_MIXED, MLA_PREFILL, MLA_CACHE_UPDATE):
        for name in names:
            if name.endswith(role.suffix):
                schema = str(getattr(torch.ops.attnbackend, name).default._schema)
                assert schema.replace("0., ", "0.0, ").partition("(")[2] == role.schema[1:], name
