"""Choice of a backend: a pure function of configuration, platform, forced name and registry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from attnbackend._torch_compat import outside_fake_mode
from attnbackend.backend import AttentionBackend
from attnbackend.config import ForcedBackend, forced_backend, library_choices
from attnbackend.platforms import Platform, backend_priorities, current_platform
from attnbackend.registry import (
    COMPOSED,
    BackendName,
    any_case_name,
    backend_key,
    backend_names,
    is_implemented,
    registry_generation,
    require_implemented,
    resolve_backend,
)
from attnbackend.types import AttentionType, KVCacheLayout, Reason, Unavailable, describe

__all__ = [
    "AttentionSelectorConfig",
    "Selection",
    "Verdict",
    "backend_reasons",
    "backend_verdict",
    "forced_for",
    "get_attn_backend",
    "priorities_for",
    "select_backend",
]


_POSITIVE = (
    "head_size", "num_heads", "num_kv_heads", "block_size", "sliding_window", "attention_chunk_size",
    "kv_lora_rank",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionSelectorConfig:
    """Everything that a choice depends on. No field has a default: it would hide a choice.

    Raises:
        ValueError: a size that is not positive, or another value that no backend could serve.
        TypeError: ``dtype`` is not a torch.dtype.
    """

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
    attention_chunk_size: int | None
    logits_soft_cap: float
    has_alibi: bool
    has_sinks: bool
    has_bidirectional_ranges: bool
    needs_lse: bool
    has_query_scale: bool
    has_quantized_query: bool
    has_output_scale: bool
    has_output_block_scale: bool
    per_head_quant_scales: bool
    use_mla: bool
    use_sparse: bool
    kv_lora_rank: int | None
    """Of latent attention, whose ``head_size`` is this plus qk_rope_head_dim; None: not latent, or unsaid."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0.0 <= self.logits_soft_cap < math.inf:
            raise ValueError(
                f"logits_soft_cap={self.logits_soft_cap} must be a positive number, or 0 for none"
            )
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype={self.dtype!r} must be a torch.dtype, such as torch.bfloat16")
        object.__setattr__(self, "attn_type", AttentionType(self.attn_type))
        if self.kv_cache_layout is not None:
            object.__setattr__(self, "kv_cache_layout", KVCacheLayout(self.kv_cache_layout))

    @classmethod
    def dense(
        cls,
        *,
        device_type: str,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        compute_capability: tuple[int, int] | Literal["detect"] | None = "detect",
        kv_cache_dtype: str = "auto",
        block_size: int | None = None,
        kv_cache_layout: KVCacheLayout | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        causal: bool = True,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        logits_soft_cap: float = 0.0,
        has_alibi: bool = False,
        has_sinks: bool = False,
        has_bidirectional_ranges: bool = False,
        needs_lse: bool = False,
        has_query_scale: bool = False,
        has_quantized_query: bool = False,
        has_output_scale: bool = False,
        has_output_block_scale: bool = False,
        per_head_quant_scales: bool = False,
        use_mla: bool = False,
        use_sparse: bool = False,
        kv_lora_rank: int | None = None,
    ) -> AttentionSelectorConfig:
        """A plain causal decoder layer on the present platform, with the named fields changed."""
        fields: dict[str, Any] = {k: v for k, v in locals().items() if k != "cls"}
        if compute_capability == "detect":
            fields["compute_capability"] = current_platform(device_type).compute_capability
        return cls(**fields)

    def __str__(self) -> str:
        """Fields that say something: what is not asked for is left out."""
        shown = {
            name: value
            for name, value in vars(self).items()
            if value not in (None, False, 0.0) and (name, value) not in _UNREMARKABLE
        }
        if not self.causal:
            shown["causal"] = False
        return " ".join(f"{name}={describe(value)}" for name, value in shown.items())


_UNREMARKABLE = {("causal", True), ("attn_type", AttentionType.DECODER), ("kv_cache_dtype", "auto")}


@dataclass(frozen=True)
class Selection:
    """A chosen backend and why."""

    name: str
    backend: type[AttentionBackend]
    because: str


_NOT_IMPLEMENTED = Unavailable(value="not implemented", allowed="a class registered under the name")


class Verdict(NamedTuple):
    """What stands against a backend for a configuration; nothing in either part: it serves."""

    constraints: tuple[Reason, ...]
    """Claims that the configuration does not meet; empty too when the class cannot be imported."""
    unavailable: Unavailable | None
    """Why the kernels cannot run here, whatever the configuration."""
    backend: type[AttentionBackend] | None
    """The class; None where there is none to import."""


