"""From a call of latent attention to the implementation that runs it; see `attnbackend.ops.bind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from attnbackend.backend import AttentionBackend
from attnbackend.config import debug_checks_enabled, forced_backend, library_choices
from attnbackend.forward_context import get_forward_context
from attnbackend.impl import AttentionParams, MLAAttentionImpl, MLADims, MLATensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata, MLAMetadataBuilder, MLAPrefillMetadata
from attnbackend.ops import mla_checks as checks
from attnbackend.ops.argument_checks import wants_grad
from attnbackend.ops.binding import LN_2, choose_backend, remember, rows_of, typed_cache, vector_of, whole_of
from attnbackend.ops.mla_calls import MLAAttentionCall, MLACacheUpdateCall, MLAMixedCall, MLAPrefillCall
from attnbackend.ops.mla_mixed import attend_mixed
from attnbackend.registry import any_case_name, is_implemented, registry_generation, resolve_backend
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import LSEBase

__all__ = [
    "MLA_STEPS",
    "check_mha_call",
    "check_mixed_call",
    "check_mla_update_call",
    "check_mqa_call",
    "mla_config",
    "run_mha",
    "run_mixed",
    "run_mla_update",
    "run_mqa",
]

Step = MLAAttentionCall | MLAMixedCall
MLA_STEPS = (MLAAttentionCall, MLAMixedCall)
"""Calls that attend to a cache."""


@dataclass(frozen=True)
class _Bound:
    """An implementation that fits a signature, with a builder for calls that no plan covers."""

    name: str
    impl: MLAAttentionImpl
    builder: MLAMetadataBuilder
    lse_factor: float | None
    """What makes the backend's LSE natural; None: it is."""
    choices: tuple[Any, ...]

    def plan(self, call: Step) -> AttentionMetadata | None:
        """The step's, where it was made from the call's own tensors."""
        context = get_forward_context()
        plan = None if context is None or call.group < 0 else context.plans.get((call.group, self.name))
        if plan is not None and plan.is_for(call.query_start_loc, call.seq_lens, call.block_table):
            return plan
        return None

    def run_mqa(self, call: MLAAttentionCall) -> None:
        plan = self.plan(call)
        if isinstance(plan, MLAMetadata) and plan.prefill is None:
            rows = plan.decode
        else:
            rows = self.builder.build_decode(_common(call))
        tensors = MLATensors(call.lse, call.k_scale, call.topk_indices)
        cache = typed_cache(call.kv_cache, call.kv_cache_dtype)
        self.impl.forward_mqa(call.query_latent, call.query_rope, cache, rows, call.output, tensors)
        if self.lse_factor is not None and call.lse is not None:
            call.lse.mul_(self.lse_factor)

    def run_mixed(self, call: MLAMixedCall) -> None:
        plan = self.plan(call) or self.builder.build(0, _common(call))
        assert isinstance(plan, MLAMetadata)
        cache = typed_cache(call.kv_cache, call.kv_cache_dtype)
        attend_mixed(self.impl, plan, call._replace(kv_cache=cache))


def _common(call: Step) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_tensors(
        call.query_start_loc, call.seq_lens, call.block_table,
        num_tokens=call.output.shape[0], block_size=int(call.kv_cache.shape[1]),
    )  # fmt: skip


def _dims(call: Step) -> MLADims:
    if isinstance(call, MLAAttentionCall):
        rank, rope = call.query_latent.shape[2], call.query_rope.shape[2]
        return MLADims(kv_lora_rank=int(rank), qk_rope_head_dim=int(rope))
    rope = int(call.k_pe.shape[1])
    return MLADims(
        kv_lora_rank=int(call.kv_c.shape[1]), qk_rope_head_dim=rope,
        qk_nope_head_dim=int(call.query.shape[2]) - rope, v_head_dim=int(call.output.shape[2]),
    )  # fmt: skip


