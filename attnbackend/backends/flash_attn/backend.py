"""`FLASH_ATTN`: FlashAttention 2, 3 or 4, from whichever library brings it.

What the backend claims is what the libraries here can do; a machine without any shows what they do elsewhere.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnbackend.backends.flash_attn.call import Layer
from attnbackend.backends.flash_attn.impl import FlashAttentionImpl
from attnbackend.backends.flash_attn.planning import FlashAttentionMetadataBuilder
from attnbackend.backends.flash_attn.providers import PROVIDERS, Provider
from attnbackend.backends.flash_attn.resolution import (
    NoProviderError,
    candidates,
    installation_problems,
    provider_for,
)
from attnbackend.backends.standard import StandardCacheBackend
from attnbackend.config import flash_attn_fp8_enabled
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.types import LSEBase, MultipleOf, Reason

if TYPE_CHECKING:
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["FlashAttentionBackend"]


def _here() -> tuple[Provider, ...]:
    """Those that can be used, or all where there are none."""
    return candidates() or PROVIDERS


def _serves_fp8() -> bool:
    return flash_attn_fp8_enabled() and any(provider.has_fp8 for provider in _here())


class _ClaimsOfProviders(ABCMeta):
    """Claims that depend on what is installed, on the device, and on what is forced, asked anew each time."""

    @property
    def supports_alibi(cls) -> bool:
        return any(provider.has_alibi for provider in _here())

    @property
    def supports_logits_soft_cap(cls) -> bool:
        return any(provider.has_soft_cap for provider in _here())

    @property
    def supported_kv_cache_dtypes(cls) -> tuple[str, ...]:
        fp8 = ("fp8", "fp8_e4m3") if _serves_fp8() else ()
        return ("auto", "float16", "bfloat16", *fp8)

    @property
    def supports_per_head_quant_scales(cls) -> bool:
        return _serves_fp8()


class FlashAttentionBackend(StandardCacheBackend, metaclass=_ClaimsOfProviders):
    """NVIDIA GPUs from compute capability 8.0 on.

    Which library serves is decided layer by layer: of those allowed by ``set_config(flash_attn=...)`` or
    ``ATTNBACKEND_FLASH_ATTN`` (a version, or one of vllm_fa3, flash_attn_3, vllm_fa4, flash_attn_4, vllm_fa2,
    flash_attn_2, torch), the best for the device that computes such a layer right when it is tried.

    Caches in float8_e4m3fn are served with ``set_config(flash_attn_fp8=True)`` or
    ``ATTNBACKEND_FLASH_ATTN_FP8=1`` only: version 3 rounds queries and probabilities to float8 for them, an
    error beyond the relative rule. As the prompt backend of a composition it is given copies of such caches
    in 16 bits, of either format, but where it may round and takes less time so.
    """

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_head_sizes = (MultipleOf(8, 32, 256),)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cuda",)
    min_compute_capability = (8, 0)
    lse_base = LSEBase.E
    supports_sliding_window = True
    supports_sinks = True
    supports_non_causal = True
    supports_query_scale = True
    supports_quantized_query = True
    supports_output_scale = True
    supports_output_block_scale = True

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return FlashAttentionMetadataBuilder

    @classmethod
    def query_dtype(cls, kv_cache_dtype: str) -> torch.dtype | None:
        return torch.float8_e4m3fn if kv_cache_dtype.startswith("fp8") else None

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch finds none"
        if candidates():
            from attnbackend.kernels import triton

            return triton.unavailable_reason("cuda")
        return f"no library of FlashAttention can be used: {'; '.join(installation_problems())}"

    @classmethod
    def library(cls) -> str | None:
        return "; ".join(f"{p.key} ({p}{p.how_called()})" for p in candidates()) or None

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        """What no provider here computes right, found by trying; without a device, what is known anyway."""
        if not _is_sound(config):
            return []
        kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype)
        if kv_dtype is not config.dtype and kv_dtype.itemsize > 1:
            return [Reason("kv_cache_dtype", config.kv_cache_dtype, f"auto, or the query's {config.dtype}")]
        if config.device_type != "cuda" or not candidates():
            return []
        if config.compute_capability != torch.cuda.get_device_capability():
            return []
        layer = Layer.of(config, kv_dtype=kv_dtype, alibi=config.has_alibi)
        try:
            provider_for(layer)
        except NoProviderError as error:
            return [_reason(config, layer, str(error))]
        return []


def _is_sound(config: AttentionSelectorConfig) -> bool:
    """Whether single claims are met, so that trying makes sense."""
    cls = FlashAttentionBackend
    return (
        cls.supports_dtype(config.dtype)
        and cls.supports_kv_cache_dtype(config.kv_cache_dtype)
        and cls.supports_head_size(config.head_size)
        and (config.block_size is None or cls.supports_block_size(config.block_size))
        and config.num_heads % config.num_kv_heads == 0
    )


def _reason(config: AttentionSelectorConfig, layer: Layer, found: str) -> Reason:
    """The field at fault: the first that fails alone, beside what every provider should do."""
    plain = Layer(dtype=layer.dtype, kv_dtype=layer.dtype, head_size=128, block_size=16, group=1)
    if _fails(plain):
        plain = replace(plain, block_size=256)
        if not _fails(plain) and layer.block_size != 256:
            return Reason("block_size", config.block_size, f"others; found: {found}")
    for field, changed in _single_changes(plain, layer):
        if _fails(changed):
            return Reason(field, getattr(config, field), f"others; found: {found}")
    return Reason("head_size", config.head_size, f"others with all else equal; found: {found}")


def _fails(layer: Layer) -> bool:
    try:
        provider_for(layer)
    except NoProviderError:
        return True
    return False


def _single_changes(plain: Layer, layer: Layer) -> Iterator[tuple[str, Layer]]:
    yield "dtype", plain
    yield "kv_cache_dtype", replace(plain, kv_dtype=layer.kv_dtype)
    yield "head_size", replace(plain, head_size=layer.head_size)
    yield "block_size", replace(plain, block_size=layer.block_size)
    yield "num_heads", replace(plain, group=layer.group)
    yield "sliding_window", replace(plain, windowed=layer.windowed)
    yield "logits_soft_cap", replace(plain, soft_capped=layer.soft_capped)
    yield "has_alibi", replace(plain, alibi=layer.alibi)
    yield "causal", replace(plain, causal=layer.causal)
