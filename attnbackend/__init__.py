"""attnbackend: the torch.compile registration layer for attention backends.

Everything public is importable from here, lazily: ``import attnbackend`` defines the agnostic ops and imports
nothing heavy beyond torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import attnbackend.ops  # noqa: F401 (defines torch.ops.attnbackend.*)

__version__ = "0.1.0"

_EXPORTS = {
    "backend": ("AttentionBackend", "KVCacheDims"),
    "compiler": ("compile", "compile_layers"),
    "config": ("Config", "get_config", "set_config"),
    "cudagraph": ("BatchDescriptor", "CUDAGraphMode"),
    "explanation": ("Explanation", "explain"),
    "forward_context": ("ForwardContext", "get_forward_context", "set_forward_context"),
    "impl": (
        "AttentionImpl", "AttentionParams", "MLAAttentionImpl", "MLADims", "MLATensors", "OptionalTensors",
        "SparseMLAAttentionImpl",
    ),
    "kv_cache": (
        "AttentionSpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec", "FullAttentionSpec",
        "KVCacheSpec", "MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec",
        "allocate_kv_cache", "allocate_kv_caches", "kv_cache_geometry",
        "resolve_kv_sharing",
    ),
    "metadata": ("AttentionMetadata", "AttentionMetadataBuilder", "BatchLimits", "CommonAttentionMetadata"),
    "mla_metadata": ("MLAMetadata", "MLAMetadataBuilder", "MLAPrefillMetadata"),
    "ops": (
        "attention", "kv_cache_update", "merge_attn_states", "mla_attention", "mla_kv_cache_update",
        "mla_mixed_attention",
    ),
    "programs": ("load_package", "load_program", "save_package"),
    "registry": (
        "AttentionBackendEnum", "MambaAttentionBackendEnum", "backend_names", "clear_override",
        "register_backend", "registry_scope", "resolve_backend",
    ),
    "runtime": ("Engine", "RequestOutput", "SamplingParams"),
    "selector": ("AttentionSelectorConfig", "Selection", "get_attn_backend", "select_backend"),
    "types": ("AttentionCGSupport", "AttentionType", "KVCacheLayout", "LSEBase", "MultipleOf", "Reason"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]

if TYPE_CHECKING:
    from attnbackend.backend import *
    from attnbackend.compiler import *
    from attnbackend.config import *
    from attnbackend.cudagraph import *
    from attnbackend.explanation import *
    from attnbackend.forward_context import *
    from attnbackend.impl import *
    from attnbackend.kv_cache import *
    from attnbackend.metadata import *
    from attnbackend.mla_metadata import *
    from attnbackend.ops import *
    from attnbackend.programs import *
    from attnbackend.registry import *
    from attnbackend.runtime import *
    from attnbackend.selector import *
    from attnbackend.types import *


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
