"""The rules that turn a backend's claims and a configuration into reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from attnbackend.types import Reason

if TYPE_CHECKING:
    from attnbackend.backend import AttentionBackend
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["configuration_reasons"]

Backend = type["AttentionBackend"]


class _Rule(NamedTuple):
    field: str
    accepts: Callable[[Backend, Any], bool]
    allowed: Callable[[Backend], str]


def _flag(field: str, claim: str, unset: Any) -> _Rule:
    """A feature that is asked for by a value other than ``unset`` and claimed by a boolean."""
    return _Rule(
        field, lambda b, v: v == unset or bool(getattr(b, claim)), lambda b: f"{unset}, {b.get_name()} has no {claim}"
    )  # fmt: skip


def _same(field: str, claim: str) -> _Rule:
    """A property that must agree both ways, such as latent against standard attention."""
    return _Rule(field, lambda b, v: v == getattr(b, claim), lambda b: str(getattr(b, claim)))


def _list(values: Any) -> str:
    return ", ".join(str(v).removeprefix("torch.") for v in values) or "none"


_RULES = (
    _Rule("device_type", lambda b, v: v in b.supported_device_types, lambda b: _list(b.supported_device_types)),
    _Rule(
        "compute_capability",
        lambda b, v: b.supports_compute_capability(v),
        lambda b: f"at least {b.min_compute_capability}",
    ),
    _same("use_mla", "is_mla"),
    _same("use_sparse", "is_sparse"),
    _Rule("head_size", lambda b, v: b.supports_head_size(v), lambda b: _list(b.supported_head_sizes)),
    _Rule("dtype", lambda b, v: b.supports_dtype(v), lambda b: _list(b.supported_dtypes)),
    _Rule(
        "kv_cache_dtype",
        lambda b, v: b.supports_kv_cache_dtype(v),
        lambda b: _list(b.supported_kv_cache_dtypes),
    ),
    _Rule(
        "block_size",
        lambda b, v: v is None or b.supports_block_size(v),
        lambda b: _list(b.supported_block_sizes),
    ),
    _Rule(
        "kv_cache_layout",
        lambda b, v: v is None or v in b.supported_layouts,
        lambda b: _list(b.supported_layouts),
    ),
    _Rule("attn_type", lambda b, v: b.supports_attn_type(v), lambda b: _list(b.supported_attn_types)),
    _flag("causal", "supports_non_causal", True),
    _flag("sliding_window", "supports_sliding_window", None),
    _flag("logits_soft_cap", "supports_logits_soft_cap", 0.0),
    _flag("has_alibi", "supports_alibi", False),
    _flag("has_sinks", "supports_sinks", False),
    _flag("has_query_scale", "supports_query_scale", False),
    _flag("has_output_scale", "supports_output_scale", False),
    _flag("has_output_block_scale", "supports_output_block_scale", False),
    _flag("per_head_quant_scales", "supports_per_head_quant_scales", False),
    _Rule(
        "needs_lse",
        lambda b, v: not v or b.supports_lse(),
        lambda b: f"False, {b.get_name()} declares no lse_base",
    ),
)  # fmt: skip


def _head_counts(backend: Backend, config: AttentionSelectorConfig) -> Iterator[Reason]:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        yield Reason("num_heads", heads, f"multiples of num_kv_heads={kv_heads}")
    elif backend.max_group_size is not None and heads // kv_heads > backend.max_group_size:
        yield Reason("num_heads", heads, f"up to {backend.max_group_size} for each of {kv_heads} kv heads")


def configuration_reasons(backend: Backend, config: AttentionSelectorConfig) -> list[Reason]:
    """Every rule that ``config`` breaks, in the order of the rules."""
    broken = [
        Reason(rule.field, value, rule.allowed(backend))
        for rule in _RULES
        if not rule.accepts(backend, value := getattr(config, rule.field))
    ]
    return [*broken, *_head_counts(backend, config), *backend.supports_combination(config)]
