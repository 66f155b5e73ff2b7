"""From a call's arguments to the implementation that runs it.

Everything that does not depend on the number of tokens is checked and resolved once for each distinct
signature; a call then costs a dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend, KVCacheDims
from attnbackend.config import debug_checks_enabled, forced_backend, library_choices
from attnbackend.forward_context import get_forward_context
from attnbackend.impl import AttentionImpl, AttentionParams, OptionalTensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.ops import checks
from attnbackend.ops.argument_checks import wants_grad
from attnbackend.ops.binding import (
    LN_2,
    choose_backend,
    remember,
    rows_of,
    typed_cache,
    vector_of,
    whole_of,
)
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall
from attnbackend.ops.recent import RecentCalls
from attnbackend.ops.redirect import redirected_reader, redirected_writer
from attnbackend.registry import registry_generation, resolve_backend
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import AttentionType, LSEBase

__all__ = [
    "attention_config",
    "cache_dims",
    "check_attention_call",
    "check_update_call",
    "run_attention",
    "run_update",
    "update_config",
]


@dataclass(frozen=True)
class _BoundAttention:
    """An implementation that fits a signature, with a builder for calls that no plan covers."""

    name: str
    impl: AttentionImpl
    dims: KVCacheDims
    builder: AttentionMetadataBuilder[Any]
    converts_lse: bool
    choices: tuple[Any, ...] | None
    """Of libraries, as they were when this was bound; None: nothing here depends on them."""

    @property
    def is_stale(self) -> bool:
        return self.choices is not None and self.choices != library_choices()

    def run(self, call: AttentionCall, tensors: OptionalTensors) -> None:
        plan = self._plan(call)
        kv_cache = typed_cache(call.kv_cache, call.kv_cache_dtype)
        self.impl.forward(call.query, call.key, call.value, kv_cache, plan, call.output, tensors)
        if self.converts_lse and call.lse is not None:
            call.lse.mul_(LN_2)

    def _plan(self, call: AttentionCall) -> AttentionMetadata:
        context = get_forward_context()
        if context is not None and call.group >= 0:
            plan = context.plans.get((call.group, self.name))
            if plan is not None and plan.is_for(call.query_start_loc, call.seq_lens, call.block_table):
                return plan
        common = CommonAttentionMetadata.from_tensors(
            call.query_start_loc, call.seq_lens, call.block_table,
            num_tokens=call.query.shape[0], block_size=self.dims.block_size, causal=call.causal,
        )  # fmt: skip
        if AttentionType(call.attn_type).keeps_no_cache:
            common = common.replace(max_seq_len=call.query.shape[0])
        return self.builder.build(0, common)


def _standard_dims(kv_cache: Tensor) -> KVCacheDims:
    """For the agnostic ops, which speak of the standard cache before a backend is chosen."""
    shape = tuple(kv_cache.shape)
    if len(shape) != 5 or shape[1] != 2:
        raise ValueError(
            f"shape of kv_cache is {shape}; expected (num_blocks, 2, block_size, num_kv_heads, head_size), "
            "which the agnostic ops work on; call a backend's own op for another shape"
        )
    return KVCacheDims(shape[0], int(shape[2]), int(shape[3]), int(shape[4]))


def _backend_dims(backend: type[AttentionBackend], kv_cache: Tensor, kv_cache_dtype: str) -> KVCacheDims:
    """Reads a cache's shape as ``backend`` does, and checks that the backend gives that shape back."""
    shape = tuple(kv_cache.shape)
    try:
        dims = KVCacheDims(*backend.parse_kv_cache_shape(shape))
    except (ValueError, IndexError):
        dims = KVCacheDims(1, 0, 1, 0)
    wanted = tuple(backend.get_kv_cache_shape(*dims, kv_cache_dtype)) if dims.block_size else "another rank"
    if wanted != shape:
        raise ValueError(f"shape of kv_cache is {shape}; {backend.get_name()} expects {wanted}")
    return KVCacheDims(dims.num_blocks, *(int(n) for n in dims[1:]))


