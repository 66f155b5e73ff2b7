"""The reference against values that can be worked out by hand, and against PyTorch's attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.testing import (
    plain_torch_attention,
    reference_attention,
    reference_kv_cache_update,
    reference_merge_states,
)

NAN = float("nan")


def one_request(
    q: list[float], k: list[float], v: list[float], cache_dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """One head of size 1, one key a page, pages in reverse order after a NaN block 0."""
    cache = torch.full((len(k) + 1, 2, 1, 1, 1), NAN).to(cache_dtype)
    blocks = list(range(len(k), 0, -1))
    for j, block in enumerate(blocks):
        cache[block, :, 0, 0, 0] = torch.tensor([k[j], v[j]]).to(cache_dtype)
    return {
        "query": torch.tensor(q).reshape(-1, 1, 1),
        "kv_cache": cache,
        "query_start_loc": torch.tensor([0, len(q)], dtype=torch.int32),
        "seq_lens": torch.tensor([len(k)], dtype=torch.int32),
        "block_table": torch.tensor([blocks], dtype=torch.int32),
    }


def outputs(arguments: dict[str, Any], **features: Any) -> list[float]:
    out, _ = reference_attention(**arguments, scale=1.0, **features)
    return out.flatten().tolist()


def test_a_window_of_four_sees_four_keys_itself_included() -> None:
    arguments = one_request([0.0] * 8, [0.0] * 8, [float(j) for j in range(8)])
    assert outputs(arguments, sliding_window=4)[-1] == pytest.approx(5.5, abs=1e-12)
    decode = one_request([0.0], [0.0] * 8, [float(j) for j in range(8)])
    assert outputs(decode, sliding_window=4) == pytest.approx([5.5], abs=1e-12)


def test_a_window_cuts_only_the_left_of_full_attention() -> None:
    arguments = one_request([0.0] * 4, [0.0] * 4, [0.0, 1.0, 2.0, 3.0])
    seen = outputs(arguments, sliding_window=2, causal=False)
    assert seen == pytest.approx([1.5, 1.5, 2.0, 2.5], abs=1e-12)


def test_a_chunk_begins_at_multiples_of_its_size() -> None:
    arguments = one_request([0.0] * 5, [0.0] * 7, [float(j) for j in range(7)])
    # Positions 2 to 6 in chunks {0 1 2} {3 4 5} {6}.
    seen = outputs(arguments, attention_chunk_size=3)
    assert seen == pytest.approx([1.0, 3.0, 3.5, 4.0, 6.0], abs=1e-12)
    both_ways = outputs(arguments, attention_chunk_size=3, causal=False)
    assert both_ways == pytest.approx([1.0, 4.0, 4.0, 4.0, 6.0], abs=1e-12)


def test_a_token_in_a_range_sees_all_of_the_range_and_no_other_token_does() -> None:
    arguments = one_request([0.0] * 5, [0.0] * 5, [float(j) for j in range(5)])
    ranges = torch.tensor([[[1, 3], [0, 0]]])
    seen = outputs(arguments, bidirectional_ranges=ranges)
    assert seen == pytest.approx([0.0, 1.0, 1.0, 1.5, 2.0], abs=1e-12)
    narrow = outputs(arguments, bidirectional_ranges=ranges, sliding_window=1)
    assert narrow == pytest.approx([0.0, 1.5, 1.5, 3.0, 4.0], abs=1e-12)


def test_alibi_falls_with_the_distance_on_both_sides() -> None:
    arguments = one_request([0.0] * 3, [0.0] * 3, [0.0, 1.0, 0.0])
    seen = outputs(arguments, causal=False, alibi_slopes=torch.tensor([math.log(2.0)]))
    # Weights 2 ** -distance: (1, 1/2, 1/4), (1/2, 1, 1/2), (1/4, 1/2, 1).
    assert seen == pytest.approx([2 / 7, 0.5, 2 / 7], abs=1e-7)


def encoded(values: list[float], starts: list[int], lens: list[int], **features: Any) -> list[float]:
    v_THD = torch.tensor(values).reshape(-1, 1, 1)
    q_THD = torch.zeros_like(v_THD)
    starts_R, lens_R = torch.tensor(starts), torch.tensor(lens)
    out, _ = reference_attention.over_own_keys(q_THD, q_THD, v_THD, starts_R, lens_R, scale=1.0, **features)
    return out.flatten().tolist()


def test_an_encoder_sees_its_own_request_and_no_other() -> None:
    seen = encoded([1.0, 3.0, NAN, 8.0], [0, 2, 3, 4], [2, 0, 1], causal=False)
    assert seen == pytest.approx([2.0, 2.0, 0.0, 8.0], abs=1e-12)


def test_an_encoder_s_window_has_two_sides() -> None:
    seen = encoded([0.0, 1.0, 2.0, 3.0], [0, 4], [4], causal=False, sliding_window=2, two_sided_window=True)
    assert seen == pytest.approx([0.5, 1.0, 2.0, 2.5], abs=1e-12)


def test_cross_attention_sees_more_or_fewer_keys_than_queries() -> None:
    few = one_request([0.0] * 3, [0.0] * 2, [2.0, 4.0])
    many = one_request([0.0], [0.0] * 3, [1.0, 2.0, 6.0])
    assert outputs(few, causal=False) == pytest.approx([3.0] * 3, abs=1e-12)
    assert outputs(many, causal=False) == pytest.approx([3.0], abs=1e-12)


def test_soft_cap_applies_after_scale() -> None:
    arguments = one_request([1.0], [10.0, 0.0], [1.0, 0.0])
    assert outputs(arguments, logits_soft_cap=1.0)[0] == pytest.approx(0.731059, abs=1e-6)
    assert outputs(arguments)[0] == pytest.approx(0.999955, abs=1e-6)
    out, _ = reference_attention(**arguments, scale=0.1, logits_soft_cap=1.0)
    assert float(out) == pytest.approx(0.681700, abs=1e-6)


@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_stored_keys_and_values_are_multiplied_by_their_scales(format_: torch.dtype) -> None:
    arguments = one_request([1.0], [4.0, 0.0], [2.0, 0.0], format_)
    k_scale, v_scale = torch.tensor([0.25]), torch.tensor([0.5])
    assert outputs(arguments, k_scale=k_scale, v_scale=v_scale)[0] == pytest.approx(0.731059, abs=1e-6)
    assert outputs(arguments)[0] == pytest.approx(1.964028, abs=1e-6)


def test_scales_may_differ_by_head() -> None:
    cache = torch.ones(2, 2, 1, 2, 1)
    out, _ = reference_attention(
        torch.ones(1, 4, 1),
        cache,
        torch.tensor([0, 1]),
        torch.tensor([1]),
        torch.tensor([[1]]),
        scale=1.0,
        v_scale=torch.tensor([2.0, 3.0]),
    )
    assert out.flatten().tolist() == [2.0, 2.0, 3.0, 3.0]


def test_queries_before_the_sequence_see_nothing_and_give_zero() -> None:
    arguments = one_request([1.0] * 3, [0.0] * 2, [1.0, 3.0])
    out, lse = reference_attention(**arguments, scale=1.0)
    assert out.flatten().tolist() == pytest.approx([0.0, 1.0, 2.0], abs=1e-12)
    assert lse.flatten().tolist() == pytest.approx([-math.inf, 0.0, math.log(2)], abs=1e-12)


@pytest.mark.parametrize(("query_len", "expected"), [(1, [2.0]), (2, [1.5, 2.0])])
def test_causality_is_bottom_right_aligned(query_len: int, expected: list[float]) -> None:
    arguments = one_request([0.0] * query_len, [0.0] * 5, [float(j) for j in range(5)])
    assert outputs(arguments) == pytest.approx(expected, abs=1e-12)


def test_alibi_adds_slope_times_distance() -> None:
    arguments = one_request([0.0], [0.0, 0.0], [1.0, 0.0])
    slope = torch.tensor([math.log(3.0)])
    assert outputs(arguments, alibi_slopes=slope)[0] == pytest.approx(0.25, abs=1e-7)


def test_a_sink_takes_probability_and_adds_to_the_lse() -> None:
    arguments = one_request([0.0], [0.0, 0.0], [1.0, 1.0])
    out, lse = reference_attention(**arguments, scale=1.0, sinks=torch.tensor([0.0]))
    assert float(out) == pytest.approx(2 / 3, abs=1e-12)
    assert float(lse) == pytest.approx(math.log(3), abs=1e-12)


def test_a_token_that_sees_only_its_sink_gives_zero_and_the_sink() -> None:
    arguments = one_request([1.0] * 2, [0.0], [1.0])
    out, lse = reference_attention(**arguments, scale=1.0, sinks=torch.tensor([0.5]))
    assert (float(out[0]), float(lse[0])) == (0.0, 0.5)


def test_a_request_of_length_zero_gives_the_empty_state_even_with_a_sink() -> None:
    arguments = one_request([1.0], [0.0], [1.0]) | {"seq_lens": torch.tensor([0])}
    out, lse = reference_attention(**arguments, scale=1.0, sinks=torch.tensor([0.5]))
    assert (float(out), float(lse)) == (0.0, -math.inf)


def test_tokens_past_the_last_request_give_the_empty_state() -> None:
    arguments = one_request([1.0, NAN], [0.0], [1.0]) | {"query_start_loc": torch.tensor([0, 1])}
    out, lse = reference_attention(**arguments, scale=1.0)
    assert out.flatten().tolist() == [1.0, 0.0]
    assert lse.flatten().tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("query_len", [1, 3, 11])
def test_agrees_with_scaled_dot_product_attention(causal: bool, query_len: int) -> None:
    generator = torch.Generator().manual_seed(query_len)
    q_NHD = torch.randn(query_len, 6, 8, generator=generator, dtype=torch.float64)
    cache = torch.randn(6, 2, 4, 2, 8, generator=generator, dtype=torch.float64)
    pages = torch.tensor([[4, 1, 3]])
    out, lse = reference_attention(
        q_NHD,
        cache,
        torch.tensor([0, query_len]),
        torch.tensor([11]),
        pages,
        scale=0.3,
        causal=causal,
    )
    k_LKD, v_LKD = (cache[pages[0], side].reshape(12, 2, 8)[:11] for side in (0, 1))
    mask = torch.ones(query_len, 11, dtype=torch.bool).tril(11 - query_len)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_LKD, v_LKD))
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask if causal else None, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=0, atol=1e-14)
    assert lse.shape == (query_len, 6)


def test_plain_torch_attention_keeps_the_query_dtype_and_is_less_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 32, generator=generator).bfloat16()
    cache = torch.randn(4, 2, 16, 1, 32, generator=generator).bfloat16()
    arguments = (query, cache, torch.tensor([0, 1]), torch.tensor([40]), torch.tensor([[3, 1, 2]]))
    exact, exact_lse = reference_attention(*arguments, scale=0.2)
    plain, plain_lse = plain_torch_attention(*arguments, scale=0.2)
    assert (plain.dtype, plain_lse.dtype) == (torch.bfloat16, torch.float32)
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    assert 1e-5 < float((plain - exact).abs().max()) < 2e-2
    assert 1e-7 < float((plain_lse - exact_lse).abs().max()) < 2e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(1, 1, 2)}, "head size of query is 2, of kv_cache 1"),
        ({"query": torch.ones(1, 1)}, r"query must be \[T, H, D\]"),
        ({"kv_cache": torch.ones(3, 2, 1, 2, 1)}, "1 query heads cannot share 2"),
        ({"seq_lens": torch.tensor([9])}, "needs 9 pages of 1 tokens, but block_table has 2"),
        ({"block_table": torch.tensor([[7, 1]])}, r"names blocks \[7\]"),
        ({"query_start_loc": torch.tensor([0, 5])}, "at most the 1 query rows"),
        ({"query_start_loc": torch.tensor([0])}, "seq_lens has 1 rows"),
        ({"sliding_window": 0}, "sliding_window is at least 1, got 0"),
    ],
)
def test_contradicting_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = one_request([1.0], [0.0, 0.0], [1.0, 2.0]) | change
    with pytest.raises(ValueError, match=message):
        reference_attention(**arguments, scale=1.0)


def test_an_unknown_feature_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="softcap"):
        outputs(one_request([1.0], [0.0], [1.0]), softcap=1.0)


# --- cache writes ---------------------------------------------------------------------------------


def test_a_write_rounds_to_even_saturates_and_leaves_the_rest_alone() -> None:
    cache = torch.full((3, 2, 2, 1, 1), NAN).to(torch.float8_e4m3fn)
    key = torch.tensor([17.0, 19.0, 1e6]).reshape(3, 1, 1)
    value = torch.tensor([1.0, NAN, -torch.inf]).reshape(3, 1, 1)
    updated = reference_kv_cache_update(key, value, cache, torch.tensor([3, -1, 4]))
    stored = updated.to(torch.float32)[..., 0, 0]
    # 17 lies midway between 16 and 18, whose mantissa is odd; 448 is the largest e4m3 value.
    assert (stored[1, :, 1].tolist(), stored[2, :, 0].tolist()) == ([16.0, 1.0], [448.0, -448.0])
    assert int(stored.isfinite().sum()) == 4
    assert cache.to(torch.float32).isnan().all(), "the argument was written"


@pytest.mark.parametrize(
    ("format_", "largest"),
    [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.float16, 65504.0)],
)
def test_a_write_saturates_at_the_largest_finite_value(format_: torch.dtype, largest: float) -> None:
    """A plain conversion gives infinity in the last two."""
    cache = torch.zeros(1, 2, 1, 1, 1).to(format_)
    huge = torch.full((1, 1, 1), 1e6)
    updated = reference_kv_cache_update(huge, -huge, cache, torch.tensor([0]))
    assert updated.float().flatten().tolist() == [largest, -largest]


def test_a_write_divides_by_the_scale_of_each_head() -> None:
    cache = torch.zeros(1, 2, 1, 2, 1)
    ones = torch.ones(1, 2, 1)
    scales = torch.tensor([0.5, 4.0]), torch.tensor([2.0])
    updated = reference_kv_cache_update(ones, ones, cache, torch.tensor([0]), *scales)
    assert updated.flatten().tolist() == [2.0, 0.25, 0.5, 0.5]


def test_a_write_in_the_cache_dtype_is_a_copy_of_bits() -> None:
    cache = torch.zeros(1, 2, 1, 1, 3, dtype=torch.bfloat16)
    key = torch.tensor([[[torch.inf, -0.0, 1.0]]], dtype=torch.bfloat16)
    updated = reference_kv_cache_update(key, key, cache, torch.tensor([0]))
    assert torch.equal(updated[0, 0, 0].view(torch.int16), key[0].view(torch.int16))


@pytest.mark.parametrize("slots", [[0, 17, 159], [159, 0, 17]])
def test_a_head_outermost_cache_is_written_by_logical_position(slots: list[int]) -> None:
    """Block size is dimension 2 of the logical cache, whatever lies next to what in memory."""
    cache = torch.zeros(10, 2, 8, 16, 64).permute(0, 1, 3, 2, 4)
    key, value = torch.randn(2, 3, 8, 64)
    updated = reference_kv_cache_update(key, value, cache, torch.tensor(slots))
    for token, slot in enumerate(slots):
        assert torch.equal(updated[slot // 16, 0, slot % 16], key[token])
        assert torch.equal(updated[slot // 16, 1, slot % 16], value[token])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0], "one row a token, got lengths 2, 2 and 1"),
        ([0, 4], r"holds \[4\], allowed are -1 and 0..3"),
        ([0, -2], r"holds \[-2\]"),
        ([1, 1], r"slots \[1\] more than once"),
    ],
)
def test_impossible_slots_are_refused(slots: list[int], message: str) -> None:
    key = torch.ones(2, 1, 1)
    with pytest.raises(ValueError, match=message):
        reference_kv_cache_update(key, key, torch.zeros(2, 2, 2, 1, 1), torch.tensor(slots))


# --- merging --------------------------------------------------------------------------------------


def state(out: float, lse: float) -> tuple[Tensor, Tensor]:
    return torch.full((1, 1, 2), out), torch.full((1, 1), lse)


def test_merging_weighs_by_natural_exponentials() -> None:
    out, lse = reference_merge_states(*state(1.0, 0.0), *state(0.0, math.log(3.0)))
    assert out.flatten().tolist() == pytest.approx([0.25, 0.25], abs=1e-7)
    assert float(lse) == pytest.approx(math.log(4.0), abs=1e-7)


@pytest.mark.parametrize("garbage", [0.0, NAN])
def test_merging_with_the_empty_state_changes_nothing(garbage: float) -> None:
    some, empty = state(-0.1, 0.3), state(garbage, -math.inf)
    for merged in (reference_merge_states(*some, *empty), reference_merge_states(*empty, *some)):
        assert torch.equal(merged[0], some[0].double())
        assert torch.equal(merged[1], some[1].double())


def test_merging_two_empty_states_gives_the_empty_state() -> None:
    out, lse = reference_merge_states(*state(0.0, -math.inf), *state(0.0, -math.inf))
    assert (out.flatten().tolist(), float(lse)) == ([0.0, 0.0], -math.inf)


def test_merging_halves_of_the_keys_gives_attention_over_all() -> None:
    torch.manual_seed(0)
    query, cache = torch.randn(1, 2, 8), torch.randn(5, 2, 4, 1, 8)
    start = torch.tensor([0, 1])

    def attend(pages: list[int], length: int) -> tuple[Tensor, Tensor]:
        table, lengths = torch.tensor([pages]), torch.tensor([length])
        return reference_attention(query, cache, start, lengths, table, scale=0.5)

    merged = reference_merge_states(*attend([4, 2], 8), *attend([1], 3))
    for got, expected in zip(merged, attend([4, 2, 1], 11), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_merging_states_of_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="of one shape"):
        reference_merge_states(*state(1.0, 0.0), torch.ones(2, 1, 2), torch.ones(2, 1))
