"""What a layer keeps of its past: kinds of caches and their element types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnbackend.types import AttentionType, KVCacheLayout

if TYPE_CHECKING:
    from attnbackend.impl import AttentionParams

__all__ = [
    "KV_CACHE_DTYPES",
    "LATENT_CACHE_DTYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "resolve_kv_cache_dtype",
    "spec_of",
]

KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_ds_mla": torch.uint8,
}
"""Names of cache types; "auto" is the model's own, "fp8" another name of "fp8_e4m3", "fp8_ds_mla" rows of
bytes with scales of their own."""
LATENT_CACHE_DTYPES = ("fp8_ds_mla",)
"""Those that no cache of keys and values has."""


def resolve_kv_cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The element type of a cache.

    Raises:
        ValueError: the name is not one of `KV_CACHE_DTYPES`.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} is unknown; allowed: {', '.join(KV_CACHE_DTYPES)}"
        )
    return KV_CACHE_DTYPES[kv_cache_dtype] or model_dtype


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a layer keeps between steps. Layers with equal specs form a group and share a plan."""

    block_size: int
    """Tokens a block."""

    def __post_init__(self) -> None:
        self._check_positive("block_size")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}: {name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of a dense attention layer."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    """The model's type; the cache's follows from it and ``kv_cache_dtype``."""
    kv_cache_dtype: str = "auto"
    layout: KVCacheLayout = KVCacheLayout.NHD

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("num_kv_heads", "head_size")
        object.__setattr__(self, "layout", KVCacheLayout(self.layout))
        resolve_kv_cache_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        return resolve_kv_cache_dtype(self.kv_cache_dtype, self.dtype)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every earlier token is kept."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last ``sliding_window`` tokens are read."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("sliding_window")


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Only tokens of the present chunk of ``attention_chunk_size`` positions are read."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("attention_chunk_size")


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output."""


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """One latent row a token: ``head_size`` is kv_lora_rank + qk_rope_head_dim, one kv head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != 1:
            raise ValueError(f"MLAAttentionSpec: num_kv_heads={self.num_kv_heads} must be 1")


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State of a recurrent layer: a block holds one request's state."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"MambaSpec: {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give one "
                "dtype for each shape"
            )


def spec_of(params: AttentionParams, layout: KVCacheLayout = KVCacheLayout.NHD) -> AttentionSpec:
    """What a layer with these parameters keeps."""
    shared: dict[str, Any] = {
        "block_size": params.block_size,
        "num_kv_heads": params.num_kv_heads,
        "head_size": params.head_size,
        "dtype": params.dtype,
        "kv_cache_dtype": params.kv_cache_dtype,
        "layout": layout,
    }
    if params.mla is not None:
        return MLAAttentionSpec(**shared)
    if params.attn_type is AttentionType.ENCODER_DECODER:
        return CrossAttentionSpec(**shared)
    if params.attention_chunk_size is not None:
        return ChunkedLocalAttentionSpec(attention_chunk_size=params.attention_chunk_size, **shared)
    if params.sliding_window is None:
        return FullAttentionSpec(**shared)
    return SlidingWindowSpec(sliding_window=params.sliding_window, **shared)
