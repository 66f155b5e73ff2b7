"""What the registry and the backend classes say about each backend, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from attnbackend._torch_compat import outside_fake_mode
from attnbackend.backend import AttentionBackend
from attnbackend.ops import library
from attnbackend.ops.generate import backend_op
from attnbackend.registry import (
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
    backend_names,
    backend_path,
    is_implemented,
    is_overridden,
    resolve_backend,
)
from attnbackend.types import AttentionType

__all__ = ["BackendFacts", "all_backend_facts", "backend_facts", "present_device_types"]

Status = Literal["ready", "unavailable", "not implemented"]

_FLAGS = {
    "is_mla": "MLA",
    "is_sparse": "sparse",
    "is_ssm": "state space",
    "supports_sliding_window": "sliding window",
    "supports_logits_soft_cap": "soft-cap",
    "supports_alibi": "alibi",
    "supports_sinks": "sinks",
    "supports_non_causal": "non-causal",
    "supports_attention_chunks": "attention chunks",
    "supports_bidirectional_ranges": "bidirectional ranges",
    "supports_query_scale": "query scale",
    "supports_quantized_query": "quantized query",
    "supports_output_scale": "output quantization",
    "supports_output_block_scale": "block-scaled output quantization",
    "supports_per_head_quant_scales": "per-head scales",
    "is_deterministic": "deterministic",
}
"""Claim of the class -> what a person calls it."""

_KINDS = {
    AttentionType.ENCODER: "encoder",
    AttentionType.ENCODER_ONLY: "encoder only",
    AttentionType.ENCODER_DECODER: "cross attention",
}
"""Kinds of attention beside a decoder's -> what a person calls them."""


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """A backend as it stands in this process.

    Attributes:
        name: what selects it.
        status: "ready" when its kernels run on a device that is here.
        reason: why it is not ready; None when it is.
        source: "built-in", "third-party", or "override" for a built-in name with another class.
        devices: device types that it claims.
        ops: its ops, with namespace.
        features: what it claims beyond plain causal attention.
        dtypes, kv_cache_dtypes, head_sizes, block_sizes: claims, as text.
        class_path: dotted path of its class; None when it has none.
        library: which of several libraries serves; None where there is no choice, or none is here.
    """

    name: str
    status: Status
    reason: str | None
    source: str
    devices: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    kv_cache_dtypes: list[str] = field(default_factory=list)
    head_sizes: list[str] = field(default_factory=list)
    block_sizes: list[str] = field(default_factory=list)
    class_path: str | None = None
    library: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def all_backend_facts() -> list[BackendFacts]:
    """Facts of every name that the registry knows, in its order."""
    return [backend_facts(name) for name in backend_names()]


def backend_facts(name: str) -> BackendFacts:
    """Facts of one backend. A class that cannot be imported or probed is unavailable, and why."""
    known: dict[str, Any] = {"name": name, "source": _source(name)}
    if not is_implemented(name):
        return BackendFacts(status="not implemented", reason="no class is registered", **known)
    known["class_path"] = backend_path(name)
    try:
        cls = resolve_backend(name)
    except Exception as error:  # a broken plugin must not hide the others
        return BackendFacts(status="unavailable", reason=_reason(error), **known)
    reason = _unready_reason(cls)
    return BackendFacts(status="unavailable" if reason else "ready", reason=reason, **known, **_claims(cls))


def present_device_types() -> tuple[str, ...]:
    """Device types that torch can use in this process, accelerators first."""
    present = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available}
    return (*(name for name, is_there in present.items() if is_there()), "cpu")


def _unready_reason(cls: type[AttentionBackend]) -> str | None:
    """Why the backend runs on no device that is here; None when it runs on one."""
    here = [d for d in present_device_types() if d in cls.supported_device_types]
    if not here:
        needed = " or ".join(cls.supported_device_types) or "a device"
        return f"needs {needed}, and there is none here"
    reasons = [_probe(cls, device_type) for device_type in here]
    return None if None in reasons else "; ".join(str(reason) for reason in reasons)


def _probe(cls: type[AttentionBackend], device_type: str) -> str | None:
    try:
        with outside_fake_mode():
            return cls.unavailable_reason(device_type)
    except Exception as error:  # as above
        return _reason(error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _claims(cls: type[AttentionBackend]) -> dict[str, Any]:
    return {
        "devices": list(cls.supported_device_types),
        "ops": _ops(cls.get_name()),
        "features": _features(cls),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in cls.supported_dtypes],
        "kv_cache_dtypes": list(cls.supported_kv_cache_dtypes),
        "head_sizes": [str(size) for size in cls.supported_head_sizes],
        "block_sizes": [str(size) for size in cls.supported_block_sizes],
        "library": cls.library(),
    }


def _features(cls: type[AttentionBackend]) -> list[str]:
    flags = [words for claim, words in _FLAGS.items() if getattr(cls, claim)]
    kinds = [words for kind, words in _KINDS.items() if cls.supports_attn_type(kind)]
    return [*flags, *kinds, *(["LSE"] if cls.supports_lse() else [])]


def _ops(name: str) -> list[str]:
    roles = [role for role in vars(library).values() if isinstance(role, library.OpRole)]
    found = (backend_op(name, role) for role in roles)
    return [op.name().removesuffix(".default") for op in found if op is not None]


def _source(name: str) -> str:
    members = (*AttentionBackendEnum, *MambaAttentionBackendEnum)
    if name not in [member.key for member in members]:
        return "third-party"
    return "override" if is_overridden(name) else "built-in"
