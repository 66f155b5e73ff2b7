"""Choice of a backend: a pure function of a configuration, the platform, who forces what, and the registry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from attnbackend._torch_compat import outside_fake_mode
from attnbackend.backend import AttentionBackend
from attnbackend.config import forced_backend
from attnbackend.platforms import Platform, backend_priorities, current_platform
from attnbackend.registry import (
    _BackendMember,
    backend_names,
    is_implemented,
    registry_generation,
    resolve_backend,
)
from attnbackend.types import AttentionType, KVCacheLayout, Reason

__all__ = ["AttentionSelectorConfig", "Selection", "backend_reasons", "get_attn_backend", "select_backend"]


@dataclass(frozen=True, kw_only=True)
class AttentionSelectorConfig:
    """Everything that a choice depends on. No field has a default: leaving one out would hide a choice."""

    device_type: str
    compute_capability: tuple[int, int] | None
    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    kv_cache_dtype: str
    block_size: int | None
    """Tokens a block; None: not decided yet."""
    kv_cache_layout: KVCacheLayout | None
    """None: not decided yet, or any strides."""
    attn_type: AttentionType
    causal: bool
    sliding_window: int | None
    logits_soft_cap: float
    has_alibi: bool
    has_sinks: bool
    needs_lse: bool
    has_query_scale: bool
    has_output_scale: bool
    has_output_block_scale: bool
    per_head_quant_scales: bool
    use_mla: bool
    use_sparse: bool

    @classmethod
    def dense(cls, **fields: object) -> AttentionSelectorConfig:
        """A plain causal decoder layer on the present platform, with the named fields changed.

        ``device_type``, ``head_size``, ``num_heads``, ``num_kv_heads`` and ``dtype`` have no default here
        either; every other field starts as "not asked for".
        """
        plain: dict[str, object] = {
            "kv_cache_dtype": "auto", "block_size": None, "kv_cache_layout": None,
            "attn_type": AttentionType.DECODER, "causal": True, "sliding_window": None,
            "logits_soft_cap": 0.0, "has_alibi": False, "has_sinks": False, "needs_lse": False,
            "has_query_scale": False, "has_output_scale": False, "has_output_block_scale": False,
            "per_head_quant_scales": False, "use_mla": False, "use_sparse": False,
        }  # fmt: skip
        if "compute_capability" not in fields:
            device_type = str(fields.get("device_type"))
            plain["compute_capability"] = current_platform(device_type).compute_capability
        return cls(**{**plain, **fields})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Selection:
    """A chosen backend and why."""

    name: str
    backend: type[AttentionBackend]
    because: str


def get_attn_backend(
    config: AttentionSelectorConfig, *, backend: str | _BackendMember | None = None
) -> type[AttentionBackend]:
    """The backend that serves ``config``; see `select_backend`."""
    return select_backend(config, backend=backend).backend


def select_backend(
    config: AttentionSelectorConfig, *, backend: str | _BackendMember | None = None
) -> Selection:
    """The backend that serves ``config``, with the reason for the choice.

    A backend named here stands above one named by `set_config`, which stands above ``ATTNBACKEND``. Results
    are cached on all that they depend on: a changed environment or registry takes effect at once.

    Raises:
        ValueError: the named backend is unknown or cannot serve, or none can; reasons carry values.
    """
    name = backend.key if isinstance(backend, _BackendMember) else backend
    forced = (name, "the caller") if name is not None else forced_backend()
    is_rocm = torch.version.hip is not None
    return _select(config, is_rocm, forced, registry_generation())


@lru_cache(maxsize=4096)
def _select(
    config: AttentionSelectorConfig, is_rocm: bool, forced: tuple[str, str] | None, generation: int
) -> Selection:
    if forced is not None:
        return _select_named(config, *forced)
    platform = Platform(config.device_type, config.compute_capability, is_rocm)
    refused: dict[str, list[Reason]] = {}
    for name in backend_priorities(platform, use_mla=config.use_mla):
        reasons = backend_reasons(name, config)
        if not reasons:
            place = f"first of {len(refused) + 1} tried in the order for {config.device_type}"
            return Selection(name, resolve_backend(name), place)
        refused[name] = reasons
    tried = "".join(f"\n  {name}: {'; '.join(map(str, rs))}" for name, rs in refused.items())
    raise ValueError(f"no attention backend can serve {config}. Tried:{tried or ' none'}")


def _select_named(config: AttentionSelectorConfig, name: str, by: str) -> Selection:
    try:
        cls = resolve_backend(name)
    except ValueError as error:
        raise ValueError(f"backend {name!r}, named by {by}: {error}") from None
    reasons = backend_reasons(name, config)
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(f"backend {name!r}, named by {by}, cannot serve this configuration:{listed}")
    return Selection(name, cls, f"named by {by}")


def backend_reasons(name: str, config: AttentionSelectorConfig) -> list[Reason]:
    """Why ``name`` cannot serve ``config``: constraints first, then whether its kernels run here at all.

    ImportError and OSError while importing or probing are a reason; other exceptions propagate, since they
    are faults of the backend.
    """
    if name in backend_names() and not is_implemented(name):
        return [Reason("probe", "not implemented", "a registered class")]
    try:
        cls = resolve_backend(name)
        with outside_fake_mode():
            probe = cls.unavailable_reason(config.device_type)
    except (ImportError, OSError) as error:
        return [Reason("probe", f"{type(error).__name__}: {error}", "an importable backend")]
    reasons = cls.validate_configuration(config)
    return [*reasons, Reason("probe", probe, "a working installation")] if probe else reasons
