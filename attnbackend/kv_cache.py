"""KV cache: what a layer needs (specs), where it lies in memory (one function), and how it is written.

Shape legend: B blocks, S block_size, K key-value heads, D head size, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnbackend.types import KVCacheLayout

if TYPE_CHECKING:
    from attnbackend.backend import AttentionBackend

__all__ = [
    "KV_CACHE_DTYPES",
    "AttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheGeometry",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "allocate_kv_cache",
    "allocate_kv_caches",
    "kv_cache_geometry",
    "quantize_to_cache",
    "resolve_kv_cache_dtype",
    "resolve_kv_sharing",
    "write_kv_cache",
]

KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Names of cache types; "auto" is the model's own, "fp8" another name of "fp8_e4m3"."""


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
        if self.block_size <= 0:
            raise ValueError(f"block_size={self.block_size} must be positive")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of a dense attention layer."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    """The model's type; the cache's follows from it and ``kv_cache_dtype``."""
    kv_cache_dtype: str = "auto"
    layout: KVCacheLayout = KVCacheLayout.NHD

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


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output."""


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """One latent row a token: ``head_size`` is kv_lora_rank + qk_rope_head_dim, num_kv_heads is 1."""


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State of a recurrent layer: a block holds one request's state."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class KVCacheGeometry:
    """Where one layer's cache lies: every figure of it, so that no two places can disagree."""

    shape: tuple[int, ...]
    """Logical shape."""
    stride: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype
    page_size_bytes: int
    """Bytes of one block of this layer."""

    @property
    def num_elements(self) -> int:
        """Elements from the first to the last that is addressed; the strides decide, not the shape."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def max_offset(self) -> int:
        """The largest element offset; beyond 2**31 - 1 a kernel must compute offsets in 64 bits."""
        return self.num_elements - 1


def kv_cache_geometry(
    backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int, *, block_stride: int | None = None
) -> KVCacheGeometry:  # fmt: skip
    """Shape, strides and page bytes of a layer's cache, for one backend.

    Args:
        backend: gives the logical shape and, for the spec's layout, the order in memory.
        spec: what the layer keeps.
        num_blocks: blocks, the reserved block 0 included.
        block_stride: elements from a block to the next where several layers share a buffer; None: a page.

    Raises:
        ValueError: the backend cannot hold such a cache.
    """
    _check_spec(backend, spec, num_blocks)
    shape = backend.get_kv_cache_shape(
        num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype
    )
    wider = backend.get_kv_cache_shape(
        num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype
    )
    block_dim = [a != b for a, b in zip(shape, wider, strict=True)].index(True)
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(backend.get_kv_cache_stride_order(spec.layout)):
        stride[dim] = step
        step *= shape[dim]
    page_elements = step // num_blocks
    if block_stride is not None:
        assert block_stride >= stride[block_dim], "layers of a shared buffer overlap"
        stride[block_dim] = block_stride
    page_bytes = page_elements * spec.cache_dtype.itemsize
    return KVCacheGeometry(tuple(shape), tuple(stride), spec.cache_dtype, page_bytes)


def _check_spec(backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> None:
    name = backend.get_name()
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks} must be at least 1 (block 0 is reserved)")
    if not backend.supports_block_size(spec.block_size):
        allowed = ", ".join(map(str, backend.supported_block_sizes))
        raise ValueError(f"block_size={spec.block_size} does not suit {name}; allowed: {allowed}")
    if spec.layout not in backend.supported_layouts:
        allowed = ", ".join(backend.supported_layouts)
        raise ValueError(f"layout={spec.layout} does not suit {name}; allowed: {allowed}")


def allocate_kv_cache(
    backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int, device: torch.device | str
) -> Tensor:
    """A zeroed cache of one layer, in its logical shape."""
    geometry = kv_cache_geometry(backend, spec, num_blocks)
    storage = _zeros(geometry.num_elements, geometry.dtype, device)
    return storage.as_strided(geometry.shape, geometry.stride)


def allocate_kv_caches(
    backends: Mapping[str, type[AttentionBackend]],
    specs: Mapping[str, AttentionSpec],
    num_blocks: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The caches of all layers in one buffer, all pages of a block side by side.

    A block's data of every layer is then one contiguous piece, which is what moving a block to another
    process or to disk wants.

    Args:
        backends: each layer's backend, by layer name.
        specs: each layer's spec, by layer name; all of one element type and block size.

    Raises:
        ValueError: the specs do not agree on the element type.
    """
    dtypes = {spec.cache_dtype for spec in specs.values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(d) for d in dtypes))
        raise ValueError(f"layers of one buffer must share an element type, got {found or 'no layer'}")
    dtype = dtypes.pop()
    pages = {
        name: kv_cache_geometry(backends[name], spec, 1).page_size_bytes // dtype.itemsize
        for name, spec in specs.items()
    }
    block_stride = sum(pages.values())
    storage = _zeros(num_blocks * block_stride, dtype, device)
    caches, offset = {}, 0
    for name, spec in specs.items():
        g = kv_cache_geometry(backends[name], spec, num_blocks, block_stride=block_stride)
        caches[name] = storage.as_strided(g.shape, g.stride, offset)
        offset += pages[name]
    return caches


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeroed storage of any type, float8 included, on any device."""
    storage = torch.zeros(num_elements * dtype.itemsize, dtype=torch.uint8, device=device)
    return storage.view(dtype)


def resolve_kv_sharing(targets: Mapping[str, str], specs: Mapping[str, KVCacheSpec]) -> dict[str, str]:
    """The layer that owns the cache of each sharing layer, with chains followed to their end.

    A layer that shares a cache reads its owner's and writes none.

    Args:
        targets: sharing layer -> the layer whose cache it uses.
        specs: every layer's spec.

    Raises:
        ValueError: an unknown layer, a cycle, or a layer whose spec differs from its owner's.
    """
    owners = {}
    for layer in targets:
        owner, chain = layer, [layer]
        while owner in targets:
            owner = targets[owner]
            if owner in chain:
                raise ValueError(f"layers share caches in a circle: {' -> '.join([*chain, owner])}")
            chain.append(owner)
        for name in (layer, owner):
            if name not in specs:
                raise ValueError(f"unknown layer {name!r} in the sharing chain {' -> '.join(chain)}")
        if specs[owner] != specs[layer]:
            raise ValueError(
                f"layer {layer!r} cannot share the cache of {owner!r}: {specs[layer]} is not {specs[owner]}"
            )
        owners[layer] = owner
    return owners


def quantize_to_cache(x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """New keys or values in the cache's type; float8 saturates at the format's finite range.

    Args:
        x_TKD: [T, K, D].
        scale: float32, 1 or K elements: real = stored * scale.
    """
    if dtype.itemsize > 1:
        return x_TKD.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = x_TKD.float() if scale is None else x_TKD.float() / scale.view(-1, 1)
    return scaled.clamp(-limit, limit).to(dtype)


def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes new keys and values to their slots in a cache of the standard shape, with torch ops.

    Args:
        key, value: [T, K, D].
        kv_cache: [B, 2, S, K, D], any strides; written.
        slot_mapping: int64 [T], ``block * S + offset``; negative means do not write.
        k_scale, v_scale: float32, [1] or [K], for float8 caches.
    """
    block_size = kv_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, offsets = slots // block_size, slots % block_size
    for side, (new, scale) in enumerate(((key, k_scale), (value, v_scale))):
        rows = quantize_to_cache(new[written], scale, kv_cache.dtype)
        _bits(kv_cache[:, side])[blocks, offsets] = _bits(rows)


def _bits(x: Tensor) -> Tensor:
    """A float8 tensor as bytes, since indexing is not defined for float8; others as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
