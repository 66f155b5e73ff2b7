"""Batches of latent attention's arguments, laid out so that faults show; see `attnbackend.testing.batches`.

Shape suffixes: T tokens, N tokens of a request, J its keys, H heads, L kv_lora_rank, R qk_rope_head_dim,
P qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.testing.mla_cases import MLACase
from attnbackend.testing.paging import PagePlan, batch_metadata, plan_pages
from attnbackend.testing.reference_mla import (
    LatentAttention,
    LatentRequest,
    latent_rows,
    plain_torch_mla,
    reference_mla,
    store_rows,
)

__all__ = [
    "MLABatch",
    "absorbed_mixed",
    "expected_mixed",
    "expected_mla_cache",
    "expected_mqa",
    "make_mla_batch",
    "mixed_arguments",
    "mqa_arguments",
    "update_arguments",
]


@dataclass(frozen=True)
class MLABatch:
    """Every tensor argument of the ops of latent attention over a cache."""

    case: MLACase
    query: Tensor
    """[T, H, P + R]."""
    query_latent: Tensor
    """[T, H, L], the first part of ``query`` absorbed in float64 and rounded."""
    query_rope: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_b_weight: Tensor
    """[H, P + V, L]."""
    kv_cache: Tensor
    """Logical [B, S, W], a view of ``kv_buffer``."""
    kv_buffer: Tensor
    """Logical [B, layers, S, W]; all but the layer under test is poison and must stay so."""
    output: Tensor
    """[T, H, V] of `mla_mixed_attention`, NaN."""
    latent_output: Tensor
    """[T, H, L] of `mla_attention`, NaN."""
    lse: Tensor | None
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    topk_indices: Tensor | None

    def poison_outputs(self) -> None:
        """NaN in what the ops write, before another call with the same batch."""
        for x in (self.output, self.latent_output, self.lse):
            if x is not None:
                x.fill_(torch.nan)


def mqa_arguments(batch: MLABatch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of `mla_attention` and of every ``forward_mqa``."""
    positional = (
        batch.query_latent, batch.query_rope, batch.kv_cache, batch.latent_output, batch.query_start_loc,
        batch.seq_lens, batch.block_table,
    )  # fmt: skip
    own = {"lse": batch.lse, "topk_indices": batch.topk_indices, "scale": batch.case.softmax_scale}
    return positional, own | _cache_arguments(batch)


