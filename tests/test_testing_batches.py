"""Batches: what is poisoned is poisoned, what is data is the same however it is laid out."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
from torch import Tensor

from attnbackend.testing import (
    AttentionCase,
    PagedBatch,
    assert_attention_within_rule,
    expected_attention,
    expected_kv_cache,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
    yardstick_attention,
)

CASE = AttentionCase(
    query_lens=(1, 0, 5, 3, 1),
    context_lens=(20, 9, 0, 14, -1),
    num_padded_rows=2,
    num_padded_tokens=3,
    block_size=4,
    head_size=32,
)
FP8 = replace(CASE, dtype=torch.bfloat16, kv_cache_dtype="fp8", k_scale=0.5, v_scale=(0.3, 2.0))
VARIANTS = [
    CASE,
    FP8,
    replace(FP8, kv_cache_dtype="fp8_e5m2", layout="HND"),
    replace(CASE, layout="HND", num_layers=3, kv_outermost=True, strided_tensors=True),
    replace(CASE, dtype=torch.float16, use_alibi=True, use_sinks=True, sliding_window=6),
    replace(CASE, dtype=torch.bfloat16, kv_cache_dtype="float32", new_tokens_written=False),
    replace(FP8, raw_new_tokens=True),
]
variants = pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.id)


def finite_tokens(cache: Tensor) -> Tensor:
    """Which (block, offset) slots hold data, bool [B, S]; keys and values must agree."""
    finite = cache.to(torch.float32).isfinite().permute(0, 2, 1, 3, 4).flatten(2)
    assert torch.equal(finite.any(-1), finite.all(-1)), "a token is poisoned in part"
    return finite.all(-1)


def owned_tokens(batch: PagedBatch, lengths: tuple[int, ...]) -> Tensor:
    """The slots that requests of these lengths fill, from the block table."""
    owned = torch.zeros(batch.kv_cache.shape[0], batch.case.block_size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for j in range(length):
            page, offset = divmod(j, batch.case.block_size)
            assert not owned[batch.block_table[row, page], offset], "two requests share a slot"
            owned[batch.block_table[row, page], offset] = True
    return owned


@variants
def test_only_slots_of_sequences_hold_data_and_block_zero_holds_none(case: AttentionCase) -> None:
    batch = make_batch(case)
    lengths = case.seq_lens if case.new_tokens_written else (20, 9, 0, 14, 0)
    filled = finite_tokens(batch.kv_cache)
    assert torch.equal(filled, owned_tokens(batch, lengths))
    assert not filled[0].any()
    assert (~filled).all(dim=1).sum() > case.spare_blocks
    assert batch.kv_buffer.to(torch.float32).isfinite().sum() == filled.sum() * 2 * 2 * 32


@variants
def test_writing_the_new_tokens_gives_the_cache_of_whole_sequences(case: AttentionCase) -> None:
    batch = make_batch(case)
    whole = make_batch(replace(case, new_tokens_written=True))
    wanted = whole.kv_cache.contiguous().view(torch.uint8)
    assert torch.equal(expected_kv_cache(batch).view(torch.uint8), wanted)


@variants
def test_metadata_obeys_the_batch_contract(case: AttentionCase) -> None:
    batch = make_batch(case)
    assert batch.query_start_loc.tolist() == [0, 1, 1, 6, 9, 10, 10, 10]
    assert batch.seq_lens.tolist() == [21, 9, 5, 17, 0, 0, 0]
    assert batch.block_table[4:].eq(0).all()
    assert batch.block_table[:4].ne(0).all(), "entries past the last page name a spare block"
    assert batch.slot_mapping[9:].tolist() == [-1] * 4
    int32 = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    assert {x.dtype for x in int32} == {torch.int32}
    assert batch.slot_mapping.dtype == torch.int64
    assert len(batch.slot_mapping) == len(batch.query) == len(batch.key) == 13


@variants
def test_slots_are_where_the_block_table_puts_the_new_tokens(case: AttentionCase) -> None:
    batch = make_batch(case)
    token = 0
    lengths = zip(case.query_lens, case.context_lens, strict=True)
    for row, (query_len, context) in enumerate(lengths):
        for j in range(context, context + query_len):
            slot = int(batch.slot_mapping[token])
            if j >= 0:
                assert slot // 4 == batch.block_table[row, j // 4]
                assert slot % 4 == j % 4
            token += 1


@variants
def test_outputs_and_padding_tokens_are_poisoned(case: AttentionCase) -> None:
    batch = make_batch(case)
    assert batch.lse is not None
    for poisoned in (batch.output, batch.lse, batch.query[10:], batch.key[10:], batch.value[10:]):
        assert poisoned.isnan().all()
    assert batch.query[:10].isfinite().all()
    assert batch.key[:9].isfinite().all()
    batch.output.zero_()
    batch.lse.zero_()
    batch.poison_outputs()
    assert batch.output.isnan().all()
    assert batch.lse.isnan().all()


@pytest.mark.parametrize("seed", range(5))
def test_pages_never_rise_and_are_mixed_between_requests(seed: int) -> None:
    batch = make_batch(replace(CASE, seed=seed))
    tables = [batch.block_table[row, :pages].tolist() for row, pages in enumerate((6, 3, 2, 5))]
    assert all(table != sorted(table) for table in tables)
    assert len(set(chain.from_iterable(tables))) == 16, "two requests share a page"
    spans = [range(min(table), max(table)) for table in tables]
    assert any(set(a) & set(b) for a, b in combinations(spans, 2)), "requests lie apart"


def test_the_answer_does_not_depend_on_the_layout() -> None:
    results = [
        expected_attention(make_batch(replace(CASE, **layout)))
        for layout in (
            {"layout": "NHD"},
            {"layout": "HND"},
            {"kv_outermost": True, "layout": "HND"},
            {"num_layers": 3},
            {"strided_tensors": True},
            {"new_tokens_written": False},
        )
    ]
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_layouts_differ_in_strides_only() -> None:
    cache = {layout: make_batch(replace(CASE, layout=layout)).kv_cache for layout in ("NHD", "HND")}
    assert cache["NHD"].shape == cache["HND"].shape
    block, head = 2 * 4 * 2 * 32, 32
    assert cache["NHD"].stride() == (block, block // 2, 2 * head, head, 1)
    assert cache["HND"].stride() == (block, block // 2, head, 4 * head, 1)
    layers = make_batch(replace(CASE, num_layers=3))
    assert layers.kv_cache.stride(0) == 3 * block
    assert layers.kv_cache.storage_offset() == block
    outer = make_batch(replace(CASE, kv_outermost=True)).kv_cache
    assert outer.stride(1) == outer.shape[0] * outer.stride(0)


def test_strided_tensors_are_views_of_larger_buffers() -> None:
    batch = make_batch(replace(CASE, strided_tensors=True))
    assert batch.query.stride() == batch.key.stride() == ((4 + 2) * 32, 32, 1)
    assert batch.value.stride() == ((2 + 1) * 32, 32, 1)
    assert batch.output.stride() == (6 * 32, 32, 1)
    assert make_batch(CASE).query.is_contiguous()


@pytest.mark.parametrize("case", [FP8, replace(FP8, kv_cache_dtype="fp8_e5m2")], ids=lambda c: c.id)
def test_new_tokens_equal_what_an_fp8_cache_holds_unless_left_raw(case: AttentionCase) -> None:
    batch = make_batch(case)
    assert batch.v_scale is not None
    block, offset = divmod(int(batch.slot_mapping[0]), 4)
    stored = batch.kv_cache[block, 1, offset].float() * batch.v_scale[:, None]
    assert torch.equal(batch.value[0], stored.bfloat16())
    raw = make_batch(replace(case, raw_new_tokens=True))
    assert not torch.equal(raw.value[0], stored.bfloat16())


def test_equal_cases_give_equal_batches_and_seeds_differ() -> None:
    first, second, other = (make_batch(c) for c in (CASE, CASE, replace(CASE, seed=1)))
    assert torch.equal(first.query[:10], second.query[:10])
    assert torch.equal(first.block_table, second.block_table)
    assert not torch.equal(first.query[:10], other.query[:10])


def test_sinks_weigh_enough_to_change_the_output() -> None:
    batch = make_batch(replace(CASE, use_sinks=True))
    with_sinks, _ = expected_attention(batch)
    without, _ = expected_attention(replace(batch, sinks=None))
    changed = (with_sinks - without).abs().amax(dim=(1, 2))
    assert (changed[:9] > 0.1).all()


# --- ops ------------------------------------------------------------------------------------------

SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor kv_cache, Tensor(a!) output, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor block_table, *, float scale, "
    "Tensor(b!)? lse=None, bool causal=True, int? sliding_window=None, "
    "int? attention_chunk_size=None, float logits_soft_cap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? bidirectional_ranges=None, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? output_scale=None, Tensor(c!)? output_block_scale=None, "
    'str kv_cache_dtype="auto", str attn_type="decoder", int group=-1) -> ()'
)
UPDATE_SCHEMA = (
    "(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, *, "
    'Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype="auto", int group=-1) -> ()'
)


@variants
def test_arguments_fit_the_schemas_of_the_ops(case: AttentionCase) -> None:
    batch = make_batch(case)
    namespace = "attnbackend_batches_test"
    library = torch.library.Library(namespace, "DEF")
    try:
        for name, schema in (("attention", SCHEMA), ("update", UPDATE_SCHEMA)):
            library.define(name + schema)
            library.impl(name, lambda *args, **kwargs: None, "CompositeExplicitAutograd")
        ops = getattr(torch.ops, namespace)
        ops.attention(*op_positional(batch), **op_kwargs(batch))
        ops.update(*kv_update_positional(batch), **kv_update_kwargs(batch))
    finally:
        library._destroy()


def filled(case: AttentionCase) -> PagedBatch:
    """The batch with the yardstick's answer in its outputs."""
    batch = make_batch(case)
    output, lse = yardstick_attention(batch)
    batch.output.copy_(output)
    if batch.lse is not None:
        batch.lse.copy_(lse)
    return batch


