"""How a backend's cache shape relates to the standard one that test batches have."""

from __future__ import annotations

from attnbackend.backend import AttentionBackend
from attnbackend.testing.conformance.sizes import pick_size

__all__ = ["cache_permutation"]


def cache_permutation(backend: type[AttentionBackend]) -> tuple[int, ...]:
    """The order in which the backend's cache has the dimensions (blocks, 2, tokens, heads, elements).

    Strides may be anything, so a permuted view of a standard cache is a cache of the backend.

    Raises:
        ValueError: the backend's shape is no permutation of the standard one.
    """
    head = pick_size(backend.supported_head_sizes, 80)
    block = pick_size(backend.supported_block_sizes, 48)
    standard = (1009, 2, block, 7, head)
    shape = tuple(backend.get_kv_cache_shape(1009, block, 7, head))
    if sorted(shape) != sorted(standard) or (len(set(standard)) < 5 and shape != standard):
        raise ValueError(
            f"the cache of {backend.get_name()} has the shape {shape} for 1009 blocks of {block} tokens, 7 "
            f"heads of {head}; these checks know permutations of {standard} only"
        )
    if shape == standard:
        return (0, 1, 2, 3, 4)
    return tuple(standard.index(size) for size in shape)
