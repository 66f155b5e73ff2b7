"""`AttentionBackend`: a class that describes a family of kernels and what it can do.

A backend is stateless. Its claims are class attributes and ``supports_*`` methods; all default to
no. Defining a subclass checks that the core methods are there; registering it generates its ops.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbackend.impl import AttentionImpl, AttentionImplBase, MLAAttentionImpl
from attnbackend.metadata import AttentionMetadataBuilder
from attnbackend.mla_metadata import MLAMetadataBuilder
from attnbackend.types import AttentionType, KVCacheLayout, LSEBase, MultipleOf, Reason

if TYPE_CHECKING:
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["AttentionBackend", "KVCacheDims"]


class KVCacheDims(NamedTuple):
    """What a cache's logical shape says."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


_CORE_METHODS = ("get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape")


class AttentionBackend(ABC):
    """What attnbackend must know of a family of attention kernels.

    Subclass it, state what the kernels can do, and register it with `register_backend`. A subclass
    that lacks a core method, or makes a claim that does not exist, is a TypeError at the class
    statement; pass ``abstract=True`` in it for a base class of your own. The classes that it names
    are checked when it is registered.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """Types of query and output."""
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto",)
    """Names from `KV_CACHE_DTYPES`; "auto" is the query's type."""
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]] = ()
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = ()
    supported_device_types: ClassVar[tuple[str, ...]] = ()
    supported_layouts: ClassVar[tuple[KVCacheLayout, ...]] = (KVCacheLayout.NHD,)
    """The first is what engines lay caches out in."""
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    min_compute_capability: ClassVar[tuple[int, int] | None] = None
    """Lowest (major, minor) of a CUDA device; None for any."""
    max_group_size: ClassVar[int | None] = None
    """Most query heads for one key-value head; None for any."""
    max_cache_offset: ClassVar[int | None] = None
    """Largest element offset in a cache that the kernels reach, such as ``2**31 - 1`` where they
    compute it in 32 bits; None for any."""
    lse_base: ClassVar[LSEBase | None] = None
    """Base of the LSE that the kernels give; None: they give none."""

    is_mla: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    is_ssm: ClassVar[bool] = False
    supports_sliding_window: ClassVar[bool] = False
    supports_logits_soft_cap: ClassVar[bool] = False
    supports_alibi: ClassVar[bool] = False
    supports_sinks: ClassVar[bool] = False
    supports_non_causal: ClassVar[bool] = False
    supports_attention_chunks: ClassVar[bool] = False
    supports_bidirectional_ranges: ClassVar[bool] = False
    supports_query_scale: ClassVar[bool] = False
    supports_quantized_query: ClassVar[bool] = False
    """Queries may come in float8_e4m3fn."""
    supports_output_scale: ClassVar[bool] = False
    supports_output_block_scale: ClassVar[bool] = False
    supports_per_head_quant_scales: ClassVar[bool] = False
    is_deterministic: ClassVar[bool] = False
    """The same arguments give the same bits."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_claims(cls)
        if not abstract:
            _check_complete(cls)

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name that selects this backend, upper case by custom; its ops are named after it."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """The class whose instances run a layer."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The class whose instances plan a step."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape of one layer's cache."""

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Logical dimensions from the slowest to the fastest in memory.

        The default is for the standard shape
        ``(num_blocks, 2, block_size, num_kv_heads, head_size)``.
        """
        return (0, 1, 2, 3, 4) if layout is KVCacheLayout.NHD else (0, 1, 3, 2, 4)

    @classmethod
    def query_dtype(cls, kv_cache_dtype: str) -> torch.dtype | None:
        """The float8 type to which its ops convert queries for such a cache; None: they do not."""
        return None

    @classmethod
    def quantizes_in_kernel(cls, head_size: int, group: int | None) -> bool:
        """Whether float8 outputs are written by the kernels that compute them, not by a pass after these.

        Args:
            head_size: elements of a head.
            group: elements of a token that share a scale of `output_block_scale`; None: `output_scale`.
        """
        return False

    @classmethod
    def parse_kv_cache_shape(cls, shape: tuple[int, ...]) -> KVCacheDims:
        """The inverse of `get_kv_cache_shape`; the default is for the standard shape."""
        num_blocks, _, block_size, num_kv_heads, head_size = shape
        return KVCacheDims(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return _matches(head_size, cls.supported_head_sizes)

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        return _matches(block_size, cls.supported_block_sizes)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str) -> bool:
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType) -> bool:
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_lse(cls) -> bool:
        return cls.lse_base is not None

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        floor = cls.min_compute_capability
        return floor is None or capability is None or capability >= floor

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        """Limits that no single field shows; the default has none."""
        return []

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        """Why the kernels cannot run here at all, found by trying; None when they can.

        An ImportError or OSError raised in here also means unavailable; any other exception
        propagates.
        """
        return None

    @classmethod
    def library(cls) -> str | None:
        """Which of several libraries serves in this process, for people; None where there is no choice."""
        return None

    @classmethod
    def workspaces(cls) -> Sequence[Tensor]:
        """Memory that calls write besides their arguments, whose contents never matter to a later call.

        Whatever is written and not in here is a fault; see `attnbackend.testing.audit_op`.
        """
        return ()

    @classmethod
    def validate_configuration(cls, config: AttentionSelectorConfig) -> list[Reason]:
        """Every reason why this backend cannot serve ``config``; empty: it can."""
        from attnbackend.validation import configuration_reasons

        return configuration_reasons(cls, config)


def _matches(value: int, allowed: tuple[int | MultipleOf, ...]) -> bool:
    return any(value in a if isinstance(a, Container) else value == a for a in allowed)


def _check_complete(cls: type[AttentionBackend]) -> None:
    missing = [
        f"{name}()" for name in _CORE_METHODS if getattr(getattr(cls, name), "__isabstractmethod__", False)
    ]
    if missing:
        raise TypeError(
            f"attention backend {cls.__module__}.{cls.__qualname__} lacks {', '.join(missing)}. "
            f"Define each of {', '.join(_CORE_METHODS)}, or pass abstract=True in the class "
            "statement."
        )


def _check_claims(cls: type[AttentionBackend]) -> None:
    """Refuses a claim that nobody would read, or that would be read as its opposite."""
    where = f"attention backend {cls.__module__}.{cls.__qualname__}"
    for name, value in vars(cls).items():
        known = getattr(AttentionBackend, name, None)
        if known is None and name.startswith(("supports_", "supported_", "is_")):
            claims = [n for n in dir(AttentionBackend) if n.startswith(name.partition("_")[0])]
            near = difflib.get_close_matches(name, claims, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise TypeError(
                f"{where} claims {name}, which does not exist{hint} A name of your own must start "
                "differently."
            )
        if isinstance(known, bool) and not isinstance(value, bool):
            raise TypeError(f"{where}: {name} is {value!r}; it is a class attribute, True or False")


def check_parts(cls: type[AttentionBackend]) -> None:
    """Raises TypeError when the classes that a backend names cannot do what its claims say."""
    impl, builder = cls.get_impl_cls(), cls.get_builder_cls()
    kinds = (
        (MLAAttentionImpl, MLAMetadataBuilder) if cls.is_mla else (AttentionImpl, AttentionMetadataBuilder)
    )
    for part, base in zip((impl, builder), kinds, strict=True):
        where = f"{cls.get_name()}: {part.__name__}" if isinstance(part, type) else cls.get_name()
        if not (isinstance(part, type) and issubclass(part, base)):
            raise TypeError(f"{where} is not a subclass of {base.__name__} (is_mla={cls.is_mla})")
        if inspect.isabstract(part):
            missing = ", ".join(sorted(part.__abstractmethods__))
            raise TypeError(f"{where} lacks {missing}(); define it in the class")
    _check_collections(cls)
    _check_lse_base(cls, impl)


def _check_collections(cls: type[AttentionBackend]) -> None:
    """``("cuda")`` is a string, in which "cud" is found too."""
    for name in (claim for claim in vars(AttentionBackend) if claim.startswith("supported_")):
        value = getattr(cls, name)
        if not isinstance(value, tuple | list | set | frozenset):
            raise TypeError(
                f"{cls.get_name()}: {name}={value!r} is no tuple; write ({value!r},) for one item"
            )


def _check_lse_base(cls: type[AttentionBackend], impl: type[AttentionImplBase]) -> None:
    """A backend that gives an LSE must say its base, or merging would silently be wrong."""
    how = "say LSEBase.E for natural logarithms, LSEBase.TWO for base 2, or None when the kernels give no LSE"
    if cls.lse_base is not None and not isinstance(cls.lse_base, LSEBase):
        raise TypeError(f"{cls.get_name()}: lse_base={cls.lse_base!r} is not an LSEBase; {how}")
    gives = cls.supports_lse() or getattr(impl, "can_return_lse_for_decode", False)
    if gives and cls.lse_base is None:
        raise TypeError(f"{cls.get_name()} gives an LSE but declares no lse_base; {how}")
