"""Layers that read the cache of another one, and how they get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attnbackend.kv_cache import KVCacheSpec, resolve_kv_sharing
from attnbackend.layers.paged import BoundLayer

__all__ = ["SharingLayer", "bind_layers"]


class SharingLayer(Protocol):
    """A layer that may read another's cache, such as `Attention`."""

    kv_sharing_target: str | None

    def bind(self, layer: BoundLayer) -> None: ...


def bind_layers(
    layers: Mapping[str, SharingLayer], owned: Mapping[str, BoundLayer], specs: Mapping[str, KVCacheSpec]
) -> None:
    """Gives every layer its cache: its own, or that of the layer at the end of its chain of targets.

    Args:
        layers: by name, in the order in which they run.
        owned: what the layers with a cache of their own get.
        specs: every layer's spec.

    Raises:
        ValueError: an unknown target, a circle, specs that differ, a target that runs later, or a layer for
            which there is no cache.
    """
    targets = {name: layer.kv_sharing_target for name, layer in layers.items()}
    owners = resolve_kv_sharing({name: t for name, t in targets.items() if t is not None}, specs)
    order = list(layers)
    for name, layer in layers.items():
        owner = owners.get(name, name)
        if order.index(owner) > order.index(name):
            raise ValueError(f"layer {name!r} shares the cache of {owner!r}, which runs after it")
        if owner not in owned:
            raise ValueError(f"there is no cache for layer {owner!r}; caches: {sorted(owned)}")
        layer.bind(owned[owner]._replace(writes_cache=owner == name))
