"""A runner's steps as CUDA graphs: which there are, their capture, and the padding that they ask for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.cudagraph import (
    BatchDescriptor,
    BatchShape,
    CUDAGraphDispatcher,
    CUDAGraphMode,
    CUDAGraphs,
    Dispatch,
    GraphedSteps,
    GraphLibrary,
    GraphSupport,
    LongLivedTensors,
    PreparedStep,
    ResolvedMode,
    capture_sizes,
    decode_sizes,
    lowest_support,
    mixed_sizes,
    resolve_cudagraph_mode,
    uncovered_decodes,
)
from attnbackend.cudagraph.capture_report import captures, with_progress
from attnbackend.layers.paged import BatchTensors, DecodeTensors
from attnbackend.runtime.engine_arguments import require_flag
from attnbackend.runtime.graph_debug import checked_replay, keep_inputs
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.types import Reason

__all__ = [
    "GraphOptions",
    "GraphPlan",
    "StepGraphs",
    "StepInputs",
    "inputs_of",
    "inputs_of_graph",
    "plan_graphs",
]


class StepInputs(NamedTuple):
    """What the model's forward takes."""

    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    batch: BatchTensors

    def named(self) -> dict[str, Tensor]:
        own = {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "logits_indices": self.logits_indices,
        }
        return {**own, **self.batch._asdict()}


def inputs_of(
    batch: PreparedBatch, num_tokens: int, num_reqs: int, num_logits: int, decode_only: bool
) -> StepInputs:
    """The leading tokens and rows of a batch's persistent tensors."""
    tensors = (DecodeTensors if decode_only else BatchTensors)(
        batch.slot_mapping[:num_tokens], batch.query_start_loc[: num_reqs + 1], batch.seq_lens[:num_reqs],
        batch.block_table[:num_reqs],
    )  # fmt: skip
    return StepInputs(
        batch.input_ids[:num_tokens], batch.positions[:num_tokens], batch.logits_indices[:num_logits], tensors
    )


def inputs_of_graph(batch: PreparedBatch, graph: BatchDescriptor, uniform_query_len: int) -> StepInputs:
    """Those that a graph reads."""
    tokens = graph.num_tokens
    reqs = len(batch.seq_lens) if graph.num_reqs is None else graph.num_reqs
    decode_only = graph.uniform and uniform_query_len == 1
    return inputs_of(batch, tokens, reqs, min(tokens, reqs * uniform_query_len), decode_only)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What a person may say about graphs."""

    mode: CUDAGraphMode | None = None
    """None: as much as is possible."""
    sizes: Sequence[int] | None = None
    """Batch sizes in tokens; None: see `capture_sizes`."""
    lazy: bool = False
    """Capture a size when a batch first needs it, in place of all before serving."""
    debug: bool = False
    """Hold each replay against the path without graphs, see `checked_replay`."""
    library: Callable[[torch.device], GraphLibrary] | None = None
    """Where graphs come from; None: CUDA's."""

    def __post_init__(self) -> None:
        require_flag("cudagraph_lazy_capture", self.lazy)
        require_flag("cudagraph_debug", self.debug)
        if self.sizes is not None:
            if isinstance(self.sizes, str) or not isinstance(self.sizes, Iterable):
                raise TypeError(f"Engine: cudagraph_capture_sizes={self.sizes!r} must be a list of sizes")
            object.__setattr__(self, "sizes", tuple(self.sizes))
        given = {"capture_sizes": self.sizes is not None, "lazy_capture": self.lazy, "debug": self.debug}
        if self.mode is CUDAGraphMode.NONE and any(given.values()):
            named = ", ".join(f"cudagraph_{name}" for name, is_given in given.items() if is_given)
            raise ValueError(f"cudagraph_mode=NONE leaves no graph for {named}: leave one or the other out")


@dataclass(frozen=True)
class GraphPlan:
    """What runs from graphs, and why it is not all."""

    dispatcher: CUDAGraphDispatcher
    reasons: tuple[Reason, ...]


