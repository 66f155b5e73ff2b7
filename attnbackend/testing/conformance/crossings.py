"""Few cases in which every claim meets every other: a kernel may take a path of its own for any two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.kv_cache import KV_CACHE_DTYPES
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.kinds import SPANS
from attnbackend.testing.conformance.sizes import probing_sizes
from attnbackend.types import AttentionType, describe

__all__ = ["Options", "covering", "crossed", "crossings"]

Choice = dict[str, str]
"""Axis -> value; "" is what most cases have."""
Options = dict[str, dict[str, Any]]
"""Value -> changes of an `AttentionCase`."""

_LARGE = ("long_context", "long_prompt", "many_requests")
_BATCHES = (MIXED, DECODE, "uniform_of_four", "prefill", PADDED, *_LARGE)
_HEADS = ((9, 3), (3, 3), (16, 1))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BY_HEAD = "scales_by_head"


def covering(axes: Mapping[str, Sequence[str]], allowed: Callable[[Choice], bool]) -> Iterator[Choice]:
    """Choices of a value for each axis which hold all pairs of values that may stand together.

    Args:
        axes: at least two; any choice for some of them that is allowed can be completed.
        allowed: of a choice for some of the axes.
    """
    pairs = ({a: x, b: y} for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b])
    left = {frozenset(pair.items()): pair for pair in pairs if allowed(pair)}
    while left:
        choice = dict(next(iter(left.values())))
        for axis in [axis for axis in axes if axis not in choice]:
            gain = {
                value: sum(frozenset(((axis, value), item)) in left for item in choice.items())
                for value in axes[axis]
                if allowed({**choice, axis: value})
            }
            choice[axis] = max(gain, key=gain.__getitem__)
        for two in combinations(choice.items(), 2):
            left.pop(frozenset(two), None)
        yield choice


def crossings(
    backend: type[AttentionBackend], base: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, batch and changes of ``base``, the fields of an `AttentionCase`, for each case."""
    for name, batch, changes in crossed(_axes(backend), base, _allowed):
        if _BY_HEAD in name:
            heads = range(changes.get("num_kv_heads", base["num_kv_heads"]))
            changes |= {"k_scale": tuple(0.5**n for n in heads), "v_scale": tuple(0.25 + n for n in heads)}
        yield name, batch, changes


def crossed(
    axes: Mapping[str, Options], base: dict[str, Any], allowed: Callable[[Choice], bool]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Names, batches and changes of ``base`` that hold all pairs; what is so in ``base`` is no change."""
    changed: dict[str, Options] = {
        axis: {"": {}} | {value: x for value, x in options.items() if not x.items() <= base.items()}
        for axis, options in axes.items()
    }
    for choice in covering({"batch": _BATCHES} | {axis: list(x) for axis, x in changed.items()}, allowed):
        batch = choice.pop("batch")
        changes = {k: v for axis, value in choice.items() for k, v in changed[axis][value].items()}
        yield "_".join(["crossed", *filter(None, choice.values())]), batch, changes


def _allowed(choice: Choice) -> bool:
    """What the contract allows together: an encoder has no cache, and cross attention no positions."""
    if choice.get("mask") in ("encoder_only", "encoder"):
        return not any(choice.get(axis) for axis in ("cache", "layout", "layers"))
    return not (choice.get("mask") == "cross" and choice.get("alibi"))


def _axes(backend: type[AttentionBackend]) -> dict[str, Options]:
    flags: dict[str, tuple[bool, dict[str, Any]]] = {
        "layers": (True, {"num_layers": 3}),
        "strided": (True, {"strided_tensors": True}),
        "factor": (True, {"scale": 0.3}),
        "cap": (backend.supports_logits_soft_cap, {"logits_soft_cap": 3.0}),
        "alibi": (backend.supports_alibi, {"use_alibi": True}),
        "sinks": (backend.supports_sinks, {"use_sinks": True}),
    }
    return {
        "mask": _masks(backend),
        "cache": _caches(backend),
        "dtype": {describe(d): {"dtype": d} for d in _DTYPES if backend.supports_dtype(d)},
        "heads": {f"{q}_over_{k}": {"num_heads": q, "num_kv_heads": k} for q, k in _HEADS},
        **{name: dict(_sizes(backend, name)) for name in ("head_size", "block_size")},
        "layout": {x.value: {"layout": x.value} for x in backend.supported_layouts},
        **{name: {name: changes} if claimed else {} for name, (claimed, changes) in flags.items()},
    }


def _masks(backend: type[AttentionBackend]) -> Options:
    full = backend.supports_non_causal
    masks: dict[str, tuple[bool, dict[str, Any]]] = {
        "window_of_7": (backend.supports_sliding_window, {"sliding_window": 7}),
        "window_of_21": (backend.supports_sliding_window, {"sliding_window": 21}),
        "chunks": (backend.supports_attention_chunks, {"attention_chunk_size": 21}),
        "not_causal": (full, {"causal": False}),
        "ranges": (backend.supports_bidirectional_ranges, {"bidirectional_ranges": SPANS}),
        "encoder_only": (full, {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}),
        "cross": (full, {"attn_type": AttentionType.ENCODER_DECODER, "causal": False}),
    }
    return {
        name: changes
        for name, (claimed, changes) in masks.items()
        if claimed and backend.supports_attn_type(changes.get("attn_type", AttentionType.DECODER))
    }


def _caches(backend: type[AttentionBackend]) -> Options:
    names = [name for name in KV_CACHE_DTYPES if name != "auto" and backend.supports_kv_cache_dtype(name)]
    found: Options = {}
    for name in [n for n in names if not n.startswith("fp8")][:1]:
        found[f"cache_{name}"] = {"kv_cache_dtype": name}
    for name in [n for n in names if n.startswith("fp8")][:1]:
        found[f"cache_{name}"] = {"kv_cache_dtype": name, "k_scale": 0.25, "v_scale": 0.5}
        if backend.supports_per_head_quant_scales:
            found[_BY_HEAD] = {"kv_cache_dtype": name}
    return found


def _sizes(backend: type[AttentionBackend], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is typical and large, and what is odd."""
    claimed = getattr(backend, f"supported_{name}s")
    sizes = [n for n in probing_sizes(claimed, typical=(48, 128), largest=128) if n in (48, 128) or n % 16]
    for size in [n for n in sizes if getattr(backend, f"supports_{name}")(n)][-3:]:
        yield f"{name}_{size}", {name: size}
