"""Paged batches and a dense float64 reference written as loops for tests of the C++ CPU kernels.

Shapes: T tokens, R requests, H query heads, Hk kv heads, D head size, Dv value head size,
B cache blocks, S slots a block, W blocks a request, L keys of a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbackend.kernels.cpu import (
    paged_attention,
    unavailable_reason,
)

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C++ kernels: {unavailable_reason()}"
)

NAN, INF = float("nan"), float("inf")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("NHD", "HND", "interleaved layers")


@dataclass(frozen=True)
class Case:
    """What a batch looks like and which features its attention uses."""

    query_lens: tuple[int, ...] = (1, 5, 0, 40, 1)
    contexts: tuple[int, ...] = (70, 3, 0, 90, 0)
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 64
    value_size: int = 0  # 0: head_size
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Bidirectional ranges of the first requests; the others have none."""
    own_keys: bool = False
    """No cache: keys are the tokens' own, and contexts are 0 (or minus the query's length)."""
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    scales: int = 0  # 0: none, 1: one for all heads, 2: one a head
    padded_rows: int = 0
    tail_tokens: int = 0
    poison: float = NAN
    spread: float = 1.0


@dataclass
class Batch:
    """Inputs of one call, and the dense real keys and values of every request."""

    case: Case
    query_THD: Tensor
    kv_cache: Tensor
    tables: tuple[Tensor, Tensor, Tensor]  # query_start_loc, seq_lens, block_table
    keys_LHD: list[Tensor]
    values_LHD: list[Tensor]
    options: dict[str, Any]


def empty_cache(case: Case, blocks: int) -> Tensor:
    """A poisoned [B, 2, S, Hk, D'] view; K and V of different sizes use the front of D'."""
    size = max(case.head_size, case.value_size)
    sizes = (blocks, 2, case.block_size, case.kv_heads, size)
    if case.layout == "HND":
        sizes = (blocks, 2, case.kv_heads, case.block_size, size)
    if case.layout == "interleaved layers":
        buffer = torch.full((blocks, 3, *sizes[1:]), case.poison).to(case.cache_dtype)
        return buffer[:, 1]
    cache = torch.full(sizes, case.poison).to(case.cache_dtype)
    return cache.transpose(2, 3) if case.layout == "HND" else cache


