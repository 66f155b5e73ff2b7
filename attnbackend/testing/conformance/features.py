"""What a backend may claim, and the cases that make each claim decide the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.kv_cache import KV_CACHE_DTYPES
from attnbackend.testing.conformance.feature import Feature
from attnbackend.testing.conformance.kinds import SPANS
from attnbackend.testing.conformance.pairs import paired_features
from attnbackend.testing.conformance.sizes import probing_sizes
from attnbackend.types import AttentionType, KVCacheLayout, describe

__all__ = ["claimed_features"]


_WINDOW = ("supports_sliding_window",)
_CAP = ("supports_logits_soft_cap",)
_SINKS = ("supports_sinks",)
_FULL = ("supports_non_causal",)
_ALIBI = ("supports_alibi",)
_CHUNKS = ("supports_attention_chunks",)
_RANGES = ("supports_bidirectional_ranges",)
_HALF: dict[str, Any] = {"dtype": torch.float16}
_ENCODER: dict[str, Any] = {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}
_CROSS: dict[str, Any] = {"attn_type": AttentionType.ENCODER_DECODER, "causal": False}

_FIXED = (
    Feature("plain", "plain"),
    Feature("newest_key", "plain", {"probe": "newest_key"}),
    Feature("another_scale", "plain", {"scale": 0.3}),
    Feature("large_logits", "plain", {"scale": 8.0}),
    Feature("low_logits", "plain", {"probe": "low_logits"}),
    Feature("no_lse", "plain", {"lse": False}),
    Feature("multi_query", "heads", {"num_heads": 4, "num_kv_heads": 1}),
    Feature("group_of_three", "heads", {"num_heads": 9, "num_kv_heads": 3}),
    Feature("no_groups", "heads", {"num_heads": 3, "num_kv_heads": 3}),
    Feature("group_of_seven", "heads", {"num_heads": 14, "num_kv_heads": 2}),
    Feature("forty_heads", "heads", {"num_heads": 40, "num_kv_heads": 10}),
    Feature("group_of_sixteen", "heads", {"num_heads": 16, "num_kv_heads": 1}),
    Feature("value_is_head", "heads", {"num_heads": 8, "num_kv_heads": 4, "probe": "value_is_head"}),
    Feature("window", "sliding_window", {"sliding_window": 7}, _WINDOW),
    Feature("window_edge", "sliding_window", {"sliding_window": 7, "probe": "window_edge"}, _WINDOW),
    Feature("window_of_a_page", "sliding_window", {"sliding_window": 16}, _WINDOW),
    Feature("window_over_pages", "sliding_window", {"sliding_window": 37, "probe": "window_edge"}, _WINDOW),
    Feature("window_far", "sliding_window", {"sliding_window": 600, "probe": "window_edge"}, _WINDOW),
    Feature("window_of_one", "sliding_window", {"sliding_window": 1}, _WINDOW),
    Feature("window_wider_than_all", "sliding_window", {"sliding_window": 4096}, _WINDOW),
    Feature("soft_cap", "logits_soft_cap", {"logits_soft_cap": 5.0, "probe": "soft_cap"}, _CAP),
    Feature("soft_cap_after_scale", "logits_soft_cap", {"logits_soft_cap": 2.0, "scale": 0.7}, _CAP),
    Feature("alibi", "alibi", {"use_alibi": True}, _ALIBI, times=5),
    Feature("sinks", "sinks", {"use_sinks": True}, _SINKS, times=5),
    Feature("sinks_of_the_model", "sinks", {"use_sinks": True, **_HALF, "narrow_sinks": True}, _SINKS),
    Feature("not_causal", "non_causal", {"causal": False}, _FULL),
    Feature("not_causal_window", "non_causal", {"causal": False, "sliding_window": 7}, _FULL + _WINDOW),
    Feature("not_causal_alibi", "non_causal", {"causal": False, "use_alibi": True}, _FULL + _ALIBI),
    Feature("chunks", "attention_chunks", {"attention_chunk_size": 7}, _CHUNKS),
    Feature("chunk_edge", "attention_chunks", {"attention_chunk_size": 7, "probe": "chunk_edge"}, _CHUNKS),
    Feature("chunks_of_one", "attention_chunks", {"attention_chunk_size": 1}, _CHUNKS),
    Feature("chunks_wider_than_all", "attention_chunks", {"attention_chunk_size": 4096}, _CHUNKS),
    Feature("ranges", "bidirectional_ranges", {"bidirectional_ranges": SPANS}, _RANGES),
    Feature(
        "ranges_over_window", "bidirectional_ranges", {"bidirectional_ranges": SPANS, "sliding_window": 3},
        _RANGES + _WINDOW,
    ),
    Feature(
        "ranges_over_chunks", "bidirectional_ranges",
        {"bidirectional_ranges": SPANS, "attention_chunk_size": 5}, _RANGES + _CHUNKS,
    ),
    Feature("encoder_only", "encoder", _ENCODER, _FULL),
    Feature("encoder", "encoder", {**_ENCODER, "attn_type": AttentionType.ENCODER}, _FULL),
    Feature("encoder_causal", "encoder", {**_ENCODER, "causal": True}),
    Feature("encoder_window", "encoder", {**_ENCODER, "sliding_window": 4}, _FULL + _WINDOW),
    Feature("encoder_alibi", "encoder", {**_ENCODER, "use_alibi": True}, _FULL + _ALIBI),
    Feature("encoder_strided", "encoder", {**_ENCODER, "strided_tensors": True}, _FULL),
    Feature("encoder_sinks", "encoder", {**_ENCODER, "use_sinks": True}, _FULL + _SINKS),
    Feature("cross", "cross", _CROSS, _FULL),
    Feature("cross_soft_cap", "cross", {**_CROSS, "logits_soft_cap": 3.0}, _FULL + _CAP),
    Feature("layers_interleaved", "memory", {"num_layers": 3}),
    Feature("keys_before_values", "memory", {"kv_outermost": True}),
    Feature("strided_tensors", "memory", {"strided_tensors": True}),
)  # fmt: skip


def claimed_features(backend: type[AttentionBackend]) -> Iterator[Feature]:
    """Every feature that the backend's claims ask for, in a fixed order."""
    for feature in _FIXED:
        if feature.is_claimed_by(backend):
            yield feature
    yield from _everything(backend)
    if KVCacheLayout.HND in backend.supported_layouts:
        yield Feature("hnd", "layout", {"layout": "HND"})
        yield Feature("hnd_layers_interleaved", "layout", {"layout": "HND", "num_layers": 2})
    if KVCacheLayout.NHD in backend.supported_layouts[1:]:
        yield Feature("nhd", "layout", {"layout": "NHD"})
    yield from _sizes(backend)
    yield from _types(backend)
    yield from _narrow(backend)
    yield from paired_features(backend)


