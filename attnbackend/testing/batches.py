"""Batches of paged attention arguments, laid out so that faults show.

Whatever a kernel must not read holds NaN: block 0, blocks that nobody owns, the last block past
seq_len, other layers, padding tokens. Whatever it must write holds NaN too: output and LSE.
The data of a case is generated on the CPU, so it is the same on every device.

Shape suffixes: T tokens, R rows, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.paging import PagePlan, batch_metadata, plan_pages, poisoned_cache
from attnbackend.testing.probes import SequenceData, apply_probe
from attnbackend.testing.reference import (
    DenseAttention,
    plain_torch_attention,
    reference_attention,
)
from attnbackend.testing.reference_cache import reference_kv_cache_update, store_in_format
from attnbackend.testing.rounding import float32_spread
from attnbackend.types import AttentionType

__all__ = [
    "PagedBatch",
    "expected_attention",
    "expected_kv_cache",
    "kv_update_kwargs",
    "kv_update_positional",
    "make_batch",
    "op_kwargs",
    "op_positional",
    "rounding_spread",
    "yardstick_attention",
]


@dataclass(frozen=True)
class PagedBatch:
    """Every tensor argument of the ops ``attention`` and ``kv_cache_update`` for one case."""

    case: AttentionCase
    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    """Logical [B, 2, S, K, D], a view of ``kv_buffer``; of an encoder B is 0."""
    kv_buffer: Tensor
    """Logical [B, layers, 2, S, K, D]; all but the layer under test is NaN and must stay so."""
    output: Tensor
    lse: Tensor | None
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    bidirectional_ranges: Tensor | None = None

    def poison_outputs(self) -> None:
        """NaN in output and lse again, before another call with the same batch."""
        self.output.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)


def make_batch(case: AttentionCase, device: torch.device | str = "cpu") -> PagedBatch:
    """All arguments of the op ``attention`` for ``case``, on ``device``."""
    generator = torch.Generator().manual_seed(case.seed)
    device = torch.device(device)
    plan = plan_pages(case, generator)
    k_scale, v_scale = (_scale_tensor(scale) for scale in (case.k_scale, case.v_scale))
    sequences = [_sequence(case, request, generator) for request in range(len(case.query_lens))]
    buffer = poisoned_cache(case, plan.num_blocks)
    layer = case.num_layers // 2
    _write_pages(case, plan, sequences, buffer[:, layer], (k_scale, v_scale))
    buffer = _to_device_as_is(buffer, device)
    query, key, value = _token_tensors(case, sequences, (k_scale, v_scale))
    output, lse = _poisoned_outputs(case, device)
    alibi_slopes, sinks = _alibi_slopes(case), _sinks(case, generator)
    return PagedBatch(
        case=case,
        query=_to_device_as_is(query, device),
        key=_to_device_as_is(key, device),
        value=_to_device_as_is(value, device),
        kv_cache=buffer[:0, layer] if case.attn_type.keeps_no_cache else buffer[:, layer],
        kv_buffer=buffer,
        output=output,
        lse=lse,
        block_table=_to_device_as_is(_block_table(case, plan), device),
        k_scale=None if k_scale is None else k_scale.to(device),
        v_scale=None if v_scale is None else v_scale.to(device),
        **{name: x.to(device) for name, x in batch_metadata(case, plan).items()},
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.to(device),
        sinks=None if sinks is None else sinks.to(device),
        bidirectional_ranges=_ranges(case, device),
    )


def op_positional(batch: PagedBatch) -> tuple[Tensor | None, ...]:
    """Positional arguments of the op ``attention`` and of every op of its schema."""
    is_cross = batch.case.attn_type is AttentionType.ENCODER_DECODER
    return (
        batch.query,
        None if is_cross else batch.key,
        None if is_cross else batch.value,
        batch.kv_cache,
        batch.output,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
    )


def op_kwargs(batch: PagedBatch) -> dict[str, Any]:
    """Keyword arguments of the op ``attention``; the rest of its schema stays at its defaults."""
    return _attention_features(batch) | {
        "lse": batch.lse,
        "kv_cache_dtype": batch.case.kv_cache_dtype,
        "attn_type": str(batch.case.attn_type),
    }


def kv_update_positional(batch: PagedBatch) -> tuple[Tensor, ...]:
    """Positional arguments of the op ``kv_cache_update``."""
    return (batch.key, batch.value, batch.kv_cache, batch.slot_mapping)


def kv_update_kwargs(batch: PagedBatch) -> dict[str, Any]:
    """Keyword arguments of the op ``kv_cache_update``."""
    return {
        "k_scale": batch.k_scale,
        "v_scale": batch.v_scale,
        "kv_cache_dtype": batch.case.kv_cache_dtype,
    }


def expected_kv_cache(batch: PagedBatch) -> Tensor:
    """What the batch's cache must hold, bit for bit, once its new tokens are written."""
    return reference_kv_cache_update(
        batch.key,
        batch.value,
        batch.kv_cache,
        batch.slot_mapping,
        batch.k_scale,
        batch.v_scale,
    )


