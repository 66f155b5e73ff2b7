"""What binding a call to an implementation takes, whatever the role: choice, signatures, a bounded memory."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.registry import resolve_backend
from attnbackend.selector import AttentionSelectorConfig, backend_reasons, select_backend

__all__ = ["LN_2", "choose_backend", "remember", "rows_of", "typed_cache", "vector_of", "whole_of"]

LN_2 = math.log(2.0)
_CACHE_LIMIT = 4096
V = TypeVar("V")


def choose_backend(name: str | None, config: AttentionSelectorConfig) -> type[AttentionBackend]:
    """The named backend if it can serve, or the selected one where ``name`` is None."""
    if name is None:
        return select_backend(config).backend
    reasons = backend_reasons(name, config)
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(f"backend {name!r} cannot serve this call:{listed}")
    return resolve_backend(name)


def typed_cache(kv_cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """A float8 cache that came as bytes, in its own type."""
    if kv_cache.dtype is not torch.uint8:
        return kv_cache
    return kv_cache.view(resolve_kv_cache_dtype(kv_cache_dtype, kv_cache.dtype))


def rows_of(x: Tensor | None) -> Any:
    """Signature of a tensor whose first dimension is the number of tokens."""
    return x if x is None else (x.shape[1:], x.dtype, x.device, x.stride(-1))


def whole_of(x: Tensor | None) -> Any:
    """Signature of any other tensor."""
    return x if x is None else (x.shape, x.dtype, x.device)


def vector_of(x: Tensor | None) -> Any:
    """Signature of what is read as it lies in memory."""
    return x if x is None else (x.shape, x.dtype, x.device, x.is_contiguous())


def remember(cache: dict[Any, V], key: Any, value: V) -> V:
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()
    cache[key] = value
    return value
