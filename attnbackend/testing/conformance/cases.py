"""From a backend's claims to cases: the same claims and seed give the same cases, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.batch_shapes import (
    BATCHES,
    DECODE,
    LARGE_BATCHES,
    MIXED,
    ONE_REQUEST,
    UNEVEN_DECODE,
)
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.crossings import crossings
from attnbackend.testing.conformance.feature import Feature
from attnbackend.testing.conformance.features import claimed_features
from attnbackend.testing.conformance.kinds import fit_to_batch
from attnbackend.testing.conformance.pairs import PAIRS
from attnbackend.testing.conformance.sizes import pick_size
from attnbackend.types import describe

__all__ = ["CaseGenerator", "config_of"]

_LARGE_QUICK = ("plain", "window_edge", "window_far", "everything")
_LONG_SUMS = "long_sums"
_DRAFTS = "window_over_pages"
"""The window that tokens of a uniform batch, which decode as many at a time, do not all see beyond."""
_LARGE = (
    *_LARGE_QUICK,
    "newest_key",
    "window_over_pages",
    "soft_cap",
    "alibi",
    "sinks",
    "everything_strided",
)
"""Features that run over `LARGE_BATCHES` too."""
_IN_DECODES = ("heads", "dtype", "layout", "memory", "head_size", "per_head_quant_scales", "cross")
"""Claims by which kernels are often chosen for decodes alone."""
_PAIRS = (MIXED, DECODE, ONE_REQUEST, "page_edges", UNEVEN_DECODE)
"""Batches of two features together."""


@dataclass(frozen=True)
class CaseGenerator:
    """Cases for one backend on one device."""

    backend: type[AttentionBackend]
    device_type: str
    seed: int = 0
    quick: bool = False
    """Every feature and every batch, but not every pair of them."""

    @cached_property
    def features(self) -> dict[str, Feature]:
        """By name; quick: without those in pairs."""
        found = claimed_features(self.backend)
        return {f.name: f for f in found if not (self.quick and f.claim == PAIRS)}

    def pairs(self) -> Iterator[ConformanceCase]:
        """Every feature over every batch, and every pair of claims; quick: each feature over a few, and all
        batches with all features."""
        for name, feature in self.features.items():
            yield from self.some(*((name, batch) for batch in self._batches(feature)))
        if not self.quick:
            for name, batch, changes in crossings(self.backend, self.base):
                yield from self._made(name, batch, PAIRS, changes)

    def _batches(self, feature: Feature) -> Iterator[str]:
        if feature.name.startswith(_LONG_SUMS):
            return iter(("long_context",))
        if not self.quick:
            small = _PAIRS if feature.claim == PAIRS else (*BATCHES, UNEVEN_DECODE)
            return iter(dict.fromkeys((*small, *(LARGE_BATCHES if feature.name in _LARGE else ()))))
        if feature.name in ("plain", "everything"):
            return iter((*BATCHES, *LARGE_BATCHES))
        if feature.name == _DRAFTS:
            return iter((MIXED, "uniform_of_four"))
        if feature.claim == "block_size":
            return iter((MIXED, DECODE, "long_prompt"))
        in_decodes = feature.claim in _IN_DECODES or feature.name == self.scaled_cache
        small = (MIXED, DECODE) if in_decodes else (MIXED,)
        return iter((*small, *(LARGE_BATCHES if feature.name in _LARGE_QUICK else ())))

    @cached_property
    def scaled_cache(self) -> str:
        """The feature of a float8 cache in the type that cases start from; "hnd" where there is none."""
        start = f"{self.plain_cache}_cache_fp8"
        return next((name for name in self.features if name.startswith(start)), "hnd")

    @property
    def plain_cache(self) -> str:
        """The feature of the type that cases start from."""
        return f"dtype_{describe(self.base['dtype'])}"

    def some(self, *pairs: tuple[str, str], **changes: Any) -> Iterator[ConformanceCase]:
        """Cases of (feature, batch), those left out that the backend does not claim."""
        for feature, batch in dict.fromkeys(pairs):
            yield from self.case(feature, batch, **changes)

    def case(self, feature: str, batch: str, **changes: Any) -> Iterator[ConformanceCase]:
        """The one case of a feature over a batch, or none where they do not go together."""
        claimed = self.features.get(feature)
        if claimed is None:
            return
        yield from self._made(feature, batch, claimed.claim, {**claimed.changes, **changes}, claimed.times)

    def _made(
        self, name: str, batch: str, claim: str, changes: dict[str, Any], times: int = 1
    ) -> Iterator[ConformanceCase]:
        fields = fit_to_batch({**self.base, **{**BATCHES, **LARGE_BATCHES}[batch], **changes})
        for heads in ("num_heads", "num_kv_heads"):
            fields[heads] *= times
        fields["lse"] = bool(fields["lse"] and self.backend.supports_lse())
        if _goes_together(fields) and self._is_claimed(attention := AttentionCase(**fields)):
            yield ConformanceCase(id=f"{name}-{batch}", feature=claim, attention=attention)

    @cached_property
    def base(self) -> dict[str, Any]:
        """What all cases start from: typical sizes, or the nearest that are claimed."""
        backend = self.backend
        limit = backend.max_group_size
        on_cpu = self.device_type == "cpu"
        wanted = (torch.bfloat16, torch.float16, torch.float32)
        dtypes = [d for d in (wanted[::-1] if on_cpu else wanted) if backend.supports_dtype(d)]
        if not dtypes:
            raise ValueError(f"{backend.get_name()} claims no dtype; state supported_dtypes")
        return {
            "dtype": dtypes[0],
            "kv_cache_dtype": "auto" if backend.supports_kv_cache_dtype("auto") else self._cache_dtype(),
            "head_size": pick_size(backend.supported_head_sizes, 64 if on_cpu else 128),
            "block_size": pick_size(backend.supported_block_sizes, 16),
            "num_heads": 4 if limit is None or limit > 1 else 2,
            "num_kv_heads": 2,
            "layout": backend.supported_layouts[0].value,
            "lse": True,
            "seed": self.seed,
        }

    def _cache_dtype(self) -> str:
        return next(iter(self.backend.supported_kv_cache_dtypes))

    def _is_claimed(self, case: AttentionCase) -> bool:
        """Whether no limit of the backend that single fields do not show stands against the case."""
        limit, group = self.backend.max_group_size, case.num_heads // case.num_kv_heads
        if limit is not None and group > limit:
            return False
        return not self.backend.supports_combination(config_of(case, self.device_type))


def _goes_together(fields: dict[str, Any]) -> bool:
    longest = max(a + b for a, b in zip(fields["query_lens"], fields["context_lens"], strict=True))
    edges = {"window_edge": "sliding_window", "chunk_edge": "attention_chunk_size"}
    edge = edges.get(fields.get("probe") or "")
    return edge is None or longest > fields[edge]


def config_of(case: AttentionCase, device_type: str, /, **changes: Any) -> AttentionSelectorConfig:
    """What a case asks of a backend."""
    scales = (case.k_scale, case.v_scale)
    fields: dict[str, Any] = {
        "device_type": device_type, "head_size": case.head_size, "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads, "dtype": case.dtype, "kv_cache_dtype": case.kv_cache_dtype,
        "block_size": case.block_size, "attn_type": case.attn_type, "causal": case.causal,
        "sliding_window": case.sliding_window, "attention_chunk_size": case.attention_chunk_size,
        "has_bidirectional_ranges": case.bidirectional_ranges is not None,
        "logits_soft_cap": case.logits_soft_cap, "has_alibi": case.use_alibi, "has_sinks": case.use_sinks,
        "needs_lse": case.lse, "per_head_quant_scales": any(isinstance(s, tuple) for s in scales),
    }  # fmt: skip
    return AttentionSelectorConfig.dense(**{**fields, **changes})
