"""Two claims at a time: a kernel that is right for each alone may take another path for both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.testing.conformance.feature import Feature
from attnbackend.testing.conformance.kinds import SPANS
from attnbackend.types import AttentionType, KVCacheLayout

__all__ = ["PAIRS", "paired_features"]

PAIRS = "two at once"
"""Row of the report's matrix."""

_FULL = "supports_non_causal"
_MASKS = (
    Feature("window", "", {"sliding_window": 21}, ("supports_sliding_window",)),
    Feature("chunks", "", {"attention_chunk_size": 21}, ("supports_attention_chunks",)),
    Feature("not_causal", "", {"causal": False}, (_FULL,)),
    Feature("ranges", "", {"bidirectional_ranges": SPANS}, ("supports_bidirectional_ranges",)),
    Feature("alibi", "", {"use_alibi": True}, ("supports_alibi",)),
)
_OF_ANY_KIND = (
    Feature("soft_cap", "", {"logits_soft_cap": 3.0}, ("supports_logits_soft_cap",)),
    Feature("sinks", "", {"use_sinks": True}, ("supports_sinks",)),
    Feature("strided", "", {"strided_tensors": True}),
)
_KINDS = (
    Feature("encoder_only", "", {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}, (_FULL,)),
    Feature("cross", "", {"attn_type": AttentionType.ENCODER_DECODER, "causal": False}, (_FULL,)),
)
_NOT_OF_KIND = {
    "encoder_only": {"chunks", "not_causal", "ranges", "hnd", "fp8", "per_head_scales"},
    "cross": {"window", "chunks", "not_causal", "ranges", "alibi"},
}
_APART = ({"window", "chunks"}, {"not_causal", "ranges"}, {"fp8", "per_head_scales"})
"""What the contract does not allow together."""


def paired_features(backend: type[AttentionBackend]) -> Iterator[Feature]:
    """All pairs of claims that the contract allows together."""
    parts = [part for part in (*_MASKS, *_OF_ANY_KIND, *_memory(backend)) if part.is_claimed_by(backend)]
    pairs = [(a, b) for a, b in combinations(parts, 2) if {a.name, b.name} not in _APART]
    kinds = [kind for kind in _KINDS if kind.is_claimed_by(backend)]
    pairs += [(kind, part) for kind in kinds for part in parts if part.name not in _NOT_OF_KIND[kind.name]]
    for a, b in pairs:
        yield Feature(f"{a.name}_with_{b.name}", PAIRS, {**a.changes, **b.changes})


def _memory(backend: type[AttentionBackend]) -> Iterator[Feature]:
    if len(backend.supported_layouts) > 1 and KVCacheLayout.HND in backend.supported_layouts:
        yield Feature("hnd", "", {"layout": "HND"})
    if backend.supports_dtype(torch.float16):
        yield Feature("float16", "", {"dtype": torch.float16})
    fp8 = next((name for name in backend.supported_kv_cache_dtypes if name.startswith("fp8")), None)
    if fp8 is not None:
        scales: dict[str, Any] = {"k_scale": 0.25, "v_scale": 0.5}
        yield Feature("fp8", "", {"kv_cache_dtype": fp8, **scales})
        scales = {"k_scale": (0.25, 0.5), "v_scale": (1.0, 0.125)}
        needs = ("supports_per_head_quant_scales",)
        yield Feature("per_head_scales", "", {"kv_cache_dtype": fp8, **scales}, needs)
