"""The plan of a step: bounds, splits, and what the schedule of FlashAttention 3 is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbackend.backends.flash_attn.call import Layer, ScheduleRequest, window_of
from attnbackend.backends.flash_attn.providers import Provider
from attnbackend.backends.flash_attn.resolution import NoProviderError, provider_for
from attnbackend.backends.host_lengths import BatchFacts, with_host_lengths
from attnbackend.config import choices_now
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import AttentionSpec, KVCacheSpec, resolve_kv_cache_dtype
from attnbackend.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnbackend.types import AttentionCGSupport

__all__ = [
    "Bounds",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "layer_of",
    "most_splits",
]

_MAX_SPLITS, _SPLIT_PROGRAMS = 32, 128
"""Most splits of a request's keys: as many programs as fill a GPU where few requests have few heads."""
_SPLIT_TOKENS = 512
"""Batches of more tokens fill a GPU without splitting keys, unless their heads are few."""
_SPLIT_BYTES = 512 << 20
"""Most memory of partial results, float32, that a call may take for its splits."""
_SHORT_KEYS, _FULL_PROGRAMS = 1024, 106
"""Requests as short as this are not split where rows times key-value heads are as many: unequal lengths leave
little idle there, and kernels of FlashAttention 3 that may split take longer though they do not."""
_TILE_ROWS = 128
"""Query tokens of one head that a kernel takes at once from prompts."""
_MIXED_US, _MIXED_GROUP = 32.0, 4
"""Microseconds of a mixed batch up to which one call is faster than two, where as many query heads share a
key-value head: with fewer, tiles of single tokens are mostly empty. Measured on an H200."""
_LONG_MIXED_US = {256: 200.0}
"""Head size -> the same, where it is more."""
_READ_IN_US, _FLOPS_IN_US = 4.5e6, 6e8
"""What an H200 reads and multiplies in a microsecond, at the best."""
_SCHEDULE_ROWS = 992
"""Rows that the scheduler of FlashAttention 3 counts splits for one by one; with more it does not."""


class Bounds(NamedTuple):
    """The whole numbers that a kernel is called with, which a graph keeps from its capture."""

    max_query_len: int
    max_seq_len: int
    num_splits: int


@dataclass(frozen=True, kw_only=True)
class FlashAttentionMetadata(AttentionMetadata):
    bounds: Bounds
    facts: BatchFacts
    provider: Provider | None
    """Whose schedule this is: the provider of layers without alibi; None without a schedule."""
    schedule: Tensor | None
    """FlashAttention 3: where each request's tiles and splits lie, made once a step for all layers."""


def layer_of(params: AttentionParams, *, alibi: bool) -> Layer:
    """What decides about providers, from a layer's parameters."""
    kv_dtype = resolve_kv_cache_dtype(params.kv_cache_dtype, params.dtype)
    return Layer.of(params, kv_dtype=kv_dtype, alibi=alibi, clean_pages=params.clean_pages)