@variants
def test_the_yardstick_passes_and_untouched_outputs_fail(case: AttentionCase) -> None:
    reports = assert_attention_within_rule(filled(case), by="row")
    assert [report.what for report in reports] == ["output", "lse"]
    with pytest.raises(AssertionError, match="NaN"):
        assert_attention_within_rule(make_batch(case))


def test_a_case_without_lse_judges_the_output_alone() -> None:
    batch = filled(replace(CASE, lse=False))
    assert op_kwargs(batch)["lse"] is None
    assert len(assert_attention_within_rule(batch)) == 1


@pytest.mark.parametrize("row", [9, 12], ids=["request_of_length_0", "padding_token"])
def test_a_padding_row_left_unwritten_fails(row: int) -> None:
    batch = filled(CASE)
    batch.output[row] = torch.nan
    with pytest.raises(AssertionError, match=rf"NaN .* first at \[{row}, 0, 0\]"):
        assert_attention_within_rule(batch)


def test_writing_past_a_strided_output_fails() -> None:
    batch = filled(replace(CASE, strided_tensors=True))
    assert batch.output._base is not None
    batch.output._base[0, 5] = 0.0
    with pytest.raises(AssertionError, match="output: the op wrote beside the 4 heads"):
        assert_attention_within_rule(batch)