def make_tables(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    lens = [q + c for q, c in zip(case.query_lens, case.contexts, strict=True)]
    needed = [math.ceil(n / case.block_size) for n in lens]
    order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    rows = len(lens) + case.padded_rows
    table = torch.zeros(rows, max(needed, default=0) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        table[row, count:] = 2**31 - 1  # never to be followed
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1 : len(lens) + 1] = torch.tensor(case.query_lens, dtype=torch.int32).cumsum(0)
    starts[len(lens) + 1 :] = starts[len(lens)]
    seq_lens = torch.zeros(rows, dtype=torch.int32)
    seq_lens[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
    return starts, seq_lens, table


def make_options(case: Case, generator: torch.Generator) -> dict[str, Any]:
    def scale() -> Tensor | None:
        count = (0, 1, case.kv_heads)[case.scales]
        return torch.rand(count, generator=generator) + 0.5 if count else None

    slopes = torch.rand(case.heads, generator=generator) * 0.2
    sinks = torch.randn(case.heads, generator=generator)
    return {
        "alibi_slopes": slopes if case.alibi else None,
        "sinks": sinks if case.sinks else None,
        "k_scale": scale(),
        "v_scale": scale(),
        "bidirectional_ranges": make_ranges(case),
    }


def make_ranges(case: Case) -> Tensor | None:
    """int32 [R, G, 2], empty ranges after those given."""
    if not case.ranges:
        return None
    rows, most = len(case.query_lens) + case.padded_rows, max(map(len, case.ranges))
    ranges = torch.tensor([9, 9], dtype=torch.int32).repeat(rows, most, 1)
    for row, given in enumerate(case.ranges):
        for place, pair in enumerate(given):
            ranges[row, place] = torch.tensor(pair)
    return ranges


def make_batch(case: Case, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    case = replace(case, value_size=case.value_size or case.head_size)
    starts, seq_lens, table = make_tables(case, generator)
    blocks = int(table[table < 2**31 - 1].max()) + 4
    cache = empty_cache(case, blocks)
    keys, values = [], []
    options = make_options(case, generator)
    for row, length in enumerate(seq_lens.tolist()):
        shape = (length, case.kv_heads)
        key = torch.randn(*shape, case.head_size, generator=generator).to(case.cache_dtype)
        value = torch.randn(*shape, case.value_size, generator=generator).to(case.cache_dtype)
        for position in range(length):
            block = int(table[row, position // case.block_size])
            slot = position % case.block_size
            cache[block, 0, slot, :, : case.head_size] = key[position]
            cache[block, 1, slot, :, : case.value_size] = value[position]
        keys.append(real(key, options["k_scale"]))
        values.append(real(value, options["v_scale"]))
    tokens = int(starts[-1]) + case.tail_tokens
    query = torch.randn(tokens, case.heads, case.head_size, generator=generator) * case.spread
    return Batch(case, query.to(case.dtype), cache, (starts, seq_lens, table), keys, values, options)


def real(stored: Tensor, scale: Tensor | None) -> Tensor:
    factor = torch.ones(1) if scale is None else scale
    return stored.double() * factor.double().view(1, -1, 1)


def visible(case: Case, row: int, length: int, position: int) -> Tensor:
    keys = torch.arange(length)
    mask = torch.ones(length, dtype=torch.bool)
    if case.causal:
        mask &= keys <= position
    if case.window is not None:
        mask &= keys > position - case.window
        if case.own_keys and not case.causal:
            mask &= keys < position + case.window
    if case.chunk is not None:
        mask &= keys // case.chunk == position // case.chunk
    for start, end in case.ranges[row] if row < len(case.ranges) else ():
        if start <= position < end:
            mask |= (keys >= start) & (keys < end)
    return mask


def dense_token(
    batch: Batch, row: int, token: int, position: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output [H, Dv] and natural LSE [H] of one token, every step in `dtype`."""
    case = batch.case
    group = case.heads // case.kv_heads
    key_HLD = batch.keys_LHD[row].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    value_HLD = batch.values_LHD[row].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    length = key_HLD.shape[1]
    score_HL = (key_HLD @ batch.query_THD[token].to(dtype)[:, :, None])[:, :, 0]
    score_HL = score_HL * case.head_size**-0.5
    if case.soft_cap > 0:
        score_HL = case.soft_cap * torch.tanh(score_HL / case.soft_cap)
    slopes, sinks = batch.options["alibi_slopes"], batch.options["sinks"]
    if slopes is not None:
        distance = (torch.arange(length) - position).abs()
        score_HL = score_HL - slopes[:, None].to(dtype) * distance.to(dtype)
    seen_HL = score_HL[:, visible(case, row, length, position)]
    logits = seen_HL
    if sinks is not None and length > 0:
        logits = torch.cat([seen_HL, sinks[:, None].to(dtype)], 1)
    lse_H = torch.logsumexp(logits, 1)  # -inf over nothing
    weight_HL = torch.exp(seen_HL - lse_H[:, None])
    value_HLD = value_HLD[:, visible(case, row, length, position)]
    return (weight_HL[:, None] @ value_HLD)[:, 0], lse_H


def dense(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [T, H, Dv] and LSE [T, H] of the whole batch in `dtype`."""
    case, (starts, seq_lens, _) = batch.case, batch.tables
    tokens = batch.query_THD.shape[0]
    output = torch.zeros(tokens, case.heads, case.value_size, dtype=dtype)
    lse = torch.full((tokens, case.heads), -INF, dtype=dtype)
    for row, length in enumerate(seq_lens.tolist()):
        start, end = int(starts[row]), int(starts[row + 1])
        for token in range(start, end):
            position = length - (end - start) + token - start
            output[token], lse[token] = dense_token(batch, row, token, position, dtype)
    return output, lse


def own_keys(batch: Batch) -> tuple[Tensor, Tensor]:
    """key and value [T, Hk, D'] as views of one buffer, NaN where no request's keys are."""
    case, (starts, _, _) = batch.case, batch.tables
    size = max(case.head_size, case.value_size)
    fused = torch.full((batch.query_THD.shape[0], 2, case.kv_heads, size), NAN).to(case.cache_dtype)
    for row, (keys, values) in enumerate(zip(batch.keys_LHD, batch.values_LHD, strict=True)):
        at = slice(int(starts[row]), int(starts[row]) + len(keys))
        fused[at, 0, :, : case.head_size] = keys.to(case.cache_dtype)
        fused[at, 1, :, : case.value_size] = values.to(case.cache_dtype)
    return fused[:, 0], fused[:, 1]


def run(batch: Batch, with_lse: bool = True) -> tuple[Tensor, Tensor]:
    case = batch.case
    tokens = batch.query_THD.shape[0]
    output = torch.full((tokens, case.heads, case.value_size), NAN, dtype=case.dtype)
    lse = torch.full((tokens, case.heads), NAN)
    keys, values = own_keys(batch) if case.own_keys else (batch.kv_cache[:, 0], batch.kv_cache[:, 1])
    starts, seq_lens, table = batch.tables
    paged_attention(
        batch.query_THD,
        keys[..., : case.head_size],
        values[..., : case.value_size],
        output,
        starts,
        seq_lens,
        None if case.own_keys else table,
        scale=case.head_size**-0.5,
        causal=case.causal,
        sliding_window=case.window,
        attention_chunk_size=case.chunk,
        logits_soft_cap=case.soft_cap,
        lse=lse if with_lse else None,
        **batch.options,
    )
    return output, lse


def assert_as_good_as_torch(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Error at most twice that of plain float32 torch rounded to the same dtype, plus an ulp."""
    finite = torch.isfinite(exact)
    assert torch.equal(got[~finite].double(), exact[~finite])
    if not finite.any():
        return
    plain_error = (plain.to(got.dtype).double() - exact)[finite].abs().max().item()
    error = (got.double() - exact)[finite].abs().max().item()
    ulp = torch.finfo(got.dtype).eps * max(exact[finite].abs().max().item(), 1.0)
    assert error <= 2 * plain_error + ulp, f"error {error}, plain torch {plain_error}, ulp {ulp}"


def check(case: Case, seed: int = 0, threads: int = 2) -> None:
    with thread_count(1):  # many small products
        batch = make_batch(case, seed)
        exact_output, exact_lse = dense(batch, torch.float64)
        plain_output, plain_lse = dense(batch, torch.float32)
    with thread_count(threads):
        output, lse = run(batch)
    assert_as_good_as_torch(output, plain_output, exact_output)
    assert_as_good_as_torch(lse, plain_lse, exact_lse)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