def get_attn_backend(
    config: AttentionSelectorConfig, *, backend: BackendName | None = None
) -> type[AttentionBackend]:
    """The backend that serves ``config``; see `select_backend`."""
    return select_backend(config, backend=backend).backend


def select_backend(config: AttentionSelectorConfig, *, backend: BackendName | None = None) -> Selection:
    """The backend that serves ``config``, with the reason for the choice.

    A backend named here stands above one named by `set_config`, which stands above ``ATTNBACKEND``.
    Results are cached on configuration, forced name, choices within backends, and the registry's
    generation: a changed environment or registry takes effect at once. What probes find is kept while
    the registry stays.

    Raises:
        ValueError: the named backend is unknown or cannot serve, or none can; reasons carry values.
    """
    is_rocm = torch.version.hip is not None
    return _select(config, is_rocm, forced_for(backend), registry_generation(), library_choices())


def forced_for(backend: BackendName | None) -> ForcedBackend | None:
    """The backend that is forced when a caller asks for ``backend``, and by whom; None: none is."""
    if backend is not None:
        return ForcedBackend(backend_key(backend), "the caller")
    return forced_backend()


def priorities_for(config: AttentionSelectorConfig, *, is_rocm: bool | None = None) -> tuple[str, ...]:
    """Names in the order in which they are tried; ``is_rocm`` None: as torch was built."""
    rocm = torch.version.hip is not None if is_rocm is None else is_rocm
    platform = Platform(config.device_type, config.compute_capability, rocm)
    return backend_priorities(platform, use_mla=config.use_mla)


@lru_cache(maxsize=4096)
def _select(
    config: AttentionSelectorConfig, is_rocm: bool, forced: ForcedBackend | None, generation: int,
    choices: tuple[Any, ...],
) -> Selection:  # fmt: skip
    if forced is not None:
        return _select_forced(config, forced)
    refused: dict[str, list[Reason]] = {}
    for name in priorities_for(config, is_rocm=is_rocm):
        reasons = backend_reasons(name, config)
        if not reasons:
            return Selection(name, resolve_backend(name), _because_first(config, list(refused)))
        refused[name] = reasons
    tried = "".join(f"\n  {name}: {'; '.join(map(str, why))}" for name, why in refused.items())
    nothing = f"\n  none, since no order is known for device_type={config.device_type!r}"
    raise ValueError(
        f"no attention backend can serve {config}. Tried:{tried or nothing}\n"
        "Change what is asked for, or name a backend of your own."
    )


def _because_first(config: AttentionSelectorConfig, refused: list[str]) -> str:
    behind = f"; {', '.join(refused)} cannot serve" if refused else ""
    return f"the first that can serve in the order for {config.device_type}{behind}"


def _select_forced(config: AttentionSelectorConfig, forced: ForcedBackend) -> Selection:
    named = f"backend {forced.name!r}, named by {forced.by}"
    try:
        name = any_case_name(forced.name) if forced.any_case else forced.name
        require_implemented(name)
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from None
    if reasons := backend_reasons(name, config):
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(f"{named}, cannot serve {config}:{listed}")
    return Selection(name, resolve_backend(name), f"named by {forced.by}")


def backend_reasons(name: str, config: AttentionSelectorConfig) -> list[Reason]:
    """Why ``name`` cannot serve ``config``: constraints first, then whether its kernels run here.

    Raises:
        ValueError: an unknown name.
    """
    verdict = backend_verdict(name, config)
    return [*verdict.constraints, *([verdict.unavailable] if verdict.unavailable else [])]


def backend_verdict(name: str, config: AttentionSelectorConfig) -> Verdict:
    """As `backend_reasons`, with constraints and availability apart.

    ImportError and OSError while importing or probing are a reason; other exceptions propagate,
    since they are faults of the backend.
    """
    if name in backend_names() and not is_implemented(name):
        return Verdict((), _NOT_IMPLEMENTED, None)
    with outside_fake_mode():
        try:
            cls = resolve_backend(name)
        except (ImportError, OSError) as error:
            missing = Unavailable(value=_cause(error), allowed="an importable class")
            return Verdict((), missing, None)
        except ValueError as error:
            if COMPOSED not in name:
                raise
            apart = Unavailable(value=str(error), allowed="two backends over one cache")
            return Verdict((), apart, None)
        constraints = tuple(cls.validate_configuration(config))
        try:
            found = cls.unavailable_reason(config.device_type)
        except (ImportError, OSError) as error:
            found = _cause(error)
    return Verdict(constraints, Unavailable(value=found) if found else None, cls)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