def attention_config(call: AttentionCall, dims: KVCacheDims | None = None) -> AttentionSelectorConfig:
    """What a call asks of a backend; ``dims`` None: of a standard cache."""
    dims = dims or _standard_dims(call.kv_cache)
    return AttentionSelectorConfig.dense(
        device_type=call.query.device.type, head_size=dims.head_size,
        num_heads=int(call.query.shape[1]), num_kv_heads=dims.num_kv_heads,
        dtype=checks.model_dtype(call), kv_cache_dtype=call.kv_cache_dtype, block_size=dims.block_size,
        attn_type=AttentionType(call.attn_type), causal=call.causal,
        sliding_window=call.sliding_window, attention_chunk_size=call.attention_chunk_size,
        logits_soft_cap=call.logits_soft_cap,
        has_alibi=call.alibi_slopes is not None, has_sinks=call.sinks is not None,
        has_bidirectional_ranges=call.bidirectional_ranges is not None,
        needs_lse=call.lse is not None, has_query_scale=call.q_scale is not None,
        has_quantized_query=call.query.dtype is torch.float8_e4m3fn,
        has_output_scale=call.output_scale is not None,
        has_output_block_scale=call.output_block_scale is not None,
        per_head_quant_scales=_per_head(call.k_scale) or _per_head(call.v_scale),
    )  # fmt: skip


def update_config(call: KVCacheUpdateCall, dims: KVCacheDims | None = None) -> AttentionSelectorConfig:
    """What a write asks of a backend: as a plain layer over the same cache."""
    dims = dims or _standard_dims(call.kv_cache)
    return AttentionSelectorConfig.dense(
        device_type=call.key.device.type, head_size=dims.head_size, num_heads=dims.num_kv_heads,
        num_kv_heads=dims.num_kv_heads, dtype=call.key.dtype, kv_cache_dtype=call.kv_cache_dtype,
        block_size=dims.block_size,
        per_head_quant_scales=_per_head(call.k_scale) or _per_head(call.v_scale),
    )  # fmt: skip


def _per_head(scale: Tensor | None) -> bool:
    return scale is not None and scale.numel() > 1


def _resolve(
    name: str | None, kv_cache: Tensor, kv_cache_dtype: str,
    config_of: Callable[[KVCacheDims], AttentionSelectorConfig],
) -> tuple[type[AttentionBackend], KVCacheDims]:  # fmt: skip
    if name is not None:
        dims = _backend_dims(resolve_backend(name), kv_cache, kv_cache_dtype)
        return choose_backend(name, config_of(dims)), dims
    backend = choose_backend(None, config_of(_standard_dims(kv_cache)))
    return backend, _backend_dims(backend, kv_cache, kv_cache_dtype)


def cache_dims(name: str | None, kv_cache: Tensor, kv_cache_dtype: str) -> KVCacheDims:
    """What a cache's shape says to the named backend; ``name`` None: of a standard cache.

    Raises:
        ValueError: it is no shape of such a cache.
    """
    if name is None:
        return _standard_dims(kv_cache)
    return _backend_dims(resolve_backend(name), kv_cache, kv_cache_dtype)


def check_attention_call(name: str | None, call: AttentionCall) -> tuple[type[AttentionBackend], KVCacheDims]:
    """Everything that running the call would refuse, without running it; ``name`` None: agnostic."""
    checks.check_attention(call, cache_dims(name, call.kv_cache, call.kv_cache_dtype))
    checks.check_attention_tokens(call)
    return _resolve(name, call.kv_cache, call.kv_cache_dtype, lambda dims: attention_config(call, dims))


def check_update_call(
    name: str | None, call: KVCacheUpdateCall
) -> tuple[type[AttentionBackend], KVCacheDims]:
    """As `check_attention_call`, for a cache write."""
    checks.check_update(call, cache_dims(name, call.kv_cache, call.kv_cache_dtype))
    checks.check_update_tokens(call)
    return _resolve(name, call.kv_cache, call.kv_cache_dtype, lambda dims: update_config(call, dims))


def _params(call: AttentionCall, dims: KVCacheDims) -> AttentionParams:
    return AttentionParams(
        num_heads=call.query.shape[1], num_kv_heads=dims.num_kv_heads, head_size=dims.head_size,
        dtype=checks.model_dtype(call), kv_cache_dtype=call.kv_cache_dtype, block_size=dims.block_size,
        device_type=call.query.device.type, scale=call.scale, causal=call.causal,
        sliding_window=call.sliding_window, attention_chunk_size=call.attention_chunk_size,
        logits_soft_cap=call.logits_soft_cap,
        attn_type=AttentionType(call.attn_type),
    )  # fmt: skip


def _bind_attention(name: str | None, call: AttentionCall) -> _BoundAttention:
    backend, dims = check_attention_call(name, call)
    params = _params(call, dims)
    impl = backend.get_impl_cls()(params)
    assert isinstance(impl, AttentionImpl)
    builder = backend.get_builder_cls()(params, spec_of(params), None, call.query.device)
    chooses = name is None or backend.library.__func__ is not AttentionBackend.library.__func__  # type: ignore[attr-defined]
    choices = library_choices() if chooses else None
    is_base_2 = backend.lse_base is LSEBase.TWO
    return _BoundAttention(backend.get_name(), impl, dims, builder, is_base_2, choices)