def _everything(backend: type[AttentionBackend]) -> Iterator[Feature]:
    """All that the backend claims at once, and once more in memory that is shared with others."""
    asked: dict[str, dict[str, Any]] = {
        "supports_sliding_window": {"sliding_window": 9},
        "supports_logits_soft_cap": {"logits_soft_cap": 8.0},
        "supports_sinks": {"use_sinks": True},
        "supports_alibi": {"use_alibi": True},
    }
    changes = {k: v for claim, part in asked.items() if getattr(backend, claim) for k, v in part.items()}
    yield Feature("everything", "all at once", changes)
    wider = {"sliding_window": 70} if "sliding_window" in changes else {}
    apart = {"strided_tensors": True, "num_layers": 2, "layout": backend.supported_layouts[-1].value}
    yield Feature("everything_strided", "all at once", {**changes, **wider, **apart})


def _sizes(backend: type[AttentionBackend]) -> Iterator[Feature]:
    for size in probing_sizes(backend.supported_head_sizes, typical=(64, 80, 96, 128, 192), largest=256):
        if backend.supports_head_size(size):
            yield Feature(f"head_size_{size}", "head_size", {"head_size": size})
    for size in probing_sizes(backend.supported_block_sizes, typical=(16, 32, 48, 128), largest=256):
        if backend.supports_block_size(size):
            yield Feature(f"block_size_{size}", "block_size", {"block_size": size})


def _narrow(backend: type[AttentionBackend]) -> Iterator[Feature]:
    """Vectors of narrow types hold more elements: heads, pages and strides that suit others."""
    sizes = probing_sizes(backend.supported_head_sizes, typical=(), largest=256)
    uneven = (size for size in sizes if backend.supports_head_size(size) and size % 32)
    odd = min(uneven, key=lambda size: (size & -size, -size), default=0)
    if odd and backend.supports_dtype(torch.bfloat16):
        yield Feature(f"head_size_{odd}_bfloat16", "head_size", {"head_size": odd, "dtype": torch.bfloat16})
    if not backend.supports_kv_cache_dtype("fp8"):
        return
    fp8, layout = _cache_of("fp8"), backend.supported_layouts[-1].value
    if odd:
        yield Feature(f"head_size_{odd}_cache_fp8", "head_size", {"head_size": odd, **fp8})
    pages = probing_sizes(backend.supported_block_sizes, typical=(), largest=64)
    for size in list(filter(backend.supports_block_size, pages))[-1:]:
        changes = {"block_size": size, "layout": layout, **fp8}
        yield Feature(f"block_size_{size}_{layout}_cache_fp8", "block_size", changes)
    yield Feature("layers_interleaved_cache_fp8", "memory", {"num_layers": 3, **fp8})


def _types(backend: type[AttentionBackend]) -> Iterator[Feature]:
    names = [n for n in KV_CACHE_DTYPES if n != "auto" and backend.supports_kv_cache_dtype(n)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if not backend.supports_dtype(dtype):
            continue
        yield Feature(f"dtype_{describe(dtype)}", "dtype", {"dtype": dtype})
        if dtype.itemsize == 2:  # sums of weights are then so exact that their LSE is no yardstick
            changes = {"dtype": dtype, "probe": "long_sums", "lse": False}
            yield Feature(f"long_sums_{describe(dtype)}", "dtype", changes)
        for name in names:
            yield Feature(
                f"dtype_{describe(dtype)}_cache_{name}", "kv_cache_dtype", _cache_of(name) | {"dtype": dtype}
            )
    for name in names:
        if name.startswith("fp8") and backend.supports_per_head_quant_scales:
            scales = {"kv_cache_dtype": name, "k_scale": (0.25, 0.5), "v_scale": (1.0, 0.125)}
            yield Feature(f"cache_{name}_per_head_scales", "per_head_quant_scales", scales)
        if name.startswith("fp8"):
            odd = {"kv_cache_dtype": name, "k_scale": 0.3, "v_scale": 1.7}
            yield Feature(f"cache_{name}_odd_scales", "scales of any value", odd)


def _cache_of(name: str) -> dict[str, Any]:
    """A float8 cache comes with scales that are not 1, so that each must be applied once."""
    scales = {"k_scale": 0.25, "v_scale": 0.5} if name.startswith("fp8") else {}
    return {"kv_cache_dtype": name, **scales}