def most_splits(
    tokens: int, num_heads: int, head_size: int, *, rows: int = 0, programs: int = 8, max_seq_len: int
) -> int:  # fmt: skip
    """Parts that the keys of one request may be split in, from what partial results may take.

    Of the lengths only their bound enters: within it, the kernel decides request by request on the device, so
    a graph splits as the replayed batch wants. `programs` are rows times key-value heads.
    """
    full, short = tokens * num_heads >= _FULL_PROGRAMS * _TILE_ROWS, max_seq_len <= _SHORT_KEYS
    prompts_fill = full and 0 < rows * _TILE_ROWS <= tokens
    if prompts_fill or (tokens > _SPLIT_TOKENS and (full or short)) or (programs >= _FULL_PROGRAMS and short):
        return 1
    rounded = 1 << max(0, math.ceil(math.log2(max(1, tokens))))
    most = max(_MAX_SPLITS, _SPLIT_PROGRAMS // max(1, programs))
    return max(1, min(most, _SPLIT_BYTES // (rounded * num_heads * head_size * 4)))


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Host work of a step, in which nothing waits for the device.

    A builder without limits, of an op that plans for itself, copies the lengths to the host instead, unless a
    graph is being captured.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captured: dict[int, list[Bounds]] = {}
        self._captured_tokens: dict[int, int] = {}
        self._schedules: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self._chosen: tuple[Any, ...] = ()
        self._scheduler: Provider | None = None

    @classmethod
    def get_cudagraph_support(cls, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """By the version that serves such layers without alibi: 3 takes any batch, others uniform ones."""
        assert isinstance(kv_cache_spec, AttentionSpec)
        layer = Layer(
            dtype=kv_cache_spec.dtype, kv_dtype=kv_cache_spec.cache_dtype, group=1,
            head_size=kv_cache_spec.head_size, block_size=kv_cache_spec.block_size,
        )  # fmt: skip
        try:
            version = provider_for(layer).version
        except NoProviderError:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.ALWAYS if version == 3 else AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:  # fmt: skip
        common = common_attn_metadata
        if self.limits is None:
            common = with_host_lengths(common)
        facts, bounds = BatchFacts.of(common, causal=self.params.causal), self._captured_bounds(common)
        if bounds is None:
            return self._plan(common, self._bounds(common), facts, scheduled=not fast_build)
        facts = replace(facts, are_new_sequences=False)  # The graph reads pages, whatever the batch.
        return self._plan(common, bounds, facts, scheduled=not fast_build)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Also remembers the bounds: later plans for as many rows keep to them, as the graph does."""
        common = common_attn_metadata
        longest = common.max_seq_len if self.limits is None else self.limits.max_model_len
        common = common.replace(max_seq_len=max(longest, common.max_seq_len))
        bounds = self._bounds(common)
        taken = self._captured.setdefault(common.seq_lens.shape[0], [])
        if taken:
            bounds = bounds._replace(num_splits=taken[0].num_splits)
        rows, tokens = common.seq_lens.shape[0], common.num_actual_tokens
        self._captured[rows] = sorted({*taken, bounds})
        self._captured_tokens[rows] = max(tokens, self._captured_tokens.get(rows, 0))
        return self._plan(common, bounds, BatchFacts.of_capture(common), scheduled=True)

    def leads_on_mixed(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Where the batch takes version 3 so little time that a second call would cost more than it saves."""
        p, common = self.params, common_attn_metadata
        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if starts is None or lens is None or p.num_heads < _MIXED_GROUP * p.num_kv_heads:
            return False
        keys = lens.long()
        item = resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype).itemsize
        read = 2 * int(keys.sum()) * p.num_kv_heads * p.head_size * item
        flops = 4 * int((starts.diff() * keys).sum()) * p.num_heads * p.head_size
        took_us = read / _READ_IN_US + flops / _FLOPS_IN_US
        return took_us < _LONG_MIXED_US.get(p.head_size, _MIXED_US) and self._scheduler_now() is not None

    def _bounds(self, common: CommonAttentionMetadata) -> Bounds:
        p = self.params
        splits = most_splits(
            common.num_actual_tokens, p.num_heads, p.head_size, max_seq_len=common.max_seq_len,
            rows=common.seq_lens.shape[0], programs=common.seq_lens.shape[0] * p.num_kv_heads,
        )  # fmt: skip
        return Bounds(max(1, common.max_query_len), max(1, common.max_seq_len), splits)

    def _captured_bounds(self, common: CommonAttentionMetadata) -> Bounds | None:
        """Those of the smallest graph of as many rows that the batch fits in."""
        rows = common.seq_lens.shape[0]
        if common.num_actual_tokens > self._captured_tokens.get(rows, 0):
            return None
        taken = self._captured.get(rows, ())
        asked = (common.max_query_len, common.max_seq_len)
        fits = (b for b in taken if b.max_query_len >= asked[0] and b.max_seq_len >= asked[1])
        return next(fits, None)

    def _plan(
        self, common: CommonAttentionMetadata, bounds: Bounds, facts: BatchFacts, *, scheduled: bool
    ) -> FlashAttentionMetadata:
        provider = self._scheduling_provider(common) if scheduled else None
        schedule = None if provider is None else self._schedule(provider, common, bounds)
        return FlashAttentionMetadata(
            common=common, bounds=bounds, facts=facts, provider=provider, schedule=schedule
        )

    def _scheduling_provider(self, common: CommonAttentionMetadata) -> Provider | None:
        if self.limits is None or common.seq_lens.shape[0] > _SCHEDULE_ROWS:
            return None
        return self._scheduler_now()

    def _scheduler_now(self) -> Provider | None:
        """What serves the layers, if it is version 3."""
        chosen = choices_now()
        if self._chosen != chosen:
            self._chosen, self._scheduler = chosen, self._first_provider()
        return self._scheduler

    def _first_provider(self) -> Provider | None:
        try:
            provider = provider_for(layer_of(self.params, alibi=False))
        except NoProviderError:
            return None
        return provider if provider.schedules else None

    def _schedule(self, provider: Provider, common: CommonAttentionMetadata, bounds: Bounds) -> Tensor:
        p = self.params
        kv_dtype = resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype)
        made = provider.schedule(
            ScheduleRequest(
                common.query_start_loc, common.seq_lens, bounds.max_query_len, bounds.max_seq_len,
                p.num_heads, p.num_kv_heads, p.head_size, kv_dtype, p.block_size, p.causal,
                window_of(p.sliding_window, p.causal), p.logits_soft_cap, bounds.num_splits,
            )
        )  # fmt: skip
        return self._kept(made)

    def _kept(self, made: Tensor) -> Tensor:
        """The schedule in a buffer that stays where it is; what is behind it must be zero for the kernel."""
        assert self.limits is not None
        size = made.numel()
        buffer = self._schedules.get(made.dtype)
        if buffer is None or buffer.numel() < size:
            most = 1 + -(-self.limits.max_num_seqs // 4) * 16
            buffer = self._schedules[made.dtype] = made.new_zeros(max(most, size))
            self._used[made.dtype] = 0
        buffer[:size].copy_(made)
        if self._used[made.dtype] > size:
            buffer[size : self._used[made.dtype]].zero_()
        self._used[made.dtype] = size
        return buffer[:size]