# --- probes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (28, 4), (5, 1)])
def test_value_is_head_makes_the_output_name_the_head_read(heads: int, kv_heads: int) -> None:
    case = replace(CASE, num_heads=heads, num_kv_heads=kv_heads, probe="value_is_head")
    output, _ = expected_attention(make_batch(case))
    expected = (torch.arange(heads) // (heads // kv_heads)).double()
    torch.testing.assert_close(output[:9], expected[:, None].expand(9, heads, 32))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_window_edge_makes_one_key_more_or_less_plain(causal: bool) -> None:
    case = replace(CASE, sliding_window=8, probe="window_edge", causal=causal)
    batch = make_batch(case)
    newest = [0, 8]
    right = expected_attention(batch)[0][newest]
    assert (right - 4.0).abs().max() < 0.1
    for window in (7, 9):
        wrong = replace(batch, case=replace(case, sliding_window=window, probe=None))
        assert (expected_attention(wrong)[0][newest] - 4.0).abs().min() > 1.0


def test_soft_cap_probe_brings_logits_beyond_the_cap() -> None:
    case = replace(CASE, logits_soft_cap=20.0, probe="soft_cap")
    batch = make_batch(case)
    uncapped = replace(batch, case=replace(case, logits_soft_cap=0.0, probe=None))
    assert expected_attention(uncapped)[1][:9].amax() > 30.0
    assert expected_attention(batch)[1][:9].amax() < 24.0


# --- cases ----------------------------------------------------------------------------------------


def test_ids_are_readable_and_name_what_differs() -> None:
    assert CASE.id == (
        "fp32-4x2heads_of_32-pages_of_4_NHD-query_1.0.5.3.1_after_20.9.0.14.-1-2_padded_rows-3_padded_tokens"
    )
    assert FP8.id.endswith("-cache_fp8-2_padded_rows-3_padded_tokens-k_scale_0.5-v_scale_(0.3,2.0)")
    assert len({case.id for case in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lens": (1, 2)}, "query_lens has 5 requests, context_lens 2"),
        ({"query_lens": (1, 0, 5, 3, 0)}, "must not be negative"),
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"layout": "DHN"}, "layout='DHN' is unknown"),
        ({"probe": "soft_cap"}, "needs logits_soft_cap > 0, got 0.0"),
        ({"probe": "window_edge"}, "needs a sequence longer than the window"),
        ({"probe": "window_edge", "sliding_window": 21}, "longer than the window"),
        ({"probe": "edge"}, "probe='edge' is unknown"),
    ],
)
def test_impossible_cases_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CASE, **change)  # type: ignore[arg-type]


def test_a_soft_cap_that_flattens_the_window_probe_is_refused() -> None:
    case = replace(CASE, probe="window_edge", sliding_window=8, logits_soft_cap=5.0)
    with pytest.raises(ValueError, match=r"plants logits of 12\.0"):
        make_batch(case)
