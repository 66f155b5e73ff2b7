"""From the claims of a backend of latent attention to cases, in the same order every time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.kv_cache import KV_CACHE_DTYPES
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.testing.conformance.batch_shapes import BATCHES, DECODE, LARGE_BATCHES, MIXED
from attnbackend.testing.conformance.crossings import Options, crossed
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.pairs import PAIRS
from attnbackend.testing.conformance.sizes import pick_size, probing_sizes
from attnbackend.testing.mla_cases import MLACase
from attnbackend.types import describe

__all__ = ["LatentCases", "latent_config_of"]

_LATENTS = ((64, 16), (64, 64), (128, 64), (256, 64), (512, 64))
"""(kv_lora_rank, qk_rope_head_dim) that are tried, the smallest first."""
_FULL_SIZE: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_SIZES_OF_8: dict[str, Any] = {"kv_lora_rank": 200, "qk_rope_head_dim": 24}

_APART = (
    ("one_head", "heads_of_20", "heads_of_128"), ("full_size", "sizes_of_8", "odd_sizes", "wide_values"),
    ("cache_fp8_scaled", "cache_fp8", "cache_bfloat16"),
    ("dtype_float32", "dtype_float16", "dtype_bfloat16"), ("block_size_48", "block_size_128"),
    ("low_logits",), ("another_scale",), ("no_lse",), ("layers_interleaved",), ("strided_tensors",),
    ("many_selected",),
)  # fmt: skip
"""Features of which a case has one at most."""

Feature = tuple[str, dict[str, Any]]
"""Claim, and changes of the case."""


@dataclass(frozen=True)
class LatentCases:
    """Cases for one backend on one device."""

    backend: type[AttentionBackend]
    device_type: str
    seed: int = 0
    quick: bool = False

    @cached_property
    def features(self) -> dict[str, Feature]:
        """By name; those that the backend does not claim are left out when cases are made."""
        fixed: dict[str, Feature] = {
            "plain": ("plain", {}),
            "another_scale": ("plain", {"scale": 0.3}),
            "low_logits": ("plain", {"low_logits": True}),
            "no_lse": ("plain", {"lse": False}),
            "one_head": ("heads", {"num_heads": 1}),
            "heads_of_20": ("heads", {"num_heads": 20}),
            "heads_of_128": ("heads", {"num_heads": 128}),
            "wide_values": ("head sizes", {"v_head_dim": 48, "qk_nope_head_dim": 16}),
            "full_size": ("head sizes", _FULL_SIZE),
            "sizes_of_8": ("head sizes", _SIZES_OF_8),
            "odd_sizes": ("head sizes", {"kv_lora_rank": 75, "qk_rope_head_dim": 10}),
            "layers_interleaved": ("memory", {"num_layers": 3}),
            "strided_tensors": ("memory", {"strided_tensors": True}),
        }
        if self.backend.is_sparse:
            fixed["many_selected"] = ("selection", {"top_k": 200})
        return fixed | dict(self._sizes()) | dict(self._types())

    def _sizes(self) -> Iterator[tuple[str, Feature]]:
        sizes = probing_sizes(self.backend.supported_block_sizes, typical=(16, 32, 48, 64, 128), largest=128)
        for size in sizes:
            yield f"block_size_{size}", ("block_size", {"block_size": size})

    def _types(self) -> Iterator[tuple[str, Feature]]:
        for dtype in self.backend.supported_dtypes:
            yield f"dtype_{describe(dtype)}", ("dtype", {"dtype": dtype})
        for name in KV_CACHE_DTYPES:
            if name != "auto" and self.backend.supports_kv_cache_dtype(name):
                for scale in (None, 0.25) if name in ("fp8", "fp8_e4m3", "fp8_e5m2") else (None,):
                    scaled = "" if scale is None else "_scaled"
                    yield f"cache_{name}{scaled}", ("kv_cache_dtype", self._cached_as(name, scale))
        if self.backend.supports_kv_cache_dtype("fp8"):
            fp8 = self._cached_as("fp8", 0.25)
            yield "sizes_of_8_cache_fp8", ("head sizes", fp8 | _SIZES_OF_8)
            yield "layers_interleaved_cache_fp8", ("memory", fp8 | {"num_layers": 3})

    def _cached_as(self, name: str, scale: float | None) -> dict[str, Any]:
        own: dict[str, Any] = {"kv_cache_dtype": name, "k_scale": scale}
        if KV_CACHE_DTYPES[name] is torch.uint8:
            half = [d for d in self.backend.supported_dtypes if d.itemsize == 2]
            return own | _FULL_SIZE | {"dtype": half[0] if half else self.base["dtype"]}
        return own

    @cached_property
    def base(self) -> dict[str, Any]:
        """What all cases start from: typical sizes, or the nearest that are claimed."""
        wanted = (torch.bfloat16, torch.float16, torch.float32)
        dtypes = [
            d for d in wanted[:: 1 if self.device_type == "cuda" else -1] if self.backend.supports_dtype(d)
        ]
        if not dtypes:
            raise ValueError(f"{self.backend.get_name()} claims no dtype; state supported_dtypes")
        shared: dict[str, Any] = {
            "dtype": dtypes[0], "block_size": pick_size(self.backend.supported_block_sizes, 16),
            "lse": self.backend.supports_lse(), "seed": self.seed,
            "top_k": 16 if self.backend.is_sparse else None,
        }  # fmt: skip
        for rank, rope in _LATENTS:
            sizes: dict[str, Any] = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
            if self._is_claimed(MLACase(query_lens=(1,), context_lens=(0,), **shared, **sizes)):
                return shared | sizes
        raise ValueError(
            f"{self.backend.get_name()} claims none of the latent sizes {_LATENTS} (rank, rotated part)"
        )

    def pairs(self) -> Iterator[LatentCase]:
        """Every feature over every batch, and every pair; quick: each feature over two, "plain" over all."""
        for name in self.features:
            for batch in BATCHES if name == "plain" or not self.quick else (MIXED, DECODE):
                yield from self.case(name, batch)
        for name, batch, changes in () if self.quick else crossed(self._axes, self.base, lambda choice: True):
            yield from self._made(name, batch, PAIRS, changes)
        for batch in LARGE_BATCHES:
            yield from self.case("plain", batch)
        yield from self.case("many_selected", "long_context")

    def some(self, *pairs: tuple[str, str], **changes: Any) -> Iterator[LatentCase]:
        for feature, batch in pairs:
            yield from self.case(feature, batch, **changes)

    def case(self, feature: str, batch: str, **changes: Any) -> Iterator[LatentCase]:
        """The one case of a feature over a batch, or none where the feature is not claimed."""
        if feature not in self.features:
            return
        claim, own = self.features[feature]
        yield from self._made(feature, batch, claim, {**own, **changes})

    def _made(self, name: str, batch: str, claim: str, changes: dict[str, Any]) -> Iterator[LatentCase]:
        mla = MLACase(**{**self.base, **{**BATCHES, **LARGE_BATCHES}[batch], **changes})
        if self._is_claimed(mla):
            yield LatentCase(id=f"{name}-{batch}", feature=claim, mla=mla)

    @cached_property
    def _axes(self) -> dict[str, Options]:
        """Of features that exclude each other."""
        known = self.features
        return {names[0]: {name: known[name][1] for name in names if name in known} for names in _APART}

    def _is_claimed(self, case: MLACase) -> bool:
        return not self.backend.validate_configuration(latent_config_of(case, self.device_type))


def latent_config_of(case: MLACase, device_type: str, /, **changes: Any) -> AttentionSelectorConfig:
    """What a case asks of a backend."""
    fields: dict[str, Any] = {
        "device_type": device_type, "head_size": case.head_size, "num_heads": case.num_heads,
        "num_kv_heads": 1, "dtype": case.dtype, "kv_cache_dtype": case.kv_cache_dtype,
        "block_size": case.block_size, "needs_lse": case.lse, "use_mla": True,
        "use_sparse": case.top_k is not None, "kv_lora_rank": case.kv_lora_rank,
    }  # fmt: skip
    return AttentionSelectorConfig.dense(**{**fields, **changes})
