"""Which graph, if any, a step runs from: a pure function of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from attnbackend.cudagraph.modes import CUDAGraphMode
from attnbackend.cudagraph.sizes import padded_size
from attnbackend.types import Reason

__all__ = ["BatchDescriptor", "BatchShape", "CUDAGraphDispatcher", "Dispatch"]


class BatchShape(NamedTuple):
    """What decides how a batch runs, without padding."""

    num_tokens: int
    num_reqs: int
    max_query_len: int
    all_decode: bool
    """Every request has finished its prompt before this step."""


class BatchDescriptor(NamedTuple):
    """What a graph was captured for."""

    num_tokens: int
    """Tokens, padding included."""
    num_reqs: int | None = None
    """Rows of per-request tensors, padding included; None: attention is not in the graph."""
    uniform: bool = False
    """Every request brings the same number of tokens, its prompt finished."""


class Dispatch(NamedTuple):
    """How a step runs."""

    mode: CUDAGraphMode
    """NONE, PIECEWISE or FULL."""
    descriptor: BatchDescriptor


@dataclass(frozen=True)
class CUDAGraphDispatcher:
    """Chooses a captured graph for each batch.

    Whether a step is a uniform decode is not seen from its shapes: a prompt of one token looks like a
    decode, and some backends plan the two apart. The caller says whether all prompts are finished.
    """

    mode: CUDAGraphMode
    sizes: tuple[int, ...]
    """Of mixed batches and pieces, ascending."""
    decode_sizes: tuple[int, ...]
    """Of uniform decodes, ascending multiples of `uniform_query_len`."""
    max_num_seqs: int
    uniform_query_len: int = 1

    def graphs(self) -> Iterator[Dispatch]:
        """Every graph there is to capture, the largest first, so that smaller ones reuse its memory."""
        full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        if self.mode.needs_pieces:
            yield from (Dispatch(pieces, BatchDescriptor(n)) for n in reversed(self.sizes))
        if self.mode.mixed_mode is full:
            yield from (Dispatch(full, self._mixed(n)) for n in reversed(self.sizes))
        if self.mode.decode_mode is full:
            yield from (Dispatch(full, self._uniform(n)) for n in reversed(self.decode_sizes))

    def kinds(self) -> Iterable[BatchDescriptor]:
        """The largest graph of each kind that is compiled apart: decodes, one token, one request."""
        every = reversed([key.descriptor for key in self.graphs()])
        return {(d.uniform, d.num_tokens == 1, d.num_reqs == 1): d for d in every}.values()

    def dispatch(self, batch: BatchShape) -> Dispatch:
        """The graph for a batch: a whole one if there is any, then pieces, then none."""
        if batch.all_decode and self.mode.decode_mode is CUDAGraphMode.FULL:
            size = padded_size(self.decode_sizes, batch.num_tokens) if self._is_uniform(batch) else None
            if size is not None:
                return Dispatch(CUDAGraphMode.FULL, self._uniform(size))
        return self._any_batch(batch.num_tokens)

    def reasons(self, batch: BatchShape) -> tuple[Reason, ...]:
        """Why a batch does not run from one whole graph; none where it does."""
        full, mode = CUDAGraphMode.FULL, self.mode
        if self.dispatch(batch).mode is full:
            return ()
        if full not in (mode.decode_mode, mode.mixed_mode):
            return (Reason("cudagraph_mode", mode.name, "one with FULL, for whole steps"),)
        found = []
        sizes = self.sizes if mode.mixed_mode is full else self.decode_sizes
        if mode.mixed_mode is not full and not batch.all_decode:
            found.append(Reason("all_decode", False, f"True: the whole graphs of {mode.name} hold decodes"))
        elif mode.mixed_mode is not full and not self._is_uniform(batch):
            allowed = f"{self.uniform_query_len} of each request, as in the graphs of decodes"
            found.append(Reason("query lengths", f"{batch.num_tokens} of {batch.num_reqs} requests", allowed))
        if batch.num_tokens > sizes[-1]:
            found.append(Reason("num_tokens", batch.num_tokens, f"at most {sizes[-1]}, the largest graph"))
        return tuple(found)

    def _is_uniform(self, batch: BatchShape) -> bool:
        q = self.uniform_query_len
        return batch.max_query_len == q and batch.num_tokens == batch.num_reqs * q

    def _any_batch(self, num_tokens: int) -> Dispatch:
        size = padded_size(self.sizes, num_tokens)
        if size is not None and self.mode.mixed_mode is CUDAGraphMode.FULL:
            return Dispatch(CUDAGraphMode.FULL, self._mixed(size))
        if size is not None and self.mode.needs_pieces:
            return Dispatch(CUDAGraphMode.PIECEWISE, BatchDescriptor(size))
        return Dispatch(CUDAGraphMode.NONE, BatchDescriptor(num_tokens))

    def _uniform(self, size: int) -> BatchDescriptor:
        return BatchDescriptor(size, size // self.uniform_query_len, uniform=True)

    def _mixed(self, size: int) -> BatchDescriptor:
        """A batch of ``size`` tokens has at most as many requests."""
        return BatchDescriptor(size, min(size, self.max_num_seqs))