def _bind_update(name: str | None, call: KVCacheUpdateCall) -> tuple[AttentionImpl, KVCacheDims]:
    backend, dims = check_update_call(name, call)
    params = AttentionParams(
        num_heads=dims.num_kv_heads, num_kv_heads=dims.num_kv_heads, head_size=dims.head_size,
        dtype=call.key.dtype, kv_cache_dtype=call.kv_cache_dtype, block_size=dims.block_size,
        device_type=call.key.device.type, scale=1.0,
    )  # fmt: skip
    impl = backend.get_impl_cls()(params)
    assert isinstance(impl, AttentionImpl)
    return impl, dims


def _attention_signature(c: AttentionCall) -> tuple[Any, ...]:
    return (
        rows_of(c.query), rows_of(c.key), rows_of(c.value), rows_of(c.output), rows_of(c.lse),
        c.kv_cache.shape, c.kv_cache.dtype, c.kv_cache.device, c.kv_cache.stride(-1),
        vector_of(c.query_start_loc), vector_of(c.seq_lens), whole_of(c.block_table),
        c.block_table.stride(-1), c.scale, c.causal, c.sliding_window, c.attention_chunk_size,
        c.logits_soft_cap, vector_of(c.alibi_slopes), vector_of(c.sinks), vector_of(c.bidirectional_ranges),
        whole_of(c.q_scale), vector_of(c.k_scale), vector_of(c.v_scale), whole_of(c.output_scale),
        rows_of(c.output_block_scale), c.kv_cache_dtype, c.attn_type, wants_grad(c),
    )  # fmt: skip


def _update_signature(c: KVCacheUpdateCall) -> tuple[Any, ...]:
    return (
        rows_of(c.key), rows_of(c.value), whole_of(c.kv_cache), c.kv_cache.stride(-1), c.slot_mapping.dtype,
        c.slot_mapping.device, c.slot_mapping.dim(), c.slot_mapping.is_contiguous(), vector_of(c.k_scale),
        vector_of(c.v_scale), c.kv_cache_dtype, wants_grad(c),
    )  # fmt: skip


_ATTENTION: dict[Any, _BoundAttention] = {}
_RECENT: RecentCalls[_BoundAttention] = RecentCalls()
_UPDATE: dict[Any, tuple[AttentionImpl, KVCacheDims]] = {}


def run_attention(name: str | None, call: AttentionCall) -> None:
    """Runs a call on the named backend, or on the one selected for its arguments."""
    name = redirected_reader(name)
    bound = _RECENT.find(name, call)
    if bound is not None:
        bound.run(call, _NO_TENSORS)
        return
    bound = _bound_attention(name, call)
    checks.check_attention_tokens(call)
    if debug_checks_enabled():
        checks.check_rows(call, bound.dims)
    if call.query.shape[0]:
        bound.run(call, _optional_tensors(call))
        if not debug_checks_enabled():
            _RECENT.keep(name, call, bound)


def _bound_attention(name: str | None, call: AttentionCall) -> _BoundAttention:
    chosen_by = forced_backend() if name is None else name
    key = (chosen_by, registry_generation(), _attention_signature(call))
    bound = _ATTENTION.get(key)
    if bound is None or bound.is_stale:
        bound = remember(_ATTENTION, key, _bind_attention(name, call))
    return bound


_NO_TENSORS = OptionalTensors()


def _optional_tensors(call: AttentionCall) -> OptionalTensors:
    return OptionalTensors(
        call.lse, call.alibi_slopes, call.sinks, call.q_scale, call.k_scale, call.v_scale,
        call.output_scale, call.output_block_scale, call.bidirectional_ranges,
    )  # fmt: skip


def run_update(name: str | None, call: KVCacheUpdateCall) -> None:
    """As `run_attention`, for a cache write."""
    name = redirected_writer(name)
    chosen_by = forced_backend() if name is None else name
    key = (chosen_by, registry_generation(), _update_signature(call))
    impl, dims = _UPDATE.get(key) or remember(_UPDATE, key, _bind_update(name, call))
    checks.check_update_tokens(call)
    if debug_checks_enabled():
        checks.check_slots(call, dims)
    if call.key.shape[0]:
        tensors = OptionalTensors(k_scale=call.k_scale, v_scale=call.v_scale)
        kv_cache = typed_cache(call.kv_cache, call.kv_cache_dtype)
        impl.kv_cache_update(call.key, call.value, kv_cache, call.slot_mapping, tensors)
