"""A call for each thing that a backend does not claim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.kv_cache import KV_CACHE_DTYPES, LATENT_CACHE_DTYPES
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.case import RefusalCase
from attnbackend.testing.conformance.kinds import fit_to_batch
from attnbackend.types import AttentionType, KVCacheLayout, describe

__all__ = ["unclaimed"]

_FLAGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("supports_non_causal", {"causal": False}, {}),
    "sliding_window": ("supports_sliding_window", {"sliding_window": 7}, {}),
    "attention_chunk_size": ("supports_attention_chunks", {"attention_chunk_size": 7}, {}),
    "logits_soft_cap": ("supports_logits_soft_cap", {"logits_soft_cap": 5.0}, {}),
    "has_alibi": ("supports_alibi", {"use_alibi": True}, {}),
    "has_sinks": ("supports_sinks", {"use_sinks": True}, {}),
    "has_query_scale": ("supports_query_scale", {}, {"q_scale": (1,)}),
    "has_quantized_query": ("supports_quantized_query", {}, {}),
    "has_output_scale": ("supports_output_scale", {}, {"output_scale": (1,)}),
    "has_output_block_scale": ("supports_output_block_scale", {}, {"output_block_scale": (3, 2)}),
}
"""Field -> claim, changes of the case, further arguments of the op."""

_HEAD_SIZES = (8, 24, 40, 48, 72, 80, 100, 128, 256, 264, 512, 33, 1)
_BLOCK_SIZES = (1, 3, 7, 8, 16, 24, 32, 48, 64, 128)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unclaimed(backend: type[AttentionBackend], plain: AttentionCase) -> Iterator[RefusalCase]:
    """Cases that the backend must refuse: ``plain`` with one thing more that is not claimed."""

    def case(field: str, value: Any, changes: dict[str, Any], extras: dict[str, Any]) -> RefusalCase:
        return RefusalCase(
            id=f"{field}-{describe(value)}", feature="unclaimed", attention=replace(plain, **changes),
            field=field, extras=extras,
        )  # fmt: skip

    for field, (claim, changes, extras) in _FLAGS.items():
        if not getattr(backend, claim):
            yield case(field, "given", changes, extras)
    if not backend.supports_lse():
        yield case("needs_lse", "given", {"lse": True}, {})
    for field, value, changes in _values(backend):
        yield case(field, value, changes, {})
    yield from _heads(backend, plain, case)
    for kind in AttentionType:
        if not backend.supports_attn_type(kind):
            yield case("attn_type", kind.value, _of_kind(kind, plain), {})
    if not backend.supports_bidirectional_ranges:
        spans = tuple(((0, 1),) for _ in plain.query_lens)
        yield case("has_bidirectional_ranges", "given", {"bidirectional_ranges": spans}, {})
    for layout in KVCacheLayout:
        if layout not in backend.supported_layouts:
            yield case("kv_cache_layout", layout.value, {}, {"kv_cache_layout": layout})
    yield case("use_mla", "other", {}, {"use_mla": not backend.is_mla})
    yield case("use_sparse", "other", {}, {"use_sparse": not backend.is_sparse})
    yield case("device_type", "nowhere", {}, {"device_type": "nowhere", "compute_capability": None})


def _of_kind(kind: AttentionType, plain: AttentionCase) -> dict[str, Any]:
    """Changes after which a case is of another kind of attention, and contradicts itself in nothing."""
    crosses = kind is AttentionType.ENCODER_DECODER
    lengths = {"query_lens": plain.query_lens, "context_lens": plain.context_lens}
    return fit_to_batch({**lengths, "attn_type": kind, "causal": not crosses})


def _first(values: Iterable[Any], claimed: Callable[[Any], bool]) -> Iterator[Any]:
    """The first value that is not claimed, if any."""
    yield from [value for value in values if not claimed(value)][:1]


def _values(backend: type[AttentionBackend]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for size in _first(_HEAD_SIZES, backend.supports_head_size):
        yield "head_size", size, {"head_size": size}
    for size in _first(_BLOCK_SIZES, backend.supports_block_size):
        yield "block_size", size, {"block_size": size}
    for dtype in _first(_DTYPES, backend.supports_dtype):
        yield "dtype", dtype, {"dtype": dtype}
    for name in KV_CACHE_DTYPES:
        if name not in LATENT_CACHE_DTYPES and not backend.supports_kv_cache_dtype(name):
            yield "kv_cache_dtype", name, {"kv_cache_dtype": name}


def _heads(
    backend: type[AttentionBackend], plain: AttentionCase, case: Callable[..., RefusalCase]
) -> Iterator[RefusalCase]:  # fmt: skip
    if backend.max_group_size is not None:
        heads = (backend.max_group_size + 1) * plain.num_kv_heads
        yield case("num_heads", heads, {"num_heads": heads}, {})
    fp8 = next((n for n in KV_CACHE_DTYPES if "fp8" in n and backend.supports_kv_cache_dtype(n)), None)
    if fp8 is not None and not backend.supports_per_head_quant_scales:
        scales = {"kv_cache_dtype": fp8, "k_scale": (0.25, 0.5), "v_scale": (1.0, 0.125)}
        yield case("per_head_quant_scales", fp8, scales, {})
