"""The rules that turn a backend's claims and a configuration into reasons, and into remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnbackend.types import MultipleOf, Reason, describe

if TYPE_CHECKING:
    from attnbackend.backend import AttentionBackend
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["Change", "configuration_reasons", "single_changes"]

Backend = type["AttentionBackend"]
Limits = tuple[int | MultipleOf, ...]


@dataclass(frozen=True)
class Change:
    """One field of a configuration set to another value."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field} {describe(self.old)} -> {describe(self.new)}"


@dataclass(frozen=True)
class _Rule:
    """One field's check: what is accepted, how to say so, and which values to try instead."""

    field: str
    accepts: Callable[[Backend, Any], bool]
    allowed: Callable[[Backend], str]
    alternatives: Callable[[Backend, Any], Iterable[Any]]


def _listed(field: str, claim: str, method: str | None = None, *, optional: bool = False) -> _Rule:
    """A value that must be in a claimed list, or that a ``supports_*`` method accepts.

    With ``optional``, None stands for "not decided yet" and is accepted.
    """

    def accepts(backend: Backend, value: Any) -> bool:
        if optional and value is None:
            return True
        claimed = getattr(backend, claim)
        return bool(getattr(backend, method)(value)) if method else value in claimed

    def allowed(backend: Backend) -> str:
        if method and _overrides(backend, method):
            return f"what {backend.get_name()}.{method}() accepts"
        return ", ".join(map(describe, getattr(backend, claim))) or "none"

    return _Rule(field, accepts, allowed, lambda b, v: _near(getattr(b, claim), v))


def _near(claimed: Limits | tuple[Any, ...], value: Any) -> Iterator[Any]:
    """Claimed values; of a range of sizes, the nearest below and above."""
    for item in claimed:
        if isinstance(item, MultipleOf):
            wanted = value if isinstance(value, int) else item.base
            yield from (n for n in (item.at_most(wanted), item.at_least(wanted)) if n in item)
        else:
            yield item


def _overrides(backend: Backend, method: str) -> bool:
    from attnbackend.backend import AttentionBackend

    return getattr(backend, method).__func__ is not getattr(AttentionBackend, method).__func__


def _flag(field: str, claim: str, unset: Any) -> _Rule:
    """A feature that is asked for by a value other than ``unset`` and claimed by a boolean."""
    return _Rule(
        field,
        lambda b, v: v == unset or getattr(b, claim),
        lambda b: f"{unset}, since {b.get_name()} has no {claim}",
        lambda b, v: (unset,),
    )


def _same(field: str, claim: str) -> _Rule:
    """A property that must agree both ways, such as latent against standard attention."""
    return _Rule(
        field,
        lambda b, v: v == getattr(b, claim),
        lambda b: str(getattr(b, claim)),
        lambda b, v: (not v,),
    )


def _capability_allowed(backend: Backend) -> str:
    if _overrides(backend, "supports_compute_capability"):
        return f"what {backend.get_name()}.supports_compute_capability() accepts"
    return f"at least {backend.min_compute_capability}"


_RULES = (
    _listed("device_type", "supported_device_types"),
    _Rule(
        "compute_capability",
        lambda b, v: b.supports_compute_capability(v),
        _capability_allowed,
        lambda b, v: (b.min_compute_capability,) if b.min_compute_capability else (),
    ),
    _same("use_mla", "is_mla"),
    _same("use_sparse", "is_sparse"),
    _listed("head_size", "supported_head_sizes", "supports_head_size"),
    _listed("dtype", "supported_dtypes", "supports_dtype"),
    _listed("kv_cache_dtype", "supported_kv_cache_dtypes", "supports_kv_cache_dtype"),
    _listed("block_size", "supported_block_sizes", "supports_block_size", optional=True),
    _listed("kv_cache_layout", "supported_layouts", optional=True),
    _listed("attn_type", "supported_attn_types", "supports_attn_type"),
    _flag("causal", "supports_non_causal", True),
    _flag("sliding_window", "supports_sliding_window", None),
    _flag("attention_chunk_size", "supports_attention_chunks", None),
    _flag("logits_soft_cap", "supports_logits_soft_cap", 0.0),
    _flag("has_alibi", "supports_alibi", False),
    _flag("has_sinks", "supports_sinks", False),
    _flag("has_bidirectional_ranges", "supports_bidirectional_ranges", False),
    _flag("has_query_scale", "supports_query_scale", False),
    _flag("has_quantized_query", "supports_quantized_query", False),
    _flag("has_output_scale", "supports_output_scale", False),
    _flag("has_output_block_scale", "supports_output_block_scale", False),
    _flag("per_head_quant_scales", "supports_per_head_quant_scales", False),
    _Rule(
        "needs_lse",
        lambda b, v: not v or b.supports_lse(),
        lambda b: f"False, since {b.get_name()} declares no lse_base",
        lambda b, v: (False,),
    ),
)


def _head_counts(backend: Backend, config: AttentionSelectorConfig) -> Iterator[Reason]:
    heads, kv_heads, limit = config.num_heads, config.num_kv_heads, backend.max_group_size
    if heads % kv_heads:
        yield Reason("num_heads", heads, f"multiples of num_kv_heads={kv_heads}")
    elif limit is not None and heads // kv_heads > limit:
        allowed = f"up to {limit * kv_heads}, {limit} for each of num_kv_heads={kv_heads}"
        yield Reason("num_heads", heads, allowed)


def configuration_reasons(backend: Backend, config: AttentionSelectorConfig) -> list[Reason]:
    """Every rule that ``config`` breaks, in the order of the rules; an empty list means none."""
    if backend.is_ssm:
        return [Reason("layer", "attention", "state-space layers, which this backend is for")]
    broken = [
        Reason(rule.field, value, rule.allowed(backend))
        for rule in _RULES
        if not rule.accepts(backend, value := getattr(config, rule.field))
    ]
    return [*broken, *_head_counts(backend, config), *backend.supports_combination(config)]


def single_changes(backend: Backend, config: AttentionSelectorConfig) -> list[Change]:
    """Changes of one field, to a value that the backend claims, after which it accepts ``config``.

    Of sizes that may be any multiple of a number, only the nearest below and above are tried. Empty
    when the backend accepts ``config`` as it is, and when no single change suffices. Head counts
    are the model's and are not varied. The probe is not run again.
    """
    if not backend.validate_configuration(config):
        return []
    found: dict[Change, None] = {}
    for rule in _RULES:
        old = getattr(config, rule.field)
        for new in rule.alternatives(backend, old):
            if new != old and _accepts(backend, config, rule.field, new):
                found[Change(rule.field, old, new)] = None
    return list(found)


def _accepts(backend: Backend, config: AttentionSelectorConfig, field: str, value: Any) -> bool:
    return not backend.validate_configuration(replace(config, **{field: value}))
