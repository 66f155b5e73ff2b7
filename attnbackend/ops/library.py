"""Registration with torch: one library, one way to define an op that writes its arguments.

`Library.define` / `impl` cost a few microseconds a call where `torch.library.custom_op` costs tens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbackend._torch_compat import add_cache_key
from attnbackend.graph_breaks import run_between
from attnbackend.ops.argument_checks import check_has_dimensions
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall, schema_of
from attnbackend.ops.mla_calls import MLAAttentionCall, MLACacheUpdateCall, MLAMixedCall, MLAPrefillCall
from attnbackend.ops.negated import resolve_negated
from attnbackend.ops.transforms import check_no_tangents, refuse_transforms, without_derivatives

__all__ = [
    "ATTENTION",
    "KV_CACHE_UPDATE",
    "MLA_ATTENTION",
    "MLA_CACHE_UPDATE",
    "MLA_MIXED",
    "MLA_PREFILL",
    "NAMESPACE",
    "ROLES",
    "OpRole",
    "define_function",
    "define_op",
    "ops_fingerprint",
    "role_of",
    "serve",
]

NAMESPACE = "attnbackend"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class OpRole:
    """What all ops that can stand in each other's place have in common: arguments and what is written."""

    suffix: str
    """Name of a backend's op after the backend's own, as in ``triton_attn_forward``."""
    call: type
    writes: tuple[str, ...]
    keyword_from: str

    @property
    def schema(self) -> str:
        return schema_of(self.call, writes=self.writes, keyword_from=self.keyword_from)


ATTENTION = OpRole("forward", AttentionCall, ("output", "lse", "output_block_scale"), "scale")
KV_CACHE_UPDATE = OpRole("kv_cache_update", KVCacheUpdateCall, ("kv_cache",), "k_scale")
MLA_ATTENTION = OpRole("forward_mqa", MLAAttentionCall, ("output", "lse"), "scale")
MLA_MIXED = OpRole("forward_mixed", MLAMixedCall, ("output",), "scale")
MLA_PREFILL = OpRole("forward_mha", MLAPrefillCall, ("output", "lse"), "scale")
MLA_CACHE_UPDATE = OpRole("mla_kv_cache_update", MLACacheUpdateCall, ("kv_cache",), "k_scale")
ROLES = (ATTENTION, KV_CACHE_UPDATE, MLA_ATTENTION, MLA_MIXED, MLA_PREFILL, MLA_CACHE_UPDATE)


_ROLES: dict[torch._ops.OpOverload, OpRole] = {}


def define_op(
    name: str, role: OpRole, run: Callable[[Any], None], check: Callable[[Any], object]
) -> torch._ops.OpOverload:  # fmt: skip
    """Defines ``attnbackend::name`` with the role's schema.

    Args:
        name: op name.
        role: gives schema and argument class.
        run: computes, given the bound arguments; in steps that are captured in pieces, between the graphs.
        check: raises on what ``run`` would refuse; it is the whole fake, since the ops return nothing.
    """
    call, own = role.call, f"{NAMESPACE}::{name}"

    def fake(*args: Any, **kwargs: Any) -> None:
        arguments = call(*args, **kwargs)
        check_no_tangents(own, arguments)
        check(arguments)

    op = _define(name, role.schema, lambda *args, **kwargs: serve(own, run, call(*args, **kwargs)), fake)
    _ignore_autocast(name, op)
    _ROLES[op] = role
    return op


def serve(op: str, run: Callable[[Any], None], call: Any) -> None:
    """What an op of a role does, given the bound arguments."""
    check_no_tangents(op, call)
    try:
        run_between(run, call)
    except IndexError:
        check_has_dimensions(call)
        raise


def _define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:  # fmt: skip
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    refuse_transforms(_LIBRARY, op)
    resolve_negated(_LIBRARY, op)
    return op


def _ignore_autocast(name: str, op: torch._ops.OpOverload) -> None:
    """An op computes in the types of its arguments: autocast of the caller would reach into its kernels."""

    def without(device_type: str, *args: Any, **kwargs: Any) -> None:
        with torch.autocast(device_type, enabled=False):
            op(*args, **kwargs)

    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(name, partial(without, device_type), key)


def role_of(op: torch._ops.OpOverload) -> OpRole | None:
    """The role of an op; None for those outside the roles."""
    return _ROLES.get(op)


def define_function(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Defines an op outside the roles, one that returns new tensors; it writes what its schema says."""
    checked = (without_derivatives(name, function) for function in (run, fake))
    return _define(name.removeprefix(f"{NAMESPACE}::"), schema, *checked)


_FAKE_SOURCES = (
    "calls", "checks", "argument_checks", "attention_kinds", "bind", "binding", "mla_calls", "mla_checks",
    "mla_bind", "cpu_linear", "merged_linear", "rope_write", "latent_rope_write", "transforms",
)  # fmt: skip
"""Modules of this package that say what the ops take and what their fakes do."""


def ops_fingerprint() -> str:
    """Changes whenever a role's schema, or the source of what the fakes check, does."""
    schemas = [role.schema for role in ROLES]
    sources = [Path(__file__).with_name(f"{name}.py").read_text() for name in _FAKE_SOURCES]
    return hashlib.sha256("".join(schemas + sources).encode()).hexdigest()


# Inductor's on-disk caches know an op by its name alone: without this, code compiled for an older schema
# would be served, silently wrong.
add_cache_key(f"attnbackend-ops:{ops_fingerprint()}")
