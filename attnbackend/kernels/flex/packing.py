"""A batch laid out in tiles: every request's queries and keys begin on a tile of their own.

So a tile belongs to one request, and what a query sees is one interval of packed keys. The keys are
copied, because the cache cannot be read where it lies: what was never written may be NaN, and a masked
probability of 0 times NaN is NaN. Rows of a tile that hold no key are zeros.

Shape legend: R requests, M packed query rows, N packed key rows, T tokens, B blocks, S block_size,
K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.kernels.flex.spans import Span
from attnbackend.kernels.flex.tiles import TileLists, list_tiles
from attnbackend.kernels.flex.visibility import Visibility, widen_by_ranges

__all__ = ["PackedKeys", "PackedSpan", "Packing", "TileSizes", "pack"]


class TileSizes(NamedTuple):
    """Rows of a tile, and the fewest tiles; of 1 and 1 nothing is padded."""

    queries: int
    keys: int
    least_queries: int = 1
    """Fewest tiles of queries."""
    least_keys: int = 1


class PackedSpan(NamedTuple):
    """Where one request lies in the packed rows."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class PackedKeys:
    """How keys and values come to their packed rows."""

    source: tuple[Tensor, ...]
    """int64 [N] each: the block and the offset in it, or the token where no cache is kept."""
    padding: Tensor
    """int64, the packed rows that hold no key."""

    def gather(self, stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """One side of the cache [B, S, K, D], or tokens [T, K, D], as [N, K, D] of ``dtype``.

        ``scale`` is float32 of one element or [K]; real = stored * scale.
        """
        # As bytes: indexing is not implemented for float8 on every device and version.
        bits = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        packed_NKD = bits[self.source].view(stored.dtype)
        if scale is not None:
            packed_NKD = packed_NKD.float() * scale.view(-1, 1)
        packed_NKD = packed_NKD.to(dtype)
        if self.padding.numel():
            packed_NKD.index_fill_(0, self.padding, 0)
        return packed_NKD


@dataclass(frozen=True)
class Packing:
    """One step's layout, on the device but for ``spans`` and ``sizes``."""

    sizes: TileSizes
    spans: tuple[PackedSpan, ...]
    token_M: Tensor
    """int64, the token of each packed query row; 0 where there is none."""
    row_M: Tensor
    """int64, the batch's row of each packed query row."""
    shift_M: Tensor
    """int32, packed row of a request's key less its position."""
    seq_len_M: Tensor
    """int32, 0 where there is no query."""
    self_M: Tensor
    """int32, the packed row of the key at the query's own position, which may lie before all keys."""
    first_M: Tensor
    """int32, the first packed key row that a query sees."""
    stop_M: Tensor
    """int32, one past the last; not above ``first_M`` where a query sees no key."""
    place_T: Tensor
    """int64, the packed row of each token up to the last request's; 0 for those of ``empty``."""
    empty: Tensor
    """int64, tokens of requests without keys."""
    keys: PackedKeys
    lists: TileLists

    def interval(self, ranges: Tensor | None) -> tuple[Tensor, Tensor]:
        """``first_M`` and ``stop_M``, widened by bidirectional ranges, int32 [R, G, 2]."""
        if ranges is None:
            return self.first_M, self.stop_M
        shift = self.shift_M
        positions = (self.first_M - shift, self.stop_M - shift, self.self_M - shift)
        first, stop = widen_by_ranges(*positions, self.seq_len_M, ranges[self.row_M])
        return first + shift, torch.where(self.seq_len_M > 0, stop + shift, self.stop_M)


@dataclass(frozen=True)
class _Requests:
    """The requests that have keys, and where they begin: int64 [R] on the host."""

    row: Tensor
    start: Tensor
    length: Tensor
    seq_len: Tensor
    base: Tensor
    """Position of the first key that is packed."""

    @classmethod
    def of(cls, spans: Sequence[Span], visibility: Visibility, all_keys: bool) -> _Requests:
        columns = torch.tensor(list(spans), dtype=torch.int64).view(-1, 4).unbind(1)
        row, start, stop, seq_len = columns
        first = visibility.first(seq_len - (stop - start))
        base = torch.zeros_like(first) if all_keys else torch.minimum(first, seq_len - 1)
        return cls(row, start, stop - start, seq_len, base)

    @property
    def num_keys(self) -> Tensor:
        return self.seq_len - self.base

    @property
    def position(self) -> Tensor:
        """Of each request's first query."""
        return self.seq_len - self.length


@dataclass(frozen=True)
class _Tiles:
    """One side cut into tiles of ``size`` rows: int64 on the host."""

    size: int
    request: Tensor
    """The request of each tile; padding tiles, at the end, are not in it."""
    offset: Tensor
    """First row of each tile within its request."""
    first_row_R: Tensor
    """First packed row of each request."""
    count: int
    """Tiles, padding among them."""

    @classmethod
    def of(cls, lengths_R: Tensor, size: int, least: int) -> _Tiles:
        tiles_R = (lengths_R + size - 1) // size
        start_R = tiles_R.cumsum(0) - tiles_R
        request = torch.arange(len(lengths_R)).repeat_interleave(tiles_R)
        offset = (torch.arange(len(request)) - start_R[request]) * size
        return cls(size, request, offset, start_R * size, max(least, len(request)))

    def spread(self, *by_tile: Tensor, device: torch.device) -> Tensor:
        """Values of tiles, [len(by_tile), count * size] on the device, 0 on padding tiles."""
        table = torch.zeros(len(by_tile), self.count, dtype=torch.int64)
        for line, values in zip(table, by_tile, strict=True):
            line[: len(values)] = values
        return table.to(device, non_blocking=True).repeat_interleave(self.size, 1)

    def rows_before(self, lengths_R: Tensor) -> Tensor:
        """Rows of each tile that its request fills."""
        return (lengths_R[self.request] - self.offset).clamp(max=self.size)

    def within(self, device: torch.device) -> Tensor:
        """Place of each packed row in its tile."""
        return torch.arange(self.size, device=device).repeat(self.count)


def pack(
    spans: Sequence[Span],
    visibility: Visibility,
    sizes: TileSizes,
    *,
    block_table: Tensor | None,
    block_size: int,
    device: torch.device,
    all_keys: bool = False,
) -> Packing:
    """Lays a batch out.

    Args:
        spans: the requests, in the order of their tokens.
        visibility: the layer's rules; keys before all that they let anyone see are left out.
        sizes: rows of a tile.
        block_table: int32 [R, W] on ``device``; None where the keys are the call's own tokens.
        block_size: tokens of a block.
        device: where the packed rows will be.
        all_keys: pack and list every key, for ranges that the rules do not know.
    """
    requests = _Requests.of([span for span in spans if span.seq_len], visibility, all_keys)
    queries = _Tiles.of(requests.length, sizes.queries, sizes.least_queries)
    keys = _Tiles.of(requests.num_keys, sizes.keys, sizes.least_keys)
    rows = _query_rows(requests, queries, keys, visibility, device)
    place_T, empty = _places(spans, queries, device)
    return Packing(
        sizes=sizes, spans=_packed_spans(requests, queries, keys), **rows, place_T=place_T, empty=empty,
        keys=_packed_keys(requests, keys, block_table, block_size, device),
        lists=_tile_lists(requests, queries, keys, visibility, all_keys, device),
    )  # fmt: skip


def _packed_spans(requests: _Requests, queries: _Tiles, keys: _Tiles) -> tuple[PackedSpan, ...]:
    columns = (queries.first_row_R, requests.length, keys.first_row_R, requests.num_keys)
    return tuple(
        PackedSpan(slice(q, q + n), slice(k, k + count))
        for q, n, k, count in zip(*(column.tolist() for column in columns), strict=True)
    )


def _query_rows(
    requests: _Requests, queries: _Tiles, keys: _Tiles, visibility: Visibility, device: torch.device
) -> dict[str, Tensor]:
    """The fields of `Packing` that end in M."""
    of = queries.request
    token, position, filled, row, seq_len, shift = queries.spread(
        requests.start[of] + queries.offset, requests.position[of] + queries.offset,
        queries.rows_before(requests.length), requests.row[of], requests.seq_len[of],
        (keys.first_row_R - requests.base)[of], device=device,
    )  # fmt: skip
    within = queries.within(device)
    is_query, position = within < filled, position + within
    first, stop = visibility.first(position), visibility.stop(position, seq_len)
    int32 = {
        "shift_M": shift, "seq_len_M": torch.where(is_query, seq_len, 0), "self_M": position + shift,
        "first_M": torch.where(is_query, first + shift, 0), "stop_M": torch.where(is_query, stop + shift, 0),
    }  # fmt: skip
    int64 = {"token_M": torch.where(is_query, token + within, 0), "row_M": row}
    return {**int64, **{name: x.to(torch.int32) for name, x in int32.items()}}


def _places(spans: Sequence[Span], queries: _Tiles, device: torch.device) -> tuple[Tensor, Tensor]:
    """The packed row of each token, and the tokens that have none."""
    place_T = torch.zeros(spans[-1].stop if spans else 0, dtype=torch.int64)
    empty = [torch.empty(0, dtype=torch.int64)]
    first_rows = iter(queries.first_row_R.tolist())
    for span in spans:
        if span.seq_len:
            first = next(first_rows)
            place_T[span.start : span.stop] = torch.arange(first, first + span.length)
        else:
            empty.append(torch.arange(span.start, span.stop))
    return place_T.to(device, non_blocking=True), torch.cat(empty).to(device, non_blocking=True)


def _packed_keys(
    requests: _Requests, keys: _Tiles, block_table: Tensor | None, block_size: int, device: torch.device
) -> PackedKeys:
    of = keys.request
    filled = keys.rows_before(requests.num_keys)
    row, position, start, count = keys.spread(
        requests.row[of], requests.base[of] + keys.offset, requests.start[of], filled, device=device
    )
    within = keys.within(device)
    position = torch.where(within < count, position + within, 0)
    if block_table is None:
        source: tuple[Tensor, ...] = (start + position,)
    else:
        source = (block_table[row, position // block_size].long(), position % block_size)
    return PackedKeys(source, _padding_rows(keys, filled).to(device, non_blocking=True))


def _padding_rows(keys: _Tiles, filled: Tensor) -> Tensor:
    """Packed rows without a key, on the host: their number must be known there."""
    filled = torch.cat([filled, filled.new_zeros(keys.count - len(filled))])
    partly = (filled < keys.size).nonzero().flatten()
    missing = keys.size - filled[partly]
    ends = (partly + 1) * keys.size
    back = torch.arange(int(missing.sum())) - (missing.cumsum(0) - missing).repeat_interleave(missing)
    return ends.repeat_interleave(missing) - 1 - back


def _tile_lists(
    requests: _Requests, queries: _Tiles, keys: _Tiles, visibility: Visibility, all_keys: bool,
    device: torch.device,
) -> TileLists:  # fmt: skip
    """From what the first and the last query of each tile see: intervals only move up with positions."""
    of = queries.request
    low = requests.position[of] + queries.offset
    high = low + queries.rows_before(requests.length) - 1
    seq_len, base = requests.seq_len[of], requests.base[of]
    touched = (visibility.first(low) - base, visibility.stop(high, seq_len) - base)
    filled = (visibility.first(high) - base, visibility.stop(low, seq_len) - base)
    if all_keys:
        touched = (torch.zeros_like(base), seq_len)
    first_tile = keys.first_row_R[of] // keys.size
    return list_tiles(touched, filled, first_tile, keys.size, queries.count, device)