def mla_config(call: Step | MLACacheUpdateCall) -> AttentionSelectorConfig:
    """What a call asks of a backend; a write asks what a layer of one head over the same cache does."""
    if isinstance(call, MLACacheUpdateCall):
        like, heads, rank, rope = call.kv_c, 1, int(call.kv_c.shape[1]), int(call.k_pe.shape[1])
    else:
        like, dims = call.output, _dims(call)
        heads, rank, rope = int(like.shape[1]), dims.kv_lora_rank, dims.qk_rope_head_dim
    mqa = call if isinstance(call, MLAAttentionCall) else None
    return AttentionSelectorConfig.dense(
        device_type=like.device.type, head_size=rank + rope, num_heads=heads, num_kv_heads=1,
        dtype=like.dtype, kv_cache_dtype=call.kv_cache_dtype, block_size=int(call.kv_cache.shape[1]),
        use_mla=True, kv_lora_rank=rank, use_sparse=mqa is not None and mqa.topk_indices is not None,
        needs_lse=mqa is not None and mqa.lse is not None,
    )  # fmt: skip


def check_mqa_call(name: str | None, call: MLAAttentionCall) -> type[AttentionBackend]:
    """Everything that running the call would refuse, without running it; ``name`` None: agnostic."""
    checks.check_mqa(call)
    checks.check_same_rows(call)
    return choose_backend(name, mla_config(call))


def check_mixed_call(name: str | None, call: MLAMixedCall) -> type[AttentionBackend]:
    """As `check_mqa_call`."""
    checks.check_mixed(call)
    checks.check_same_rows(call)
    return choose_backend(name, mla_config(call))


def check_mla_update_call(name: str | None, call: MLACacheUpdateCall) -> type[AttentionBackend]:
    """As `check_mqa_call`, for a cache write."""
    checks.check_mla_update(call)
    checks.check_same_rows(call)
    config = mla_config(call)
    return choose_backend(name, replace(config, use_sparse=_names_sparse(name)))


def _names_sparse(name: str | None) -> bool:
    """Whether the named or forced backend is sparse: it writes the cache as any other does."""
    forced = forced_backend() if name is None else None
    named = any_case_name(forced.name) if forced is not None else name
    return named is not None and is_implemented(named) and resolve_backend(named).is_sparse


def check_mha_call(name: str, call: MLAPrefillCall) -> type[AttentionBackend]:
    """As `check_mqa_call`; no cache takes part, so only device and type are the backend's own to refuse."""
    checks.check_mha(call)
    checks.check_same_rows(call)
    backend, device_type = resolve_backend(name), call.query.device.type
    if device_type not in backend.supported_device_types or not backend.supports_dtype(call.query.dtype):
        raise ValueError(
            f"backend {name!r} cannot serve this call: {call.query.dtype} on {device_type}; allowed: "
            f"{', '.join(map(str, backend.supported_dtypes))} on {', '.join(backend.supported_device_types)}"
        )
    if reason := backend.unavailable_reason(device_type):
        raise ValueError(f"backend {name!r} cannot serve this call: unavailable: {reason}")
    return backend


def _params(call: Step | MLACacheUpdateCall, dims: MLADims, scale: float) -> AttentionParams:
    like = call.kv_c if isinstance(call, MLACacheUpdateCall) else call.output
    return AttentionParams(
        num_heads=int(like.shape[1]) if like.dim() == 3 else 1, num_kv_heads=1,
        head_size=dims.kv_lora_rank + dims.qk_rope_head_dim, dtype=like.dtype,
        kv_cache_dtype=call.kv_cache_dtype, block_size=int(call.kv_cache.shape[1]),
        device_type=like.device.type, scale=scale, mla=dims,
    )  # fmt: skip


def _impl(backend: type[AttentionBackend], params: AttentionParams) -> MLAAttentionImpl:
    impl = backend.get_impl_cls()(params)
    assert isinstance(impl, MLAAttentionImpl)
    return impl


def _bind(name: str | None, call: Step, check: Callable[..., type[AttentionBackend]]) -> _Bound:
    backend = check(name, call)
    params = _params(call, _dims(call), call.scale)
    builder = backend.get_builder_cls()(params, spec_of(params), None, call.output.device)
    assert isinstance(builder, MLAMetadataBuilder)
    factor = LN_2 if backend.lse_base is LSEBase.TWO else None
    return _Bound(backend.get_name(), _impl(backend, params), builder, factor, library_choices())


def _signature(call: Step) -> tuple[Any, ...]:
    own: tuple[Any, ...]
    if isinstance(call, MLAAttentionCall):
        top_k = rows_of(call.topk_indices)
        own = (rows_of(call.query_latent), rows_of(call.query_rope), rows_of(call.lse), top_k)
    else:
        own = (rows_of(call.query), rows_of(call.kv_c), rows_of(call.k_pe), whole_of(call.kv_b_weight))
    return (
        *own, rows_of(call.output), whole_of(call.kv_cache), call.kv_cache.stride(-1),
        vector_of(call.query_start_loc), vector_of(call.seq_lens), whole_of(call.block_table),
        call.block_table.stride(-1), call.scale, whole_of(call.k_scale), call.kv_cache_dtype,
        wants_grad(call),
    )  # fmt: skip


