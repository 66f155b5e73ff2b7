"""The C++ CPU kernels against a dense float64 reference written as loops."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cpu_kernel_batches import (  # noqa: F401
    FP8,
    INF,
    LAYOUTS,
    NAN,
    Case,
    check,
    make_batch,
    own_keys,
    pytestmark,
    run,
    thread_count,
)

from attnbackend.kernels.cpu import (
    _attention,
    _build,
    _cache_write,
    paged_attention,
)
from attnbackend.kernels.cpu._target import Target, runnable_targets


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


ALL: dict[str, Any] = {"window": 20, "soft_cap": 1.5, "alibi": True, "sinks": True}
FEATURES = {
    "plain": Case(),
    "one kv head for all": Case(heads=5, kv_heads=1),
    "a kv head a query head": Case(heads=4, kv_heads=4),
    "a group larger than a tile": Case((2, 1), (5, 66), heads=130, kv_heads=1, head_size=32),
    "window": Case(window=7),
    "window of one": Case(window=1),
    "window without causality": Case(window=7, causal=False),
    "not causal": Case(causal=False),
    "soft-cap": Case(soft_cap=0.7, spread=3.0),
    "alibi": Case(alibi=True),
    "sinks": Case(sinks=True),
    "everything at once": Case(**ALL),
    "everything at once without causality": Case(**ALL, causal=False),
    "large scores": Case(spread=40.0),
    "padded rows and tail tokens": Case(padded_rows=3, tail_tokens=4),
    "padded rows and tail tokens with sinks": Case(padded_rows=3, tail_tokens=4, sinks=True),
    "seq_len 0 with query tokens": Case((2, 1, 20), (-2, 30, -20)),
    "seq_len 0 with query tokens and sinks": Case((2, 1, 20), (-2, 30, -20), sinks=True),
    "fewer keys than query tokens": Case((5, 30), (-3, -12), sinks=False),
    "fewer keys than query tokens with sinks": Case((5, 30), (-3, -12), sinks=True),
    "unused cache is inf": Case(poison=INF),
    "values smaller than keys": Case(head_size=96, value_size=64),
    "values larger than keys": Case(head_size=40, value_size=72),
    "one slot a block": Case(block_size=1),
    "blocks of 48": Case(block_size=48),
    "blocks larger than a tile": Case(block_size=128),
    "alibi without causality": Case(alibi=True, causal=False),
    "chunks": Case(chunk=7),
    "chunks of one": Case(chunk=1),
    "chunks larger than a tile": Case((1, 90, 70), (150, 60, 0), chunk=100, soft_cap=1.5, alibi=True),
    "chunks without causality": Case((1, 40, 6), (70, 90, -4), chunk=32, causal=False, sinks=True),
    "ranges": Case(ranges=((), ((0, 4), (6, 8)), (), ((85, 97), (100, 999)))),
    "overlapping ranges over a window": Case(
        window=3, ranges=(((2, 71), (60, 90)), ((3, 5), (4, 7)), (), ((91, 95), (20, 130))), alibi=True
    ),
    "ranges over chunks": Case(chunk=5, ranges=(((0, 71),), (), (), ((93, 129),)), padded_rows=2),
    "own keys": Case((1, 5, 0, 130, 3), (0, 0, 0, 0, -3), own_keys=True, causal=False, tail_tokens=2),
    "own keys and causality": Case((5, 130), (0, 0), own_keys=True, **ALL),
    "own keys in a window on both sides": Case((5, 130), (0, 0), own_keys=True, causal=False, **ALL),
    "own keys in chunks": Case((5, 130), (0, 0), own_keys=True, causal=False, chunk=48, value_size=40),
    "nothing but padding": Case((0, 0), (0, 0), padded_rows=1, tail_tokens=3),
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_matches_the_reference(name: str, threads: int) -> None:
    check(FEATURES[name], threads=threads)


@pytest.mark.parametrize("name", FEATURES)
def test_feature_in_bfloat16_matches_the_reference(name: str) -> None:
    """Where the CPU multiplies bfloat16 pairs, both operands have to be bfloat16 to take that path."""
    check(replace(FEATURES[name], dtype=torch.bfloat16, cache_dtype=torch.bfloat16))


EVERY_PATH = {
    "plain": FEATURES["plain"],
    "everything at once": FEATURES["everything at once"],
    "poison": FEATURES["unused cache is inf"],
    "own keys": FEATURES["own keys"],
    "one long request": Case((1,), (2000,), heads=8, kv_heads=2, head_size=40),
    "float16": Case(dtype=torch.float16, cache_dtype=torch.float16, head_size=40),
    "bfloat16": Case(dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "e4m3": Case(cache_dtype=FP8[0], scales=2),
    "e5m2": Case(cache_dtype=FP8[1], scales=1, head_size=72),
}


@pytest.mark.parametrize("target", runnable_targets()[:-1][:2], ids=lambda target: target.name)
@pytest.mark.parametrize("name", EVERY_PATH)
def test_lesser_instruction_sets_match_the_reference(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = lesser_library(target)
    for module in (_attention, _cache_write):
        monkeypatch.setattr(module, "library", lambda: loaded)
    check(EVERY_PATH[name])


@cache
def lesser_library(target: Target) -> Any:
    return _build.load_library(target)


@pytest.mark.parametrize("query_len", [1, 3, 40], ids=["decode", "several", "prefill"])
@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 160, 256])
def test_bfloat16_head_size_matches_the_reference(head_size: int, query_len: int) -> None:
    dtype = torch.bfloat16
    check(Case((query_len,), (129,), head_size=head_size, dtype=dtype, cache_dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, *FP8], ids=str)
def test_cache_layout_and_dtype_match_the_reference(layout: str, cache_dtype: torch.dtype) -> None:
    check(Case(layout=layout, cache_dtype=cache_dtype, scales=2, **ALL))


@pytest.mark.parametrize("head_size", [8, 32, 40, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, FP8[0]], ids=str)
def test_head_size_matches_the_reference(head_size: int, cache_dtype: torch.dtype) -> None:
    check(Case((1, 9), (40, 30), head_size=head_size, cache_dtype=cache_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8], ids=str)
@pytest.mark.parametrize("scales", [0, 1, 2], ids=["no scale", "one scale", "scale a head"])
def test_dtypes_match_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype, scales: int) -> None:
    check(Case((1, 9), (40, 30), dtype=dtype, cache_dtype=cache_dtype, scales=scales))


@pytest.mark.parametrize("rows", range(1, 13))
def test_every_number_of_rows_in_a_tile_matches_the_reference(rows: int) -> None:
    check(Case((rows, 1), (20, 70), heads=rows, kv_heads=1, head_size=32))
    check(Case((rows,), (20,), heads=1, kv_heads=1, head_size=32))


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("query_len", [1, 12])
def test_one_long_request_split_over_keys_matches_the_reference(
    query_len: int, sinks: bool, threads: int
) -> None:
    case = Case((query_len,), (1500,), heads=6, kv_heads=2, head_size=32, sinks=sinks)
    check(case, threads=threads)


def test_threads_do_not_change_the_result_beyond_rounding() -> None:
    batch = make_batch(Case((1,), (2000,)))
    outputs = []
    for count in (1, 2, 7):
        with thread_count(count):
            outputs.append(run(batch)[0])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-6)


def test_splitting_a_request_skips_parts_outside_the_window(threads: int) -> None:
    check(Case((1, 3), (1500, 900), head_size=32, window=300), threads=threads)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_match_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    lens = torch.randint(0, 30, (6,), generator=generator).tolist()
    contexts = torch.randint(0, 150, (6,), generator=generator).tolist()
    features = ALL if seed % 2 else {}
    check(Case(tuple(lens), tuple(contexts), heads=8, kv_heads=2, head_size=32, **features), seed)


def test_output_and_lse_may_have_any_outer_strides() -> None:
    batch = make_batch(Case())
    expected_output, expected_lse = run(batch)
    tokens = batch.query_THD.shape[0]
    output = torch.full((6, tokens, 80), NAN).transpose(0, 1)[..., :64]
    lse = torch.full((6, tokens), NAN).t()
    wide_query = torch.randn(tokens, 9, 64)
    wide_query[:, 2:8] = batch.query_THD
    cache = batch.kv_cache
    paged_attention(wide_query[:, 2:8], cache[:, 0], cache[:, 1], output, *batch.tables, scale=0.125, lse=lse)
    assert torch.equal(output, expected_output)
    assert torch.equal(lse, expected_lse)


def test_lse_is_optional() -> None:
    batch = make_batch(Case())
    assert torch.equal(run(batch, with_lse=False)[0], run(batch)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_sinks_take_any_float_dtype(dtype: torch.dtype) -> None:
    batch = make_batch(Case(sinks=True))
    sinks = batch.options["sinks"]
    batch.options["sinks"] = sinks.bfloat16().float()
    expected = run(batch)[0]
    batch.options["sinks"] = sinks.bfloat16().to(dtype)
    if dtype != torch.float16:
        assert torch.equal(run(batch)[0], expected)
    torch.testing.assert_close(run(batch)[0], expected, rtol=0, atol=1e-3)


def test_nan_in_a_query_reaches_only_its_own_rows() -> None:
    batch = make_batch(Case())
    expected = run(batch)[0]
    batch.query_THD[3, 1, 5] = NAN
    output = run(batch)[0]
    assert output[3, 1].isnan().all()
    output[3, 1] = expected[3, 1]
    assert torch.equal(output, expected)


def test_blocks_outside_the_window_are_never_read() -> None:
    batch = make_batch(Case((1, 20), (300, 200), window=16))
    expected = run(batch)[0]
    batch.tables[2][0, :17] = -7  # position 300 sees keys 285..300, from block 17 on
    batch.tables[2][1, :12] = -7  # positions 200..219 see keys 185 on, from block 11 on
    with pytest.raises(ValueError, match=r"block_table\[1, 11\] is -7"):
        run(batch)
    batch.tables[2][1, 11] = make_batch(batch.case).tables[2][1, 11]
    assert torch.equal(run(batch)[0], expected)
