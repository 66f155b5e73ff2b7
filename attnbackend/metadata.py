"""What a step tells every backend (`CommonAttentionMetadata`) and what a backend makes of it.

Shape legend: R requests (padded rows included), T tokens, W block-table width.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from attnbackend.types import AttentionCGSupport

if TYPE_CHECKING:
    from attnbackend.impl import AttentionParams
    from attnbackend.kv_cache import KVCacheSpec

__all__ = [
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "BatchLimits",
    "CommonAttentionMetadata",
]

_REQS = {"axis": "reqs"}
_REQS_PLUS_1 = {"axis": "reqs+1"}
_TOKENS = {"axis": "tokens"}


@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata:
    """The batch of one step, as every backend's builder receives it.

    Tensors on the device hold the truth; ``max_query_len`` and ``max_seq_len`` are upper bounds and
    the ``*_cpu`` twins are optional, so that a builder which needs no host copy never waits for the
    device. Each tensor states in its field's metadata which axis it follows, also in subclasses,
    where ``field(metadata={"axis": None})`` keeps one whole: slicing and unpadding loop over the
    fields, so no field can be forgotten.
    """

    query_start_loc: Tensor = field(metadata=_REQS_PLUS_1)
    """int32 [R+1], cumulative query lengths, non-decreasing; the padded tail repeats the last."""
    seq_lens: Tensor = field(metadata=_REQS)
    """int32 [R], context plus query tokens; 0 on padded rows."""
    block_table: Tensor = field(metadata=_REQS)
    """int32 [R, W], block ids; padded rows point at block 0, which is reserved."""
    slot_mapping: Tensor | None = field(default=None, metadata=_TOKENS)
    """int64 [T], cache slot of each token; -1 means do not write."""
    num_reqs: int
    """Requests, without padded rows."""
    num_actual_tokens: int
    """Tokens, without padding."""
    max_query_len: int
    """Upper bound of the query lengths."""
    max_seq_len: int
    """Upper bound of ``seq_lens``."""
    causal: bool = True
    query_start_loc_cpu: Tensor | None = field(default=None, metadata=_REQS_PLUS_1)
    seq_lens_cpu: Tensor | None = field(default=None, metadata=_REQS)
    is_prefilling: Tensor | None = field(default=None, metadata=_REQS)
    """bool [R] on the CPU: the request's prompt is not finished before this step."""
    encoder_seq_lens: Tensor | None = field(default=None, metadata=_REQS)
    """int32 [R], lengths of the encoder's sequences, for cross attention."""
    positions: Tensor | None = field(default=None, metadata=_TOKENS)
    """int64 [T], absolute positions."""

    @classmethod
    def from_tensors(
        cls, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, *,
        num_tokens: int, block_size: int, causal: bool = True,
    ) -> Self:  # fmt: skip
        """The metadata that an op's own tensor arguments determine, with no wait for the device.

        The bounds are what the shapes allow: ``num_tokens`` and the width of the block table.
        """
        return cls(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            num_reqs=seq_lens.shape[0],
            num_actual_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=block_table.shape[1] * block_size,
            causal=causal,
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with the named fields changed; an unknown name is a TypeError."""
        return dataclasses.replace(self, **changes)

    def unpadded(self, num_reqs: int, num_tokens: int) -> Self:
        """Only the first ``num_reqs`` rows and ``num_tokens`` tokens of every field.

        Raises:
            ValueError: either count is larger than what the metadata holds.
        """
        self._check_count("num_reqs", num_reqs, self.seq_lens.shape[0])
        for name, tensor in self._along("tokens"):
            self._check_count(f"num_tokens (of {name})", num_tokens, tensor.shape[0])
        cut = self._slice(slice(0, num_reqs), slice(0, num_tokens))
        return self.replace(**cut, num_reqs=num_reqs, num_actual_tokens=num_tokens)

    def requests(self, start: int, stop: int) -> Self:
        """Rows ``start:stop`` as a batch of their own: tokens follow, query_start_loc begins at 0.

        Reads ``query_start_loc`` on the host.

        Raises:
            ValueError: not ``0 <= start <= stop <=`` the rows that the metadata holds.
        """
        self._check_count("stop", stop, self.seq_lens.shape[0])
        self._check_count("start", start, stop)
        starts = self.host_query_start_loc()
        first, last = int(starts[start]), int(starts[stop])
        cut = self._slice(slice(start, stop), slice(first, last))
        for name in ("query_start_loc", "query_start_loc_cpu"):
            if cut.get(name) is not None:
                cut[name] = cut[name] - first
        query_lens = starts[start : stop + 1].diff()
        longest = int(query_lens.max()) if stop > start else 0
        return self.replace(
            **cut, num_reqs=stop - start, num_actual_tokens=last - first, max_query_len=longest
        )

    def host_query_start_loc(self) -> Tensor:
        """``query_start_loc`` on the CPU; copied from the device when the step did not bring it."""
        return _on_host("query_start_loc", self.query_start_loc, self.query_start_loc_cpu)

    def host_seq_lens(self) -> Tensor:
        """``seq_lens`` on the CPU; copied from the device when the step did not bring it."""
        return _on_host("seq_lens", self.seq_lens, self.seq_lens_cpu)

    def _slice(self, reqs: slice, tokens: slice) -> dict[str, Any]:
        rows_plus_1 = slice(reqs.start, reqs.stop + 1)
        by_axis = {"reqs": reqs, "reqs+1": rows_plus_1, "tokens": tokens}
        return {name: tensor[rows] for axis, rows in by_axis.items() for name, tensor in self._along(axis)}

    def _along(self, axis: str) -> Iterator[tuple[str, Tensor]]:
        """The fields that follow ``axis``, where they are given."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and "axis" not in f.metadata:
                raise TypeError(
                    f"{type(self).__name__}.{f.name} is a tensor but does not say which axis it "
                    "follows; declare it with field(metadata={'axis': 'reqs'}), 'reqs+1', 'tokens' "
                    "or None"
                )
            if value is not None and f.metadata.get("axis") == axis:
                yield f.name, value

    @staticmethod
    def _check_count(name: str, value: int, limit: int) -> None:
        if not 0 <= value <= limit:
            raise ValueError(f"{name}={value} is outside 0..{limit}, what this metadata holds")


def _on_host(name: str, device_tensor: Tensor, host_tensor: Tensor | None) -> Tensor:
    if host_tensor is not None:
        return host_tensor
    if device_tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} is needed on the host inside a CUDA graph capture, where the device cannot be "
            "waited for. Build the step's metadata before the capture and run under "
            "attnbackend.set_forward_context(...), or choose a backend with a higher "
            "AttentionCGSupport."
        )
    return device_tensor.cpu()


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """A backend's plan of one step. Subclasses add what their kernels want to know beforehand."""

    common: CommonAttentionMetadata

    def is_for(self, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor) -> bool:
        """Whether this plan was made from exactly these tensors (same memory, same shape)."""
        mine = self.common
        if mine.seq_lens is seq_lens and mine.query_start_loc is query_start_loc:
            return _same(mine.block_table, block_table)
        return (
            _same(mine.seq_lens, seq_lens)
            and _same(mine.query_start_loc, query_start_loc)
            and _same(mine.block_table, block_table)
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


@dataclass(frozen=True)
class BatchLimits:
    """The largest batch that a builder's persistent buffers must hold."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int


M = TypeVar("M", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns a step's batch into a backend's plan. One per KV cache group; owns persistent buffers.

    Layers of a group have equal ``params``, so what a kernel wants to know at planning time (scale,
    soft-cap, window) is the same for all of them.

    ``limits`` is None where an op plans for itself from its arguments; such a builder keeps no
    buffers.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None
    """Query lengths up to this are wanted first in the batch; None: the order does not matter."""

    def __init__(
        self,
        params: AttentionParams,
        kv_cache_spec: KVCacheSpec,
        limits: BatchLimits | None,
        device: torch.device,
    ) -> None:
        self.params = params
        self.kv_cache_spec = kv_cache_spec
        self.limits = limits
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """How much of this backend a CUDA graph can hold for layers of this spec."""
        return cls.cudagraph_support

    def plans_each_replay(self, max_query_len: int) -> bool:
        """Whether `build` must be called before a graph is replayed.

        It need not be where a plan only names the tensors of the batch: the graph knows these, and what they
        hold is the step's.

        Args:
            max_query_len: what the graph was captured for.
        """
        return True

    def leads_on_prompts(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this backend was measured to be ahead on a batch whose requests all bring prompts.

        A composition of two backends, one for prompts and one for decode, asks the latter.
        """
        return False

    def leads_on_mixed(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this backend was measured to be ahead on a batch of prompts and single tokens, serving all.

        A composition of two backends, one for prompts and one for decode, asks the former.
        """
        return False

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The plan of one step.

        Args:
            common_prefix_len: tokens of prefix that all requests share; 0 for none.
            common_attn_metadata: the batch.
            fast_build: prefer a short build over a fast kernel (speculative drafting).
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The plan to capture with; by default the plan of the batch."""
        return self.build(0, common_attn_metadata)