def expected_attention(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """float64 (output [T, H, D], lse [T, H]) with the new tokens in the cache, on the CPU."""
    return _dense(batch, reference_attention)


def yardstick_attention(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """The same by plain PyTorch in the query's dtype (LSE float32), on the CPU."""
    return _dense(batch, plain_torch_attention)


def rounding_spread(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """How far plain float32 may stray from `expected_attention`, of each element; see `testing.rounding`."""
    return _dense(batch, float32_spread)


def _dense(batch: PagedBatch, attend: DenseAttention) -> tuple[Tensor, Tensor]:
    features: dict[str, Any] = {
        name: x.cpu() if isinstance(x, Tensor) else x for name, x in _attention_features(batch).items()
    }
    if batch.case.attn_type.keeps_no_cache:
        own = (batch.query, batch.key, batch.value, batch.query_start_loc, batch.seq_lens)
        two_sided = not batch.case.causal
        return attend.over_own_keys(*(x.cpu() for x in own), **features, two_sided_window=two_sided)
    tensors = (
        batch.query,
        expected_kv_cache(batch),
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
    )
    return attend(*(x.cpu() for x in tensors), **features)


def _attention_features(batch: PagedBatch) -> dict[str, Any]:
    return {
        "scale": batch.case.softmax_scale,
        "causal": batch.case.causal,
        "sliding_window": batch.case.sliding_window,
        "attention_chunk_size": batch.case.attention_chunk_size,
        "logits_soft_cap": batch.case.logits_soft_cap,
        "alibi_slopes": batch.alibi_slopes,
        "sinks": batch.sinks,
        "bidirectional_ranges": batch.bidirectional_ranges,
        "k_scale": batch.k_scale,
        "v_scale": batch.v_scale,
    }


def _sequence(case: AttentionCase, request: int, generator: torch.Generator) -> SequenceData:
    def normal(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, case.head_size, generator=generator)

    length = case.seq_lens[request]
    sequence = SequenceData(
        q_NHD=normal(case.query_lens[request], case.num_heads),
        k_LKD=normal(length, case.num_kv_heads),
        v_LKD=normal(length, case.num_kv_heads),
    )
    apply_probe(case, sequence)
    return sequence


def _write_pages(
    case: AttentionCase,
    plan: PagePlan,
    sequences: list[SequenceData],
    cache: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Into ``cache``, in place; the new tokens too unless the case leaves them to the test."""
    held, lengths = [], case.seq_lens if case.new_tokens_written else case.context_lens
    slots: list[int] = []
    for request, length in enumerate(max(length, 0) for length in lengths):
        slots += plan.slots(request, 0, length, case.block_size)
        held.append([x[:length].to(case.dtype) for x in (sequences[request].k_LKD, sequences[request].v_LKD)])
    if slots:
        key, value = (torch.cat(sides) for sides in zip(*held, strict=True))
        cache.copy_(reference_kv_cache_update(key, value, cache, torch.tensor(slots), *scales))


def _token_tensors(
    case: AttentionCase,
    sequences: list[SequenceData],
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of all new tokens, NaN on padding, views of two buffers if strided."""
    heads, kv_heads = case.num_heads, case.num_kv_heads
    fused, other = (
        torch.full((case.num_tokens, width, case.head_size), torch.nan, dtype=case.dtype)
        for width in (kv_heads + heads, kv_heads + 1)
    )
    key, query, value = fused[:, :kv_heads], fused[:, kv_heads:], other[:, :kv_heads]
    start = 0
    for query_len, sequence in zip(case.query_lens, sequences, strict=True):
        rows = slice(start, start + query_len)
        query[rows] = sequence.q_NHD.to(case.dtype)
        for target, x_LKD, scale in (
            (key, sequence.k_LKD, scales[0]),
            (value, sequence.v_LKD, scales[1]),
        ):
            new = _new_tokens(case, x_LKD, query_len, scale)
            target[rows.stop - new.shape[0] : rows.stop] = new
        start += query_len
    if case.strided_tensors:
        return query, key, value
    return query.contiguous(), key.contiguous(), value.contiguous()


def _new_tokens(case: AttentionCase, x_LKD: Tensor, query_len: int, scale: Tensor | None) -> Tensor:
    """The last ``query_len`` tokens (fewer if the sequence is shorter) as the model gives them."""
    new = x_LKD[max(x_LKD.shape[0] - query_len, 0) :].to(case.dtype)
    if case.raw_new_tokens:
        return new
    stored = store_in_format(new, case.cache_dtype, scale).to(torch.float32)
    return (stored if scale is None else stored * scale.reshape(-1, 1)).to(case.dtype)


def _poisoned_outputs(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor | None]:
    before, around = (1, 2) if case.strided_tensors else (0, 0)
    shape = (case.num_tokens, case.num_heads + around, case.head_size)
    output = torch.full(shape, torch.nan, dtype=case.dtype, device=device)
    lse = torch.full(shape[:2], torch.nan, device=device) if case.lse else None
    own = slice(before, before + case.num_heads)
    return output[:, own], None if lse is None else lse[:, : case.num_heads]


def _block_table(case: AttentionCase, plan: PagePlan) -> Tensor:
    """Of a strided case, columns of a wider table, as the first of an engine's buffer are."""
    table_RW = plan.block_table(case.num_rows)
    if not case.strided_tensors:
        return table_RW
    wider_RW = torch.full((case.num_rows, table_RW.shape[1] + 5), plan.spare, dtype=torch.int32)
    wider_RW[:, : table_RW.shape[1]] = table_RW
    return wider_RW[:, : table_RW.shape[1]]


def _alibi_slopes(case: AttentionCase) -> Tensor | None:
    """Geometric slopes from 2**(-8/H) to 2**-8, as in the ALiBi paper (arXiv 2108.12409)."""
    if not case.use_alibi:
        return None
    heads = torch.arange(1, case.num_heads + 1, dtype=torch.float32)
    return torch.exp2(-8.0 * heads / case.num_heads)


def _sinks(case: AttentionCase, generator: torch.Generator) -> Tensor | None:
    """About as heavy as the keys of an average request together; lighter ones change no output."""
    if not case.use_sinks:
        return None
    keys = sum(case.seq_lens) / max(len(case.seq_lens), 1)
    keys = max(1.0, keys if case.sliding_window is None else min(keys, case.sliding_window))
    sinks_H = torch.randn(case.num_heads, generator=generator) + math.log(keys)
    return sinks_H.to(case.dtype) if case.narrow_sinks else sinks_H


def _ranges(case: AttentionCase, device: torch.device) -> Tensor | None:
    """int32 [R, G, 2]; empty ranges fill the rest."""
    if case.bidirectional_ranges is None:
        return None
    most = max(2, *(len(ranges) for ranges in case.bidirectional_ranges))
    ranges_RG2 = torch.tensor([0, 0], dtype=torch.int32).repeat(case.num_rows, most, 1)
    for row, ranges in enumerate(case.bidirectional_ranges):
        for place, (start, end) in enumerate(ranges):
            ranges_RG2[row, place] = torch.tensor([start, end])
    return ranges_RG2.to(device)


def _scale_tensor(scale: float | tuple[float, ...] | None) -> Tensor | None:
    if scale is None:
        return None
    return torch.tensor(scale if isinstance(scale, tuple) else (scale,), dtype=torch.float32)


def _to_device_as_is(x: Tensor, device: torch.device) -> Tensor:
    """To ``device`` with the same strides and base: plain ``.to`` makes views contiguous."""
    if device.type == "cpu":
        return x
    base = x if x._base is None else x._base
    return base.to(device).as_strided(x.size(), x.stride(), x.storage_offset())
