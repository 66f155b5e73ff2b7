"""KV cache: where it lies in memory (one function), how it is written.

Shape legend: B blocks, S block_size, K key-value heads, D head size, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnbackend.kv_cache_specs import (
    KV_CACHE_DTYPES,
    LATENT_CACHE_DTYPES,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    resolve_kv_cache_dtype,
    spec_of,
)
from attnbackend.platforms import most_memory

if TYPE_CHECKING:
    from attnbackend.backend import AttentionBackend

__all__ = [
    "KV_CACHE_DTYPES",
    "LATENT_CACHE_DTYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheGeometry",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "allocate_kv_cache",
    "allocate_kv_caches",
    "bits_of",
    "check_room",
    "expand_block_table",
    "kv_cache_geometry",
    "quantize_to_cache",
    "resolve_kv_cache_dtype",
    "resolve_kv_sharing",
    "spec_of",
    "write_kv_cache",
]


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
        """From the first element to the last that is addressed; strides decide, not the shape."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def max_offset(self) -> int:
        """The largest element offset; beyond 2**31 - 1 a kernel must compute offsets in 64 bits."""
        return self.num_elements - 1


def kv_cache_geometry(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    num_blocks: int,
    *,
    block_stride: int | None = None,
) -> KVCacheGeometry:
    """Shape, strides and page bytes of a layer's cache, for one backend.

    Args:
        backend: gives the logical shape and, for the spec's layout, the order in memory.
        spec: what the layer keeps.
        num_blocks: blocks, the reserved block 0 included.
        block_stride: elements from a block to the next where several layers share a buffer;
            None: a page.

    Raises:
        ValueError: the backend cannot hold or address such a cache.
    """
    _check_spec(backend, spec, num_blocks)
    shape = _shape(backend, spec, num_blocks)
    order = tuple(backend.get_kv_cache_stride_order(spec.layout))
    stride = _dense_stride(backend, shape, order)
    page = math.prod(shape) // num_blocks
    if block_stride is not None:
        block_dim = _block_dim(backend, spec, num_blocks)
        _check_block_stride(backend, page, order, block_dim, block_stride)
        stride[block_dim] = block_stride
    page_bytes = page * spec.cache_dtype.itemsize
    geometry = KVCacheGeometry(shape, tuple(stride), spec.cache_dtype, page_bytes)
    _check_offsets(backend, geometry, page, num_blocks, block_stride or page)
    return geometry


def _check_spec(backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> None:
    if backend.is_mla != isinstance(spec, MLAAttentionSpec):
        kinds = {True: "latent (MLA) attention", False: "keys and values"}
        raise ValueError(
            f"{backend.get_name()} keeps {kinds[backend.is_mla]} and {type(spec).__name__} is of "
            f"{kinds[not backend.is_mla]}; take a backend with is_mla={not backend.is_mla}"
        )
    name = backend.get_name()
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks} must be at least 1 (block 0 is reserved)")
    if not backend.supports_block_size(spec.block_size):
        allowed = ", ".join(map(str, backend.supported_block_sizes))
        raise ValueError(f"block_size={spec.block_size} does not suit {name}; allowed: {allowed}")
    if spec.layout not in backend.supported_layouts:
        allowed = ", ".join(backend.supported_layouts)
        raise ValueError(f"layout={spec.layout} does not suit {name}; allowed: {allowed}")