_BOUND: dict[Any, _Bound] = {}
_WRITERS: dict[Any, MLAAttentionImpl] = {}
_PREFILLS: dict[Any, MLAAttentionImpl] = {}


def _bound(name: str | None, call: Step, check: Callable[..., type[AttentionBackend]]) -> _Bound:
    chosen_by = forced_backend() if name is None else name
    key = (chosen_by, registry_generation(), _signature(call))
    bound = _BOUND.get(key)
    if bound is None or bound.choices != library_choices():
        bound = remember(_BOUND, key, _bind(name, call, check))
    checks.check_same_rows(call)
    if debug_checks_enabled():
        checks.check_mla_rows(call)
    return bound


def run_mqa(name: str | None, call: MLAAttentionCall) -> None:
    """Runs a call on the named backend, or on the one selected for its arguments."""
    bound = _bound(name, call, check_mqa_call)
    if call.output.shape[0]:
        bound.run_mqa(call)


def run_mixed(name: str | None, call: MLAMixedCall) -> None:
    """As `run_mqa`."""
    bound = _bound(name, call, check_mixed_call)
    if call.output.shape[0]:
        bound.run_mixed(call)


def run_mla_update(name: str | None, call: MLACacheUpdateCall) -> None:
    """As `run_mqa`, for a cache write."""
    chosen_by = forced_backend() if name is None else name
    key = (
        chosen_by, registry_generation(), rows_of(call.kv_c), rows_of(call.k_pe), whole_of(call.kv_cache),
        call.kv_cache.stride(-1), rows_of(call.slot_mapping), call.slot_mapping.is_contiguous(),
        whole_of(call.k_scale), call.kv_cache_dtype, library_choices(), wants_grad(call),
    )  # fmt: skip
    impl = _WRITERS.get(key)
    if impl is None:
        dims = MLADims(kv_lora_rank=int(call.kv_c.shape[1]), qk_rope_head_dim=int(call.k_pe.shape[1]))
        backend = check_mla_update_call(name, call)
        impl = remember(_WRITERS, key, _impl(backend, _params(call, dims, 1.0)))
    checks.check_same_rows(call)
    if debug_checks_enabled():
        checks.check_mla_slots(call)
    if call.kv_c.shape[0]:
        cache = typed_cache(call.kv_cache, call.kv_cache_dtype)
        impl.mla_kv_cache_update(call.kv_c, call.k_pe, cache, call.slot_mapping, call.k_scale)


def run_mha(name: str, call: MLAPrefillCall) -> None:
    """Runs a backend's ``forward_mha`` for sequences of any lengths."""
    key = (
        name, registry_generation(), rows_of(call.query), rows_of(call.key), rows_of(call.value),
        rows_of(call.output), rows_of(call.lse), vector_of(call.cu_seqlens_q), vector_of(call.cu_seqlens_k),
        call.scale, library_choices(), wants_grad(call),
    )  # fmt: skip
    impl = _PREFILLS.get(key)
    if impl is None:
        impl = remember(_PREFILLS, key, _impl(check_mha_call(name, call), _prefill_params(call)))
    checks.check_same_rows(call)
    if debug_checks_enabled():
        checks.check_mha_rows(call)
    if call.query.shape[0]:
        metadata = MLAPrefillMetadata(
            cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, causal=call.causal,
            max_seqlen_q=call.query.shape[0], max_seqlen_k=call.key.shape[0],
        )  # fmt: skip
        impl.forward_mha(call.query, call.key, call.value, metadata, call.output, call.lse)


def _prefill_params(call: MLAPrefillCall) -> AttentionParams:
    """Of a layer of which the call shows no cache."""
    heads, head_size = call.query.shape[1:]
    return AttentionParams(
        num_heads=int(heads), num_kv_heads=int(heads), head_size=int(head_size), dtype=call.query.dtype,
        kv_cache_dtype="auto", block_size=1, device_type=call.query.device.type, scale=call.scale,
    )  # fmt: skip
