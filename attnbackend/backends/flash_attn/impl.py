"""`FLASH_ATTN`, layer by layer: one call of the library, and one pass over what it leaves to do.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.flash_attn.call import Descales, FlashCall, Layer, window_of
from attnbackend.backends.flash_attn.planning import FlashAttentionMetadata, layer_of
from attnbackend.backends.flash_attn.probe import (
    empty_rows_are_written,
    new_tokens_are_read,
    sinks_are_native,
)
from attnbackend.backends.flash_attn.providers import Provider
from attnbackend.backends.flash_attn.resolution import provider_for
from attnbackend.backends.query_scale import scaled_query
from attnbackend.backends.triton_writer import TritonWriterImpl
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.native_calls import Argument, amounts_to
from attnbackend.ops.library_calls import serve_library_calls

__all__ = ["FlashAttentionImpl"]

_CONTIGUOUS_FROM = 256
"""Tokens from which prompts' own keys are read in the place of pages; chosen without a measurement."""


class _Route:
    """The provider of a layer and what was found about it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.provider: Provider = provider_for(layer)
        self.writes_empty_rows = empty_rows_are_written(self.provider, layer)

    @cached_property
    def has_sinks(self) -> bool:
        return sinks_are_native(self.provider, self.layer)

    @cached_property
    def reads_new_tokens(self) -> bool:
        return new_tokens_are_read(self.provider, self.layer)


class FlashAttentionImpl(TritonWriterImpl):
    keeps_to_its_stream = True

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        self._window = window_of(params.sliding_window, params.causal)
        self._routes: dict[bool, _Route] = {}
        self._ones: Tensor | None = None
        self._is_fp8 = self.takes_quantized_query = params.kv_cache_dtype.startswith("fp8")
        if params.device_type == "cuda":
            serve_library_calls("FLASH_ATTN", "cuda")

    def route(self, *, alibi: bool) -> _Route:
        """How calls of this layer are served, found on the first one."""
        found = self._routes.get(alibi)
        if found is None:
            found = self._routes[alibi] = _Route(layer_of(self.params, alibi=alibi))
        return found

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        route = self.route(alibi=tensors.alibi_slopes is not None)
        call = self._call(route, query, kv_cache, attn_metadata, output, tensors)
        if attn_metadata.facts.are_new_sequences and key is not None and value is not None:
            call = self._over_new_tokens(route, call, key, value, attn_metadata)
        if self._is_fp8 and output.dtype is not torch.bfloat16:
            call = call._replace(output=torch.empty_like(output, dtype=torch.bfloat16))
        lse = route.provider.attend(call)
        if call.output is not output:
            output.copy_(call.output)
        more = self._finish(route, output, lse, attn_metadata, tensors, native_sinks=call.sinks is not None)
        plain = not self._is_fp8 and tensors.k_scale is None
        if plain and not more and type(self) is FlashAttentionImpl:  # another class may do more
            amounts_to(lambda: route.provider.op_call(_in_arguments(call)), query, output)

    def _call(
        self, route: _Route, query: Tensor, kv_cache: Tensor, plan: FlashAttentionMetadata, output: Tensor,
        tensors: OptionalTensors,
    ) -> FlashCall:  # fmt: skip
        batch, bounds, provider, params = plan.common, plan.bounds, route.provider, self.params
        descales = None
        if self._is_fp8:
            query, descales = self._quantized(query, batch.seq_lens.shape[0], tensors)
        else:
            query = scaled_query(query, tensors.k_scale)
        key_cache, value_cache = kv_cache.unbind(1)
        sinks = tensors.sinks
        # A query that sees no key has an LSE that kernels do not give: with an LSE, sinks are added after.
        if sinks is not None and (
            sinks.dtype is not torch.bfloat16 or tensors.lse is not None or not route.has_sinks
        ):
            sinks = None
        return FlashCall(
            query, key_cache, value_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
            bounds.max_query_len, bounds.max_seq_len, params.scale, params.causal, self._window,
            params.logits_soft_cap, tensors.alibi_slopes, sinks, descales,
            plan.schedule if plan.provider is provider else None,
            bounds.num_splits if provider.splits else 0,
        )  # fmt: skip

    def _quantized(self, query: Tensor, rows: int, tensors: OptionalTensors) -> tuple[Tensor, Descales]:
        """The query in float8, as the kernels for float8 caches take it, and the scales of the cache."""
        from attnbackend.kernels import triton

        shape = (rows, self.params.num_kv_heads)
        k_scale, v_scale = (self._one(query) if s is None else s for s in (tensors.k_scale, tensors.v_scale))
        is_stored = query.dtype is torch.float8_e4m3fn
        stored = query if is_stored else triton.round_queries(query)
        return stored, Descales(None, k_scale.expand(shape), v_scale.expand(shape))

    def _one(self, query: Tensor) -> Tensor:
        """float32 [1], kept: to fill it is a kernel more."""
        if self._ones is not None and self._ones.device == query.device:
            return self._ones
        made = query.new_ones(1, dtype=torch.float32)
        if not (made.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._ones = made
        return made

    def _over_new_tokens(
        self, route: _Route, call: FlashCall, key: Tensor, value: Tensor, plan: FlashAttentionMetadata
    ) -> FlashCall:
        """Prompts without context: keys lie in a row as queries do, and no page table is needed."""
        tokens = call.query.shape[0]
        fits = _CONTIGUOUS_FROM <= tokens == plan.facts.covered_tokens and call.sinks is None
        if not (fits and route.reads_new_tokens):
            return call
        return call._replace(key=key, value=value, block_table=None, schedule=None, num_splits=0)

    def _finish(
        self, route: _Route, output: Tensor, lse: Tensor | None, plan: FlashAttentionMetadata,
        tensors: OptionalTensors, *, native_sinks: bool,
    ) -> bool:  # fmt: skip
        """Whether there was something to do."""
        sinks = None if native_sinks else tensors.sinks
        facts = plan.facts
        unwritten = output.shape[0] > facts.covered_tokens or (
            facts.may_see_no_key and (native_sinks or not route.writes_empty_rows)
        )
        v_scale = None if self._is_fp8 else tensors.v_scale
        if not unwritten and sinks is None and tensors.lse is None and v_scale is None:
            return False
        from attnbackend.kernels import triton

        triton.finish_attention(
            output, lse, tensors.lse, plan.common.query_start_loc, plan.common.seq_lens,
            causal=self.params.causal, sinks=sinks, v_scale=v_scale,
        )  # fmt: skip
        return True


_OF_TOKENS: dict[str, Any] = {
    name: Argument(name) for name in ("query", "key", "value", "output", "query_start_loc", "seq_lens")
}
_OF_PAGES: dict[str, Any] = {
    **_OF_TOKENS, "key": Argument("kv_cache", 0), "value": Argument("kv_cache", 1),
    "block_table": Argument("block_table"),
}  # fmt: skip


def _in_arguments(call: FlashCall) -> FlashCall:
    """A call that left nothing to do before or after it, in terms of our op's arguments."""
    call = call._replace(**(_OF_TOKENS if call.block_table is None else _OF_PAGES))
    sinks: Any = Argument("sinks")
    return call if call.sinks is None else call._replace(sinks=sinks)
