"""The C++ CPU kernels on values known by hand, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_kernel_batches import FP8, INF, NAN, Case, check, make_batch, pytestmark, run  # noqa: F401
from torch import Tensor

from attnbackend.kernels.cpu import (
    cache_write,
    paged_attention,
)

# ---- faults that people met ----------------------------------------------------------------------


def simple(query: Tensor, keys: Tensor, values: Tensor, query_lens: list[int], **options: Any) -> Tensor:
    """Attention of requests that all read the same [L, Hk, D] keys, one slot a block."""
    rows = len(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    table = torch.arange(len(keys)).int().repeat(rows, 1)
    output = torch.full((query.shape[0], query.shape[1], values.shape[-1]), NAN)
    seq_lens = torch.full((rows,), len(keys)).int()
    options = {"scale": 1.0, **options}
    paged_attention(query, keys[:, None], values[:, None], output, starts, seq_lens, table, **options)
    return output


def counting(length: int, size: int = 32, heads: int = 1) -> Tensor:
    """Values [L, Hk, size] equal to their position."""
    return torch.arange(length).float().view(-1, 1, 1).expand(length, heads, size).contiguous()


def first_lane(numbers: list[float], size: int) -> Tensor:
    """[L, 1, size] with the numbers in lane 0."""
    x = torch.zeros(len(numbers), 1, size)
    x[:, 0, 0] = torch.tensor(numbers)
    return x


@pytest.mark.parametrize("query_len", [1, 8], ids=["decode", "prefill"])
def test_b04_a_window_counts_the_token_itself(query_len: int) -> None:
    zeros = torch.zeros(8, 1, 32)
    output = simple(zeros[:query_len], zeros, counting(8), [query_len], sliding_window=4)
    assert output[-1, 0, 0].item() == 5.5


@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("scale", "expected"), [(1.0, 0.731059), (0.1, 0.681700)])
def test_b06_soft_cap_comes_after_the_scale(scale: float, expected: float, heads: int) -> None:
    for size in (1, 32):
        query = first_lane([1.0], size).expand(1, heads, size)
        keys, values = first_lane([10.0, 0.0], size), first_lane([1.0, 0.0], size)
        output = simple(query, keys, values, [1], scale=scale, logits_soft_cap=1.0)
        assert output[0, :, 0].tolist() == pytest.approx([expected] * heads, abs=1e-6)


@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [2]], ids=["decode", "batch", "prefill"])
@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b08_scales_are_applied_everywhere(query_lens: list[int], heads: int) -> None:
    query = first_lane([1.0] * sum(query_lens), 32).expand(-1, heads, 32)
    keys, values = first_lane([4.0, 0.0], 32).to(FP8[0]), first_lane([2.0, 0.0], 32).to(FP8[0])
    scales = {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([0.5])}
    output = simple(query, keys, values, query_lens, **scales)
    assert output[-1, :, 0].tolist() == pytest.approx([0.731059] * heads, abs=1e-6)


@pytest.mark.parametrize(
    ("stride", "block"),
    [(16 * 2 * 8 * 128, 65536), (1_039_680, 2066)],
    ids=["many blocks", "layers packed in one buffer"],
)
def test_b10_offsets_beyond_32_bits(stride: int, block: int) -> None:
    offset = block * stride
    assert offset > 2**31 - 1
    buffer = torch.empty(offset + 16 * 8 * 128 * 2, dtype=torch.uint8).view(FP8[0])
    shape, strides = (block + 1, 16, 8, 128), (stride, 8 * 128, 128, 1)
    key_cache = buffer.as_strided(shape, strides)
    value_cache = buffer.as_strided(shape, strides, 16 * 8 * 128)
    buffer[offset:] = NAN
    value = torch.randn(1, 8, 128).to(FP8[0]).float()
    cache_write(value, value, key_cache, value_cache, torch.tensor([block * 16]))
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[block]])]
    for heads in (8, 128):
        output = torch.full((1, heads, 128), NAN)
        query = torch.randn(1, heads, 128)
        paged_attention(query, key_cache, value_cache, output, *tables, scale=1.0)
        assert torch.equal(output, value.repeat_interleave(heads // 8, 1))


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b11_what_lies_behind_seq_len_does_not_matter(poison: float, heads: int) -> None:
    cache = torch.full((3, 2, 4, 1, 32), poison)
    cache[1, :, 0] = 1.0
    output = torch.full((1, heads, 32), NAN)
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[1, 2]])]
    query = torch.ones(1, heads, 32)
    paged_attention(query, cache[:, 0], cache[:, 1], output, *tables, scale=1.0)
    assert torch.equal(output, torch.ones(1, heads, 32))


def test_b12_empty_rows_between_single_token_rows() -> None:
    check(Case((0, 1, 0, 1), (0, 2, 0, 4), heads=9, kv_heads=3, head_size=64))


def test_b12_empty_rows_may_have_a_stale_seq_len_and_table() -> None:
    batch = make_batch(Case((0, 1, 0, 1), (0, 2, 0, 4)))
    expected = run(batch)[0]
    _, seq_lens, table = batch.tables
    seq_lens[0] = seq_lens[2] = 2**31 - 1
    table[0] = table[2] = -1
    assert torch.equal(run(batch)[0], expected)


@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b14_a_row_that_sees_nothing_is_zero_with_lse_minus_inf(heads: int) -> None:
    lse = torch.full((2, heads), NAN)
    zeros = torch.zeros(2, heads, 32)
    output = simple(zeros, torch.zeros(1, 1, 32), counting(1) + 3, [2], lse=lse)
    assert torch.equal(output[:, :, 0], torch.tensor([[0.0], [3.0]]).expand(2, heads))
    assert torch.equal(lse, torch.tensor([[-INF], [0.0]]).expand(2, heads))


@pytest.mark.parametrize(("query_len", "expected"), [(1, [2.0]), (2, [1.5, 2.0])])
def test_b15_causality_is_bottom_right(query_len: int, expected: list[float]) -> None:
    zeros = torch.zeros(5, 1, 32)
    output = simple(zeros[:query_len], zeros, counting(5), [query_len])
    assert output[:, 0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (28, 4), (5, 1), (9, 3), (200, 1)]
)
@pytest.mark.parametrize("query_len", [1, 3])
def test_b17_each_head_uses_the_kv_head_of_its_group(heads: int, kv_heads: int, query_len: int) -> None:
    values = torch.arange(kv_heads).float().view(1, -1, 1).expand(4, kv_heads, 32).contiguous()
    query = torch.zeros(query_len, heads, 32)
    output = simple(query, torch.zeros(4, kv_heads, 32), values, [query_len])
    expected = torch.arange(heads) // (heads // kv_heads)
    assert torch.equal(output[..., 0], expected.float().expand(query_len, heads))


# ---- what is refused -----------------------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    batch = make_batch(Case())
    names = ("query_start_loc", "seq_lens", "block_table")
    return {
        "query": batch.query_THD,
        "key_cache": batch.kv_cache[:, 0],
        "value_cache": batch.kv_cache[:, 1],
        "output": torch.empty_like(batch.query_THD),
        **dict(zip(names, batch.tables, strict=True)),
        "scale": 0.125,
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CACHE, QUERY = torch.zeros(20, 16, 2, 64), torch.zeros(47, 6, 64)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "query of float64": ({"query": QUERY.double()}, "query.dtype is torch.float64"),
    "query of two dimensions": ({"query": QUERY.view(47, 384)}, r"\[47, 384\]; expected \[T, H"),
    "query with a strided last dimension": (
        {"query": torch.zeros(47, 64, 6).transpose(1, 2)},
        "query has strides",
    ),
    "head sizes that differ": ({"query": torch.zeros(47, 6, 32)}, "head size 32, key_cache 64"),
    "heads that do not divide": (
        {"query": torch.zeros(47, 5, 64), "output": torch.zeros(47, 5, 64)},
        "query has 5 heads and the cache 2",
    ),
    "key_cache of uint8": (
        {"key_cache": CACHE.byte(), "value_cache": CACHE.byte()},
        "key_cache.dtype is torch.uint8",
    ),
    "caches of two dtypes": ({"value_cache": CACHE.half(), "key_cache": CACHE}, "must agree"),
    "caches of two shapes": ({"key_cache": CACHE[:5], "value_cache": CACHE}, "value_cache has"),
    "output of the wrong shape": ({"output": QUERY[1:]}, r"output has shape \[46, 6, 64"),
    "query_start_loc of int64": ({"query_start_loc": torch.zeros(6).long()}, "query_start_loc is"),
    "query_start_loc too short": ({"query_start_loc": int32(0, 1)}, r"expected torch.int32 \[6\]"),
    "query_start_loc not from 0": (
        {"query_start_loc": int32(1, 1, 6, 6, 46, 47)},
        "must start at 0",
    ),
    "query_start_loc decreasing": (
        {"query_start_loc": int32(0, 1, 6, 4, 46, 47)},
        "row 2 runs from 6 to 4",
    ),
    "query_start_loc past the tokens": (
        {"query_start_loc": int32(0, 1, 6, 6, 46, 48)},
        "ends rows at 48, but query has 47",
    ),
    "seq_len negative": ({"seq_lens": int32(71, -8, 0, 130, 1)}, r"seq_lens\[1\] is -8"),
    "seq_len above the table": (
        {"seq_lens": int32(71, 8, 0, 130, 177)},
        r"seq_lens\[4\] is 177, more than the 176",
    ),
    "block_table of int64": ({"block_table": torch.zeros(5, 9).long()}, "block_table.dtype"),
    "window of zero": ({"sliding_window": 0}, "sliding_window is 0"),
    "chunk of zero": ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    "chunk beside a window": (
        {"attention_chunk_size": 4, "sliding_window": 4},
        "attention_chunk_size is 4 and sliding_window 4",
    ),
    "ranges of int64": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2).long()},
        r"bidirectional_ranges is torch.int64 \[5, 1, 2\]",
    ),
    "ranges of too few rows": ({"bidirectional_ranges": int32(0, 1).view(1, 1, 2)}, r"int32 \[5, G, 2\]"),
    "ranges without causality": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2).int(), "causal": False},
        "allowed: None unless causal",
    ),
    "own keys of a paged shape": ({"block_table": None}, r"since block_table is None"),
    "own keys of other tokens": (
        {"block_table": None, "key_cache": QUERY[1:, :2], "value_cache": QUERY[:, :2]},
        r"key_cache has shape \[46, 2, 64\]",
    ),
    "own keys of more than the tokens": (
        {"block_table": None, "key_cache": QUERY[:, :2], "value_cache": QUERY[:, :2]},
        r"seq_lens\[0\] is 71, more than its 1 tokens",
    ),
    "negative soft-cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
    "scale of nan": ({"scale": NAN}, "scale is NaN"),
    "alibi_slopes too few": ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes"),
    "sinks too few": ({"sinks": torch.zeros(2)}, "sinks"),
    "sinks of int": ({"sinks": torch.zeros(6).int()}, "sinks"),
    "k_scale a query head": ({"k_scale": torch.ones(6)}, "k_scale is torch.float32 with 6"),
    "v_scale of float64": ({"v_scale": torch.ones(1).double()}, "v_scale is torch.float64"),
    "lse of float16": ({"lse": torch.zeros(47, 6).half()}, "lse.dtype"),
    "lse of the wrong shape": ({"lse": torch.zeros(6, 47)}, r"lse has shape \[6, 47\]"),
    "query on another device": ({"query": QUERY.to("meta")}, "query is on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name: str) -> None:
    changes, message = REFUSED[name]
    arguments = {**good_arguments(), **changes}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


@pytest.mark.parametrize("block", [-1, 10**6, 2**31 - 1])
def test_attention_refuses_a_block_outside_the_cache_and_names_it(block: int) -> None:
    arguments = good_arguments()
    table = arguments["block_table"]
    assert isinstance(table, Tensor)
    table[3, 2] = block
    output = arguments["output"] = torch.full((47, 6, 64), 5.0)
    with pytest.raises(ValueError, match=rf"block_table\[3, 2\] is {block}, not a block"):
        paged_attention(**arguments)
    assert torch.equal(output, torch.full((47, 6, 64), 5.0))


def test_attention_refuses_unknown_keywords() -> None:
    with pytest.raises(TypeError, match="window_size"):
        paged_attention(**{**good_arguments(), "window_size": 4})


@pytest.mark.parametrize("slot", [160, 2**40])
def test_cache_write_refuses_a_slot_outside_the_cache_and_writes_nothing(slot: int) -> None:
    cache = torch.zeros(10, 2, 16, 2, 64)
    key = torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match=rf"slot_mapping\[2\] is {slot}; .* 0 to 159"):
        cache_write(key, key, cache[:, 0], cache[:, 1], torch.tensor([0, -1, slot]))
    assert not cache.any()


@pytest.mark.parametrize("length", [2, 4])
def test_cache_write_refuses_a_slot_mapping_of_another_length(length: int) -> None:
    cache, key = torch.zeros(10, 2, 16, 2, 64), torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match="slot_mapping is"):
        cache_write(key, key, cache[:, 0], cache[:, 1], torch.arange(length))


def test_only_one_openmp_runtime_is_loaded() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    torch.randn(300, 300) @ torch.randn(300, 300)
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) <= 1