def mixed_arguments(batch: MLABatch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Those of `mla_mixed_attention` and of every ``forward_mixed``."""
    positional = (
        batch.query, batch.kv_c, batch.k_pe, batch.kv_cache, batch.kv_b_weight, batch.output,
        batch.query_start_loc, batch.seq_lens, batch.block_table,
    )  # fmt: skip
    return positional, {"scale": batch.case.softmax_scale} | _cache_arguments(batch)


def update_arguments(batch: MLABatch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Those of `mla_kv_cache_update`."""
    return (batch.kv_c, batch.k_pe, batch.kv_cache, batch.slot_mapping), _cache_arguments(batch)


def _cache_arguments(batch: MLABatch) -> dict[str, Any]:
    return {"k_scale": batch.k_scale, "kv_cache_dtype": batch.case.kv_cache_dtype}


def expected_mqa(batch: MLABatch, attend: LatentAttention = reference_mla) -> tuple[Tensor, Tensor]:
    """Latent output [T, H, L] and LSE [T, H] with the new tokens in the cache, on the CPU."""
    topk = None if batch.topk_indices is None else batch.topk_indices.cpu()
    return attend.mqa(
        batch.query_latent.cpu(), batch.query_rope.cpu(), _requests(batch), scale=batch.case.softmax_scale,
        topk_indices=topk,
    )  # fmt: skip


def expected_mixed(batch: MLABatch, attend: LatentAttention = reference_mla) -> Tensor:
    """Output [T, H, V] of queries in the space of heads, with the new tokens in the cache, on the CPU."""
    case, query, weight = batch.case, batch.query.cpu(), batch.kv_b_weight.cpu()
    return attend.whole(
        query, weight, _requests(batch), v_head_dim=case.v_head_dim, scale=case.softmax_scale
    )[0]


def absorbed_mixed(batch: MLABatch) -> Tensor:
    """Output [T, H, V] by plain arithmetic in the latent space, products rounded to the query's type."""
    case, weight = batch.case, batch.kv_b_weight.cpu()
    query = batch.query.cpu()
    nope, rope = query.split((case.qk_nope_head_dim, case.qk_rope_head_dim), dim=-1)
    latent = torch.stack([nope[:, h] @ weight[h, : nope.shape[-1]] for h in range(case.num_heads)], 1)
    out, _ = plain_torch_mla.mqa(latent, rope, _requests(batch), scale=case.softmax_scale)
    return torch.stack([out[:, h] @ weight[h, nope.shape[-1] :].t() for h in range(case.num_heads)], 1)


def expected_mla_cache(batch: MLABatch) -> Tensor:
    """What the batch's cache must hold, bit for bit, once its new tokens are written."""
    case = batch.case
    updated = batch.kv_cache.cpu().clone(memory_format=torch.contiguous_format)
    stored = store_rows(
        batch.kv_c.cpu(), batch.k_pe.cpu(), case.kv_cache_dtype, case.cache_dtype, case.k_scale
    )
    raw = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
    target = updated.view(torch.uint8) if updated.dtype.itemsize == 1 else updated
    for token, slot in enumerate(batch.slot_mapping.tolist()):
        if slot >= 0:
            target[slot // case.block_size, slot % case.block_size] = raw[token]
    return updated


def _requests(batch: MLABatch) -> list[LatentRequest]:
    """The requests that have both a query and a key."""
    case, cache = batch.case, expected_mla_cache(batch)
    starts, requests = batch.query_start_loc.tolist(), []
    for row, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[row], starts[row + 1])
        if rows.start == rows.stop or length == 0:
            continue
        blocks = batch.block_table[row, : -(-length // case.block_size)].tolist()
        held = latent_rows(cache, blocks, length, case.kv_lora_rank, case.kv_cache_dtype, case.k_scale)
        requests.append(LatentRequest(rows, *held))
    return requests


def make_mla_batch(case: MLACase, device: torch.device | str = "cpu") -> MLABatch:
    """All arguments of the ops of latent attention for ``case``, on ``device``; data is made on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    plan = plan_pages(case, generator)
    buffer = _poisoned_buffer(case, plan.num_blocks)
    layer = case.num_layers // 2
    query, kv_c, k_pe = _tokens(case, plan, buffer[:, layer], generator)
    rows = case.qk_nope_head_dim + case.v_head_dim
    weight = torch.randn(case.num_heads, rows, case.kv_lora_rank, generator=generator)
    weight = (weight * case.kv_lora_rank**-0.5).to(case.dtype)
    nope, rope = query.split((case.qk_nope_head_dim, case.qk_rope_head_dim), dim=-1)
    latent = torch.einsum("thp,hpl->thl", nope.double(), weight[:, : case.qk_nope_head_dim].double())
    joined = torch.cat([latent.to(case.dtype), rope], -1)
    query_latent, query_rope = joined.split((case.kv_lora_rank, case.qk_rope_head_dim), dim=-1)
    kv_c, k_pe, query_latent, query_rope = (
        x if case.strided_tensors else x.contiguous() for x in (kv_c, k_pe, query_latent, query_rope)
    )
    k_scale = None if case.k_scale is None else torch.tensor([case.k_scale], dtype=torch.float32)
    buffer = _as_is(buffer, device)
    latent_output, lse = _poisoned(case, case.kv_lora_rank, device)
    output, _ = _poisoned(case, case.v_head_dim, device)
    tokens = {
        "query": query,
        "query_latent": query_latent,
        "query_rope": query_rope,
        "kv_c": kv_c,
        "k_pe": k_pe,
    }
    return MLABatch(
        case=case, kv_buffer=buffer, kv_cache=buffer[:, layer], output=output,
        latent_output=latent_output, lse=lse if case.lse else None,
        block_table=plan.block_table(case.num_rows).to(device), k_scale=_to(k_scale, device),
        topk_indices=_to(_topk(case, generator), device), kv_b_weight=weight.to(device),
        **{name: _as_is(x, device) for name, x in tokens.items()},
        **{name: x.to(device) for name, x in batch_metadata(case, plan).items()},
    )  # fmt: skip


def _tokens(
    case: MLACase, plan: PagePlan, cache: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents and rotated keys of the new tokens, NaN on padding; the cache is filled on the way."""
    query = torch.full((case.num_tokens, case.num_heads, case.qk_head_dim), torch.nan, dtype=case.dtype)
    rows = torch.full((case.num_tokens, case.head_size), torch.nan, dtype=case.dtype)
    start = 0
    for request, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        real = torch.randn(length, case.head_size, generator=generator)
        if case.low_logits:
            real[:, case.kv_lora_rank] = -200.0 / (32.0 * case.softmax_scale)
        held = _fill(case, plan, request, real.to(case.dtype), cache)
        stop = start + new
        query[start:stop] = torch.randn(new, case.num_heads, case.qk_head_dim, generator=generator)
        if case.low_logits:
            query[start:stop, :, case.qk_nope_head_dim] = 32.0
        own = held[max(length - new, 0) :]
        rows[stop - len(own) : stop] = own
        start = stop
    kv_c, k_pe = rows.split((case.kv_lora_rank, case.qk_rope_head_dim), dim=-1)
    return query, kv_c, k_pe


def _fill(case: MLACase, plan: PagePlan, request: int, real: Tensor, cache: Tensor) -> Tensor:
    """Writes a request's rows to its pages; gives back what the cache holds of them, in the model's type."""
    latent, rope = real.split((case.kv_lora_rank, case.qk_rope_head_dim), dim=-1)
    stored = store_rows(latent, rope, case.kv_cache_dtype, case.cache_dtype, case.k_scale)
    held = latent_rows(
        stored.unsqueeze(0), [0], len(stored), case.kv_lora_rank, case.kv_cache_dtype, case.k_scale
    )
    context = max(case.context_lens[request], 0)
    written = len(real) if case.new_tokens_written else context
    raw, target = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (stored, cache))
    for position, slot in enumerate(plan.slots(request, 0, written, case.block_size)):
        target[slot // case.block_size, slot % case.block_size] = raw[position]
    return torch.cat(held, -1).to(case.dtype)


def _poisoned_buffer(case: MLACase, num_blocks: int) -> Tensor:
    width = 656 if case.kv_cache_dtype == "fp8_ds_mla" else case.head_size
    shape = (num_blocks, case.num_layers, case.block_size, width)
    if case.cache_dtype is torch.uint8:
        return torch.full(shape, 0xFF, dtype=torch.uint8)  # NaN as e4m3, as float32 and as bfloat16.
    return torch.full(shape, torch.nan).to(case.cache_dtype)


def _poisoned(case: MLACase, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    extra = int(case.strided_tensors)
    shape = (case.num_tokens, case.num_heads + extra, width)
    output = torch.full(shape, torch.nan, dtype=case.dtype, device=device)
    lse = torch.full(shape[:2], torch.nan, device=device)
    return output[:, : case.num_heads], lse[:, : case.num_heads]


def _topk(case: MLACase, generator: torch.Generator) -> Tensor | None:
    """int32 [T, N]: keys up to the query's own, keys behind it, and -1, in random order; of three tokens
    and more the first with two keys selects none, and all others at least one that they may see."""
    if case.top_k is None:
        return None
    rows, some = [], sum(case.query_lens) < 3
    for new, length in zip(case.query_lens, case.seq_lens, strict=True):
        for own in range(length - new, length):
            keys = torch.randperm(max(length, 1), generator=generator)[: case.top_k]
            left_out = torch.rand(len(keys), generator=generator) < 0.25
            keys = torch.where((keys < length) & ~left_out, keys, -1)
            if own >= 0 and not bool(((keys >= 0) & (keys <= own)).any()):
                keys[0] = own
            if own > 0 and not some:
                keys, some = torch.full_like(keys, -1), True
            rows.append(torch.cat([keys, keys.new_full((case.top_k - len(keys),), -1)]))
    rows += [torch.full((case.top_k,), -1)] * case.num_padded_tokens
    return torch.stack(rows).int()


def _to(x: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if x is None else x.to(device)


def _as_is(x: Tensor, device: torch.device | str) -> Tensor:
    """To ``device`` with the same strides and base."""
    if torch.device(device).type == "cpu":
        return x
    base = x if x._base is None else x._base
    return base.to(device).as_strided(x.size(), x.stride(), x.storage_offset())
