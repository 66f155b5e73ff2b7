"""Two backends over one cache: one for prompts, one for requests that bring a token each.

Which library is fastest differs by phase. `compose` makes a backend of two; by name it is asked for as
``PREFILL+DECODE``, such as ``FLASH_ATTN+FLASHINFER``. A prompt backend that reads no float8 cache is given
one widened: see `attnbackend.backends.widened`.

Shape legend: T tokens, R rows.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend, KVCacheDims
from attnbackend.backends.host_lengths import with_host_lengths
from attnbackend.backends.side_stream import beside
from attnbackend.backends.widened import WidenedBuilder, WidenedPlan, attend_copy, widened_params, widens
from attnbackend.impl import AttentionImpl, AttentionParams, OptionalTensors
from attnbackend.kv_cache import AttentionSpec, KVCacheSpec, resolve_kv_cache_dtype
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    BatchLimits,
    CommonAttentionMetadata,
)
from attnbackend.native_calls import lessons
from attnbackend.ops.binding import LN_2
from attnbackend.types import AttentionCGSupport, KVCacheLayout, LSEBase, MultipleOf, Reason

if TYPE_CHECKING:
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["TwoPhaseBackend", "TwoPhaseImpl", "TwoPhaseMetadata", "TwoPhaseMetadataBuilder", "compose"]

Parts = tuple[type[AttentionBackend], type[AttentionBackend]]
"""The backend for prompts, and that for decode."""

_BESIDE_BYTES = 64 << 20
"""Keys and values that decode reads, from which on it runs beside the prompts, on a second stream: that costs
the host as much as a few kernels."""


class Phases:
    """The plans of a batch's two parts; requests and tokens before these are the decode part's."""

    def __init__(
        self, decode: Any, prefill: Any, row: int | None = None, token: int | None = None,
        beside: bool = False,
    ) -> None:  # fmt: skip
        self.decode, self.prefill, self.row, self.token = decode, prefill, row, token
        self.beside = beside
        """Whether decode is worth a stream of its own."""


@dataclass(frozen=True, kw_only=True)
class TwoPhaseMetadata(AttentionMetadata):
    phases: Phases


def _leading_decodes(common: CommonAttentionMetadata) -> int:
    """Rows at the front of the batch that bring at most one token; 0 where the host knows no lengths."""
    rows = common.seq_lens.shape[0]
    if common.max_query_len <= 1:
        return rows
    if common.query_start_loc_cpu is None:
        return 0
    long = (common.query_start_loc_cpu.diff() > 1).nonzero()
    return int(long[0]) if len(long) else rows


class TwoPhaseMetadataBuilder(AttentionMetadataBuilder[TwoPhaseMetadata]):
    """Plans each phase with its own backend's builder.

    A batch is split where its first longer query stands, so single tokens are wanted first; those that stand
    behind it are served with the prompts. Without lengths on the host there is no split to know, and the
    whole batch is the prompt backend's. Where that would read widened pages, the decode backend serves all
    batches in which no copy pays. It also serves batches of prompts on which it leads, as the prompt backend
    does mixed ones.

    In a graph of longer queries one backend serves all requests, since a split changes from step to step:
    that of prompts, or in the place of copies, which would be as large as any, that of decode.
    """

    parts: ClassVar[Parts]
    reorder_batch_threshold = 1

    def __init__(
        self, params: AttentionParams, kv_cache_spec: KVCacheSpec, limits: BatchLimits | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(params, kv_cache_spec, limits, device)
        prefill, decode = self.parts
        self._widens = widens(prefill, params.kv_cache_dtype)
        self._prefill: Any = (
            WidenedBuilder(self.parts, params, limits, device) if self._widens
            else prefill.get_builder_cls()(params, kv_cache_spec, limits, device)
        )  # fmt: skip
        self._decode = decode.get_builder_cls()(params, kv_cache_spec, limits, device)
        self._captured: dict[int, tuple[int, int]] = {}
        """Rows of graphs of longer queries -> most tokens, and longest query, that one of them is for."""

    @classmethod
    def get_cudagraph_support(cls, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """As the backend of longer queries in graphs, where the other can be in graphs of single tokens."""
        assert isinstance(kv_cache_spec, AttentionSpec)
        prefill, decode = (p.get_builder_cls().get_cudagraph_support(kv_cache_spec) for p in cls.parts)
        if widens(cls.parts[0], kv_cache_spec.kv_cache_dtype):
            prefill = decode
        if min(prefill, decode) >= AttentionCGSupport.UNIFORM_BATCH:
            return prefill
        return min(decode, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TwoPhaseMetadata:  # fmt: skip
        common = common_attn_metadata
        if self.limits is None:
            common = with_host_lengths(common)
        rows, first = common.seq_lens.shape[0], _leading_decodes(common)
        in_graph = self._is_in_graph(common)
        if in_graph:
            first = rows if self._widens else 0
        elif first == rows and common.max_query_len > 1:
            common = common.replace(max_query_len=1)  # The host knows better than the bound that was given.
        elif 0 < first < rows and not self._widens and self._prefill.leads_on_mixed(common):
            first = 0
        prompts = None  # And served with all others by the decode backend.
        if first < rows and (first or in_graph or not self._decode.leads_on_prompts(common)):
            part = common if first == 0 else common.requests(first, rows)
            prompts = self._prefill.build(common_prefix_len, part, fast_build)
        if prompts is None:
            phases = Phases(self._decode.build(common_prefix_len, common, fast_build), None)
        elif first == 0:
            phases = Phases(None, prompts)
        else:
            decode = common.requests(0, first)
            phases = Phases(
                self._decode.build(common_prefix_len, decode, fast_build), prompts, first,
                int(common.host_query_start_loc()[first]), self._read_bytes(decode) >= _BESIDE_BYTES,
            )  # fmt: skip
        return TwoPhaseMetadata(common=common, phases=phases)

    def _is_in_graph(self, common: CommonAttentionMetadata) -> bool:
        """Whether the batch runs from a graph of longer queries, as its own may be told to be."""
        tokens, longest = self._captured.get(common.seq_lens.shape[0], (0, 0))
        return common.num_actual_tokens <= tokens and 1 < common.max_query_len <= longest

    def _read_bytes(self, decode: CommonAttentionMetadata) -> int:
        """What the keys and values of some requests take, as far as the host knows their lengths."""
        p, lens = self.params, decode.seq_lens_cpu
        keys = decode.num_reqs * decode.max_seq_len if lens is None else int(lens.sum())
        dtype = resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype)
        return 2 * keys * p.num_kv_heads * p.head_size * dtype.itemsize

    def plans_each_replay(self, max_query_len: int) -> bool:
        """As the one phase that is in the graph."""
        of_prompts = max_query_len > 1 and not self._widens
        return (self._prefill if of_prompts else self._decode).plans_each_replay(max_query_len)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TwoPhaseMetadata:
        common = common_attn_metadata
        if common.max_query_len > 1:
            rows, asked = common.seq_lens.shape[0], (common.num_actual_tokens, common.max_query_len)
            taken = self._captured.get(rows, asked)
            self._captured[rows] = max(taken[0], asked[0]), max(taken[1], asked[1])
        if self._widens or common.max_query_len <= 1:
            phases = Phases(self._decode.build_for_cudagraph_capture(common), None)
        else:
            phases = Phases(None, self._prefill.build_for_cudagraph_capture(common))
        return TwoPhaseMetadata(common=common, phases=phases)


class TwoPhaseImpl(AttentionImpl):
    parts: ClassVar[Parts]

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        self._impls = tuple(_dense_impl(part)(params) for part in self.parts)
        self._widened: dict[int, AttentionImpl] = {}
        self._may_overlap = all(impl.keeps_to_its_stream for impl in self._impls)

    def _over_copies(self, part: int) -> AttentionImpl:
        """A part's, over copies."""
        if part not in self._widened:
            self._widened[part] = _dense_impl(self.parts[part])(widened_params(self.params))
        return self._widened[part]

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: TwoPhaseMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        phases = attn_metadata.phases
        plans = (phases.prefill, phases.decode)
        if phases.row is None:
            part = 0 if phases.decode is None else 1
            self._run(part, query, key, value, kv_cache, plans[part], output, tensors)
            return
        row, token = phases.row, phases.token
        places = (slice(row, None), slice(token, None)), (slice(0, row), slice(0, token))

        def run(part: int) -> None:
            rows, at = places[part]
            if query[at].shape[0]:
                own = _part_of(tensors, rows, at)
                keys, values = (None if x is None else x[at] for x in (key, value))
                self._run(part, query[at], keys, values, kv_cache, plans[part], output[at], own)

        if phases.beside and self._may_overlap and query.is_cuda:
            with beside(query.device) as stream:
                run(0)
                with torch.cuda.stream(stream):
                    run(1)
        else:
            run(1)
            run(0)

    def _run(
        self, part: int, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        plan: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        if isinstance(plan, WidenedPlan):
            part = plan.part
            attend = self._over_copies(part).forward
            with lessons(None, None):  # What a library does with the copy is not all that is done.
                attend_copy(attend, plan, self.params.dtype, query, kv_cache, output, tensors)
        else:
            self._impls[part].forward(query, key, value, kv_cache, plan, output, tensors)
        if tensors.lse is not None and self.parts[part].lse_base is LSEBase.TWO:
            tensors.lse.mul_(LN_2)

    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        self._impls[1].kv_cache_update(key, value, kv_cache, slot_mapping, tensors)


def _dense_impl(part: type[AttentionBackend]) -> type[AttentionImpl]:
    impl = part.get_impl_cls()
    assert issubclass(impl, AttentionImpl), "compose() refuses others"
    return impl


def _part_of(tensors: OptionalTensors, rows: slice, at: slice) -> OptionalTensors:
    """The tensors of some requests and their tokens; those of neither are everybody's."""

    def cut(x: Tensor | None, where: slice) -> Tensor | None:
        return None if x is None else x[where]

    return tensors._replace(
        lse=cut(tensors.lse, at), output_block_scale=cut(tensors.output_block_scale, at),
        bidirectional_ranges=cut(tensors.bidirectional_ranges, rows),
    )  # fmt: skip


def _property(get: Callable[[Any], Any]) -> property:
    return property(get)


def _all_of(name: str) -> property:
    return _property(lambda cls: all(getattr(part, name) for part in cls.parts))


def _in_both(name: str) -> property:
    def get(cls: Any) -> tuple[Any, ...]:
        prefill, decode = (getattr(part, name) for part in cls.parts)
        return tuple(value for value in prefill if value in decode)

    return _property(get)


def _sizes_of_both(name: str) -> property:
    def get(cls: Any) -> tuple[int | MultipleOf, ...]:
        prefill, decode = (getattr(part, name) for part in cls.parts)
        both = [_common_sizes(a, b) for a, b in product(prefill, decode)]
        return tuple(dict.fromkeys(size for size in both if size is not None))

    return _property(get)


def _common_sizes(a: int | MultipleOf, b: int | MultipleOf) -> int | MultipleOf | None:
    if isinstance(a, int) or isinstance(b, int):
        size, other = (a, b) if isinstance(a, int) else (b, a)
        assert isinstance(size, int)
        fits = size in other if isinstance(other, MultipleOf) else size == other
        return size if fits else None
    lows, highs = ([x for x in pair if x is not None] for pair in ((a.low, b.low), (a.high, b.high)))
    base, low, high = math.lcm(a.base, b.base), max(lows, default=None), min(highs, default=None)
    try:
        return MultipleOf(base, low, high)
    except ValueError:
        return None


def _limit(name: str, choose: Callable[[Any], Any]) -> property:
    def get(cls: Any) -> Any:
        given = [limit for part in cls.parts if (limit := getattr(part, name)) is not None]
        return choose(given) if given else None

    return _property(get)


def _cache_dtypes(cls: Any) -> tuple[str, ...]:
    prefill, decode = (part.supported_kv_cache_dtypes for part in cls.parts)
    widened = (n for n in decode if n not in prefill and widens(cls.parts[0], n))
    return (*(n for n in prefill if n in decode), *widened)


def _takes_per_head_scales(cls: Any) -> bool:
    prefill, decode = cls.parts
    others = any(widens(prefill, name) for name in decode.supported_kv_cache_dtypes)
    return decode.supports_per_head_quant_scales and (prefill.supports_per_head_quant_scales or others)


_PER_HEAD = "supports_per_head_quant_scales"


class _ClaimsOfBoth(ABCMeta):
    """A composition claims what both claim, asked anew each time: theirs may depend on choices."""

    parts: Parts
    supported_dtypes = _in_both("supported_dtypes")
    supported_kv_cache_dtypes = _property(_cache_dtypes)
    supports_per_head_quant_scales = _property(_takes_per_head_scales)
    supported_device_types = _in_both("supported_device_types")
    supported_layouts = _in_both("supported_layouts")
    supported_attn_types = _in_both("supported_attn_types")
    supported_head_sizes = _sizes_of_both("supported_head_sizes")
    supported_block_sizes = _sizes_of_both("supported_block_sizes")
    min_compute_capability = _limit("min_compute_capability", max)
    max_group_size = _limit("max_group_size", min)
    max_cache_offset = _limit("max_cache_offset", min)
    lse_base = _property(lambda cls: LSEBase.E if all(p.lse_base is not None for p in cls.parts) else None)


for _name, _value in vars(AttentionBackend).items():
    if isinstance(_value, bool) and _name not in ("is_mla", "is_sparse", "is_ssm", _PER_HEAD):
        setattr(_ClaimsOfBoth, _name, _all_of(_name))


class TwoPhaseBackend(AttentionBackend, abstract=True, metaclass=_ClaimsOfBoth):
    """The base of what `compose` makes."""

    parts: ClassVar[Parts]

    @staticmethod
    def get_name() -> str:
        return "TWO_PHASE"

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        return cls.parts[0].get_kv_cache_stride_order(layout)

    @classmethod
    def parse_kv_cache_shape(cls, shape: tuple[int, ...]) -> KVCacheDims:
        return cls.parts[0].parse_kv_cache_shape(shape)

    @classmethod
    def query_dtype(cls, kv_cache_dtype: str) -> torch.dtype | None:
        prefill, decode = (part.query_dtype(kv_cache_dtype) for part in cls.parts)
        return prefill if prefill is decode else None

    @classmethod
    def quantizes_in_kernel(cls, head_size: int, group: int | None) -> bool:
        return all(part.quantizes_in_kernel(head_size, group) for part in cls.parts)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return all(part.supports_head_size(head_size) for part in cls.parts)

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        return all(part.supports_block_size(block_size) for part in cls.parts)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return all(part.supports_compute_capability(capability) for part in cls.parts)

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        prefill, decode = cls.parts
        prompts, found = config, list[Reason]()
        if widens(prefill, config.kv_cache_dtype):
            # Whatever its pages, the copy's are of another size.
            prompts = replace(config, kv_cache_dtype="auto", block_size=None, per_head_quant_scales=False)
            found = cls._widening_problems(config)
        elif config.per_head_quant_scales and not prefill.supports_per_head_quant_scales:
            found = [Reason("per_head_quant_scales", True, "False, or a float8 cache")]
        found += [*prefill.supports_combination(prompts), *decode.supports_combination(config)]
        return list(dict.fromkeys(found))

    @classmethod
    def _widening_problems(cls, config: AttentionSelectorConfig) -> list[Reason]:
        """Where both backends run, the kernel between them must too."""
        from attnbackend.kernels import triton

        reason = triton.unavailable_reason(config.device_type)
        if reason is None or cls.unavailable_reason(config.device_type) is not None:
            return []
        allowed = f"what {cls.parts[0].get_name()} reads itself, since nothing can be widened here: {reason}"
        return [Reason("kv_cache_dtype", config.kv_cache_dtype, allowed)]

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        for part in cls.parts:
            if reason := part.unavailable_reason(device_type):
                return f"{part.get_name()}: {reason}"
        return None

    @classmethod
    def workspaces(cls) -> list[Tensor]:
        return [workspace for part in cls.parts for workspace in part.workspaces()]

    @classmethod
    def library(cls) -> str | None:
        named = (f"{part.get_name()}: {part.library()}" for part in cls.parts if part.library())
        return "; ".join(named) or None


def compose(*, prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[TwoPhaseBackend]:
    """A backend that serves prompts with ``prefill`` and single tokens with ``decode``, over one cache.

    It claims what both claim, and gives natural-log LSEs whatever theirs are.

    Raises:
        ValueError: one of them is no dense attention, or their caches are not laid out alike.
    """
    name = f"{prefill.get_name()}+{decode.get_name()}"
    if differences := list(_differences(prefill, decode)):
        raise ValueError(f"{name} cannot be composed: {'; '.join(differences)}")
    parts = {"parts": (prefill, decode)}
    impl = type("TwoPhaseImpl", (TwoPhaseImpl,), parts)
    builder = type("TwoPhaseMetadataBuilder", (TwoPhaseMetadataBuilder,), parts)
    methods: dict[str, Any] = {
        "get_name": staticmethod(lambda: name),
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
        "get_kv_cache_shape": staticmethod(prefill.get_kv_cache_shape),
        "__module__": __name__,
        "__doc__": f"Prompts by {prefill.get_name()}, decode by {decode.get_name()}.",
    }
    return _ClaimsOfBoth("ComposedBackend", (TwoPhaseBackend,), {**parts, **methods})  # type: ignore[return-value]


def _differences(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> Iterator[str]:
    for part in (prefill, decode):
        if part.is_mla or part.is_ssm or part.is_sparse or not issubclass(part.get_impl_cls(), AttentionImpl):
            yield f"{part.get_name()} is no dense attention over keys and values"
            return
        if issubclass(part, TwoPhaseBackend):
            yield f"{part.get_name()} is composed already"
            return
    dims = (7, 32, 3, 64)
    shapes = [part.get_kv_cache_shape(*dims) for part in (prefill, decode)]
    if shapes[0] != shapes[1]:
        yield f"the cache of {dims} (blocks, block size, heads, head size) is {shapes[0]} and {shapes[1]}"
    for layout in KVCacheLayout:
        if layout in prefill.supported_layouts and layout in decode.supported_layouts:
            orders = [part.get_kv_cache_stride_order(layout) for part in (prefill, decode)]
            if orders[0] != orders[1]:
                yield f"dimensions lie in the order {orders[0]} and {orders[1]} for layout {layout}"