def _shape(backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
    return tuple(
        backend.get_kv_cache_shape(
            num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype
        )
    )


def _dense_stride(backend: type[AttentionBackend], shape: Sequence[int], order: Sequence[int]) -> list[int]:
    if sorted(order) != list(range(len(shape))):
        raise ValueError(
            f"{backend.get_name()}: stride order {tuple(order)} does not name each dimension of "
            f"the cache's shape {tuple(shape)} once; override get_kv_cache_stride_order()"
        )
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return stride


def _block_dim(backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> int:
    """The dimension of the logical shape that counts blocks."""
    shapes = (_shape(backend, spec, n) for n in (num_blocks, num_blocks + 1))
    grown = [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if len(grown) != 1:
        raise ValueError(f"{backend.get_name()}: no one dimension of its cache counts blocks")
    return grown[0]


def _check_block_stride(
    backend: type[AttentionBackend], page: int, order: Sequence[int], block_dim: int, stride: int
) -> None:
    name = backend.get_name()
    if order[0] != block_dim:
        raise ValueError(
            f"{name} cannot share a buffer with other layers: blocks are not the slowest dimension "
            f"of its stride order {tuple(order)}, so a block's data is not in one piece"
        )
    if stride < page:
        raise ValueError(f"block_stride={stride} lets the blocks of {name} overlap; allowed: at least {page}")


def _check_offsets(
    backend: type[AttentionBackend],
    geometry: KVCacheGeometry,
    page: int,
    num_blocks: int,
    block_stride: int,
) -> None:
    limit = backend.max_cache_offset
    if limit is not None and geometry.max_offset > limit:
        raise ValueError(
            f"num_blocks={num_blocks} with {block_stride} elements from block to block reaches "
            f"offset {geometry.max_offset}, but {backend.get_name()} addresses up to {limit}; "
            f"allowed: at most {max(0, (limit + 1 - page) // block_stride + 1)} blocks"
        )


def allocate_kv_cache(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    num_blocks: int,
    device: torch.device | str,
) -> Tensor:
    """A cache of one layer, in its logical shape; its contents are undefined.

    Raises:
        ValueError: the backend has no such cache, or the device no memory for it.
    """
    geometry = kv_cache_geometry(backend, spec, num_blocks)
    storage = _storage(num_blocks, geometry.num_elements, geometry.dtype, device)
    return storage.as_strided(geometry.shape, geometry.stride)


def allocate_kv_caches(
    backends: Mapping[str, type[AttentionBackend]],
    specs: Mapping[str, AttentionSpec],
    num_blocks: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The caches of all layers in one buffer, all pages of a block side by side.

    A block's data of every layer is then one contiguous piece, which is what moving a block to
    another process or to disk wants.

    Args:
        backends: each layer's backend, by layer name.
        specs: each layer's spec, by layer name; all of one element type and block size.
        num_blocks: blocks, the reserved block 0 included.
        device: where the buffer lies.

    Raises:
        ValueError: the specs do not agree, a layer lacks its spec or backend, or a backend cannot
            share a buffer, or the device has no memory for it.
    """
    dtype = _common_dtype(backends, specs)
    pages = {
        name: kv_cache_geometry(backends[name], spec, 1).page_size_bytes // dtype.itemsize
        for name, spec in specs.items()
    }
    block_stride = sum(pages.values())
    storage = _storage(num_blocks, num_blocks * block_stride, dtype, device)
    caches, offset = {}, 0
    for name, spec in specs.items():
        g = kv_cache_geometry(backends[name], spec, num_blocks, block_stride=block_stride)
        caches[name] = storage.as_strided(g.shape, g.stride, offset)
        offset += pages[name]
    return caches


def _common_dtype(
    backends: Mapping[str, type[AttentionBackend]], specs: Mapping[str, AttentionSpec]
) -> torch.dtype:
    """The element type of layers that are to share a buffer."""
    if backends.keys() != specs.keys():
        lone = ", ".join(sorted(backends.keys() ^ specs.keys()))
        raise ValueError(f"each layer needs a backend and a spec; only one of the two for: {lone}")
    for what, found in (
        ("element type", sorted({str(spec.cache_dtype) for spec in specs.values()})),
        ("block_size", sorted({spec.block_size for spec in specs.values()})),
    ):
        if len(found) != 1:
            values = ", ".join(map(str, found)) or "no layer"
            raise ValueError(f"layers of one buffer must share one {what}, got {values}")
    return next(iter(specs.values())).cache_dtype


def _storage(num_blocks: int, num_elements: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory of any type, float8 included, on any device; a CPU touches no page before its use."""
    num_bytes, place = num_elements * dtype.itemsize, torch.device(device)
    check = partial(check_room, num_blocks, num_bytes // max(1, num_blocks), place)
    if place.type == "cpu":  # Systems promise more than they have.
        check()
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=place).view(dtype)
    except (RuntimeError, TypeError):  # TypeError: more than torch can count
        check()
        raise


def check_room(num_blocks: int, block_bytes: int, device: torch.device) -> None:
    """Raises ValueError where blocks of so many bytes, all that they take in caches, are too many."""
    room = most_memory(device)
    if num_blocks * block_bytes > room:
        raise ValueError(
            f"num_blocks={num_blocks} of {block_bytes} bytes take {num_blocks * block_bytes} bytes, and "
            f"{device} has {room} for caches; allowed: at most {room // block_bytes} blocks, or more with a "
            "smaller block_size or kv_cache_dtype"
        )


def expand_block_table(block_table: Tensor, block_size: int, kernel_block_size: int) -> Tensor:
    """The block table that a kernel with smaller blocks reads, over the same cache.

    Each block of ``block_size`` tokens is ``block_size // kernel_block_size`` consecutive kernel
    blocks, so a token keeps its slot number: ``slot // block_size`` is its block for the manager,
    ``slot // kernel_block_size`` the same place for the kernel. The kernel's view must number its
    blocks so: keys and values may not alternate from block to block.

    Args:
        block_table: integer [R, W].
        block_size: tokens a block of ``block_table`` and of the slot mapping.
        kernel_block_size: tokens a block of the kernel's view of the cache.

    Returns:
        [R, W * block_size // kernel_block_size], of the same type.

    Raises:
        ValueError: ``block_size`` is not a multiple of ``kernel_block_size``.
    """
    if kernel_block_size < 1 or block_size % kernel_block_size:
        raise ValueError(
            f"kernel_block_size={kernel_block_size} does not divide block_size={block_size}, which "
            "the block table and the slot mapping count in"
        )
    parts = block_size // kernel_block_size
    within = torch.arange(parts, dtype=block_table.dtype, device=block_table.device)
    return (block_table.unsqueeze(-1) * parts + within).flatten(-2)


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
        chain = _sharing_chain(layer, targets)
        unknown = [name for name in chain if name not in specs]
        if unknown:
            raise ValueError(f"unknown layer {unknown[0]!r} in the chain {' -> '.join(chain)}")
        owner = chain[-1]
        if specs[owner] != specs[layer]:
            raise ValueError(
                f"layer {layer!r} cannot share the cache of {owner!r}: {specs[layer]} is not {specs[owner]}"
            )
        owners[layer] = owner
    return owners


def _sharing_chain(layer: str, targets: Mapping[str, str]) -> list[str]:
    chain = [layer]
    while chain[-1] in targets:
        following = targets[chain[-1]]
        if following in chain:
            raise ValueError(f"layers share caches in a circle: {' -> '.join([*chain, following])}")
        chain.append(following)
    return chain


def quantize_to_cache(x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """New keys or values in the cache's type; float8 saturates at the format's finite range.

    Args:
        x_TKD: [T, K, D].
        scale: float32, 1 or K elements: real = stored * scale; None for 1.
        dtype: the cache's type.

    Raises:
        ValueError: a scale is given for a type that is not scaled.
    """
    if dtype.itemsize > 1:
        if scale is not None:
            raise ValueError(f"a scale is given, but a cache of {dtype} is not scaled; pass None")
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
        slot_mapping: int64 [T], ``block * S + offset`` with S the cache's own block size; negative
            means do not write.
        k_scale, v_scale: float32, [1] or [K], for float8 caches.
    """
    block_size = kv_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, offsets = slots // block_size, slots % block_size
    for side, (new, scale) in enumerate(((key, k_scale), (value, v_scale))):
        rows = quantize_to_cache(new[written], scale, kv_cache.dtype)
        bits_of(kv_cache[:, side])[blocks, offsets] = bits_of(rows)


def bits_of(x: Tensor) -> Tensor:
    """A float8 tensor as bytes, since indexing is not defined for float8; others as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