def plan_graphs(
    options: GraphOptions, device: torch.device, groups: Iterable[GraphSupport], max_num_seqs: int,
    max_num_tokens: int, decode_len: int = 1,
) -> GraphPlan:  # fmt: skip
    """What runs from graphs, for layers of such support on such a device.

    Args:
        decode_len: tokens that each request brings to a step of decodes.

    Raises:
        ValueError: a mode was named that cannot run, or a size that no batch has.

    Warns of sizes that leave the largest batches of decodes without a graph.
    """
    resolved = _possible_mode(options, device, groups, decode_len)
    sizes, mixed = (
        of_kind(max_num_seqs, max_num_tokens, uniform_query_len=decode_len, sizes=options.sizes)
        for of_kind in (capture_sizes, mixed_sizes)
    )
    most = min(max_num_seqs, max_num_tokens // decode_len)
    decodes: tuple[int, ...] = ()
    reasons = resolved.reasons
    if resolved.mode.decode_mode is CUDAGraphMode.FULL:
        decodes = decode_sizes(sizes, most, decode_len)
    if resolved.mode.decode_mode is not CUDAGraphMode.NONE:
        uncovered = uncovered_decodes(decodes or mixed, most, decode_len)
        for reason in uncovered:
            warnings.warn(str(reason), stacklevel=2)
        reasons = (*reasons, *uncovered)
    return GraphPlan(CUDAGraphDispatcher(resolved.mode, mixed, decodes, max_num_seqs, decode_len), reasons)


def _possible_mode(
    options: GraphOptions, device: torch.device, groups: Iterable[GraphSupport], decode_len: int
) -> ResolvedMode:
    none = CUDAGraphMode.NONE
    if options.mode is none:
        return ResolvedMode(none, ())
    if device.type != "cuda" and options.library is None:
        if options.mode is not None:
            raise ValueError(
                f"cudagraph_mode={options.mode.name} needs a CUDA device; the model is on {device}: leave it "
                "None"
            )
        return ResolvedMode(none, (Reason("device", device.type, "cuda, for graphs"),))
    return resolve_cudagraph_mode(
        options.mode, lowest_support(groups), splits_attention=True, uniform_query_len=decode_len
    )


class _LastingStep(NamedTuple):
    """The step before, where it serves the next one too if that is made from it."""

    batch: PreparedBatch
    key: Dispatch
    step: PreparedStep
    logits: Tensor


Prepare = Callable[[PreparedBatch, StepInputs, Dispatch, bool], PreparedStep]


class StepGraphs:
    """Runs steps from graphs where there is one for them.

    Args:
        dispatcher: which graph a batch runs from.
        options: how they are made.
        device: where the model runs.
        long_lived: weights and caches.
        prepare: makes a step of a batch that is padded for a graph ready; True: for its capture.
    """

    def __init__(
        self, dispatcher: CUDAGraphDispatcher, options: GraphOptions, device: torch.device,
        long_lived: LongLivedTensors, prepare: Prepare,
    ) -> None:  # fmt: skip
        self.dispatcher = dispatcher
        self.steps = GraphedSteps((options.library or CUDAGraphs)(device), long_lived)
        self.ran = Dispatch(CUDAGraphMode.NONE, BatchDescriptor(0))
        """How the last step ran."""
        self._lazy, self._debug = options.lazy, options.debug
        self._prepare = prepare
        self._inputs: dict[Dispatch, tuple[PreparedBatch, StepInputs]] = {}
        self._lasting: dict[Dispatch, tuple[PreparedBatch, PreparedStep]] = {}
        self._last: _LastingStep | None = None

    def padded_tokens(self, shape: BatchShape) -> int:
        """Tokens that a batch of this shape runs with."""
        return self.dispatcher.dispatch(shape).descriptor.num_tokens

    def capture(self, padding: Callable[[int, int], PreparedBatch]) -> None:
        """Captures every graph there is, unless that is left to the batches that need them.

        Args:
            padding: gives a batch of so many tokens of padding, in requests of so many.
        """
        if self._lazy:
            return
        with captures(self.steps.report):
            for key in with_progress("CUDA graphs", list(self.dispatcher.graphs())):
                query_len = self.dispatcher.uniform_query_len if key.descriptor.uniform else 1
                self._capture(key, padding(key.descriptor.num_tokens, query_len))

    def _capture(self, key: Dispatch, batch: PreparedBatch) -> None:
        self.steps.capture(key, self._prepare(batch, self._inputs_for(key, batch), key, True))

    def run(self, batch: PreparedBatch) -> Tensor | None:
        """The step's logits, a row for each that is sampled; None where no graph is for the batch."""
        last, self._last = self._last, None
        if last is not None and last.batch.shape is batch.shape and last.batch.shares_tensors(batch):
            self.steps.replay(last.key, last.step)
            self._last = last
            return last.logits
        key = self.ran = self.dispatcher.dispatch(batch.shape)
        if key.mode is CUDAGraphMode.NONE:
            return None
        assert key.descriptor.num_tokens == batch.num_padded_tokens, (key, batch.num_padded_tokens)
        if key not in self.steps:
            put_back = keep_inputs(batch)
            self._capture(key, batch)
            put_back()
        if self._debug:
            return checked_replay(self.steps, key, batch, partial(self._prepared, key, batch))
        step = self._step_for(key, batch)
        logits = self.steps.replay(key, step)[: batch.num_sampled]
        self._last = _LastingStep(batch, key, step, logits) if step.lasts else None
        return logits

    @property
    def repeat(self) -> Callable[[], bool] | None:
        """Replays the last step on what its tensors hold then, where it serves any batch in them.

        It gives False, and does nothing, if another step has run since.
        """
        last = self._last
        return None if last is None else partial(self._repeat, last, self.steps.repeat(last.key))

    def _repeat(self, last: _LastingStep, replay: Callable[[], None]) -> bool:
        if last is not self._last:
            return False
        self._last = None
        replay()
        self._last = last
        return True

    def _prepared(self, key: Dispatch, batch: PreparedBatch) -> PreparedStep:
        return self._prepare(batch, self._inputs_for(key, batch), key, False)

    def _step_for(self, key: Dispatch, batch: PreparedBatch) -> PreparedStep:
        """The batch as a step, or one that was prepared before and serves it too."""
        found = self._lasting.get(key)
        if found is not None and found[0].shares_tensors(batch):
            return found[1]
        step = self._prepared(key, batch)
        if step.lasts:
            self._lasting[key] = batch, step
        return step

    def _inputs_for(self, key: Dispatch, batch: PreparedBatch) -> StepInputs:
        """Views of the batch's persistent tensors, made once for each graph."""
        found = self._inputs.get(key)
        if found is None or not found[0].shares_tensors(batch):
            inputs = inputs_of_graph(batch, key.descriptor, self.dispatcher.uniform_query_len)
            found = self._inputs[key] = batch, inputs
        return found[1]

    def stats(self) -> Mapping[str, int]:
        """Replays by kind of graph."""
        counts: dict[str, int] = {}
        for key, count in self.steps.num_replays.items():
            kind = "decode" if key.descriptor.uniform else "mixed"
            kind = "pieces" if key.mode is CUDAGraphMode.PIECEWISE else kind
            counts[kind] = counts.get(kind, 0) + count
        return counts
