"""Dense attention, written to be read: what every backend is judged against.

Nothing here is shared with a backend or a kernel. Shape suffixes: T tokens of the batch, N tokens
of one request, L keys of one request, H query heads, K key/value heads, D head size, B cache
blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionFeatures", "DenseAttention", "plain_torch_attention", "reference_attention"]


@dataclass(frozen=True, kw_only=True)
class AttentionFeatures:
    """All that changes the answer besides query, keys and values."""

    scale: float
    """Factor of q.k, before the soft-cap."""
    causal: bool = True
    """Whether a token at position p sees keys j <= p only."""
    sliding_window: int | None = None
    """W >= 1, the token itself counted: keys j > p - W. None: no window."""
    two_sided_window: bool = False
    """The window ends keys j < p + W too: encoders."""
    attention_chunk_size: int | None = None
    """C >= 1: keys with j // C == p // C."""
    logits_soft_cap: float = 0.0
    """c > 0 turns a logit s into c * tanh(s / c); 0 is off."""
    alibi_slopes: Tensor | None = None
    """[H]; -slope * |j - p| is added after the soft-cap."""
    sinks: Tensor | None = None
    """[H], one extra logit a head, in the denominator (and the LSE) only."""
    bidirectional_ranges: Tensor | None = None
    """[R, G, 2], positions [start, end): a token at a position in a range sees all of the range too."""
    k_scale: Tensor | None = None
    """One element or [K]; real value = stored value * scale."""
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}; use None for none")


@dataclass(frozen=True)
class _Request:
    """One request's query and keys, already gathered and dequantised, heads of the keys repeated."""

    row: int
    rows: slice
    q_NHD: Tensor
    k_LHD: Tensor
    v_LHD: Tensor

    @property
    def first_position(self) -> int:
        """Absolute position of the first query token: causality is bottom-right aligned."""
        return self.k_LHD.shape[0] - self.q_NHD.shape[0]


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention in one arithmetic, over pages or over the new tokens' own keys.

    Two instances are public: ``reference_attention`` (float64 throughout) and
    ``plain_torch_attention`` (both matrix products in the query's dtype with their results rounded
    to it, everything between them in float32), the yardstick of the relative error rule.
    """

    exact: bool

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        **features: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend each request's query tokens to its keys; arguments are only read.

        Args:
            query: [T, H, D], any floating dtype. Rows from ``query_start_loc[-1]`` on are padding.
            kv_cache: logical [B, 2, S, K, D], any floating dtype (fp8 too) and any strides.
            query_start_loc: integers [R + 1], non-decreasing.
            seq_lens: integers [R], context plus query tokens (in cross attention the encoder's);
                0 on padded rows.
            block_table: integers [R, W].
            features: fields of `AttentionFeatures`.

        Returns:
            ``(output [T, H, D], lse [T, H])``, LSE in natural log. float64 both for
            ``reference_attention``; the query's dtype and float32 for ``plain_torch_attention``.
            A request of seq_len 0 and padding tokens give (0, -inf); a token that sees no key
            gives 0, and -inf or its sink.

        Raises:
            ValueError: shapes that contradict each other, a block id or window out of range.
            TypeError: an unknown feature.
        """
        _check_arguments(query, kv_cache, query_start_loc, seq_lens, block_table)
        asked = AttentionFeatures(**features)
        keys = _DequantisedPages(kv_cache[:, 0], asked.k_scale, self._work(query))
        values = _DequantisedPages(kv_cache[:, 1], asked.v_scale, self._work(query))
        pages = _requests(query.to(self._work(query)), keys, values, query_start_loc, seq_lens, block_table)
        return self._attend(query, pages, asked)

    def over_own_keys(
        self, query: Tensor, key: Tensor, value: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
        **features: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As a call, for encoders: the keys of a request are its rows of key and value [T, K, D]."""
        work, group = self._work(query), query.shape[1] // key.shape[1]
        q_THD, k_THD, v_THD = (x.to(work) for x in (query, key, value))
        k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_THD, v_THD))
        spans = zip(query_start_loc.tolist()[:-1], seq_lens.tolist(), strict=True)
        rows = [(row, slice(start, start + length)) for row, (start, length) in enumerate(spans) if length]
        own = (_Request(row, at, q_THD[at], k_THD[at], v_THD[at]) for row, at in rows)
        return self._attend(query, own, AttentionFeatures(**features))

    def _work(self, query: Tensor) -> torch.dtype:
        return torch.float64 if self.exact else query.dtype

    def _attend(
        self, query: Tensor, requests: Iterable[_Request], asked: AttentionFeatures
    ) -> tuple[Tensor, Tensor]:
        between = torch.float64 if self.exact else torch.float32
        out_THD = query.new_zeros(query.shape, dtype=self._work(query))
        lse_TH = query.new_full(query.shape[:2], -torch.inf, dtype=between)
        for request in requests:
            s_HNL = self._logits(request, asked, between)
            p_HNL, lse_HN = _softmax_with_sink(s_HNL, asked.sinks)
            o_HND = self._matmul(p_HNL.to(out_THD.dtype), request.v_LHD.transpose(0, 1))
            out_THD[request.rows] = o_HND.transpose(0, 1)
            lse_TH[request.rows] = lse_HN.transpose(0, 1)
        return out_THD, lse_TH

    def _logits(self, request: _Request, asked: AttentionFeatures, between: torch.dtype) -> Tensor:
        """[H, N, L], -inf where a key is not seen."""
        q_HND, k_HDL = request.q_NHD.transpose(0, 1), request.k_LHD.permute(1, 2, 0)
        s_HNL = self._matmul(q_HND, k_HDL).to(between) * asked.scale
        if asked.logits_soft_cap > 0:
            s_HNL = asked.logits_soft_cap * torch.tanh(s_HNL / asked.logits_soft_cap)
        if asked.alibi_slopes is not None:
            s_HNL = s_HNL + _alibi_bias(request, asked.alibi_slopes.to(s_HNL))
        return s_HNL.masked_fill(~_visible_keys(request, asked), -torch.inf)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """[H, N, X] @ [H, X, Y]."""
        return a @ b


reference_attention = DenseAttention(exact=True)
plain_torch_attention = DenseAttention(exact=False)


@dataclass(frozen=True)
class _DequantisedPages:
    """Keys (or values) of one request at a time: pages joined, cut at seq_len, scaled."""

    cache_BSKD: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    def gather(self, block_ids: list[int], length: int) -> Tensor:
        """Rows 0..length-1 of the pages named, [length, K, D]; what lies past them is cut off."""
        # As bytes: indexing is not implemented for fp8 on every device and version.
        stored = self.cache_BSKD
        bits = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        x_LKD = bits[block_ids].view(stored.dtype).flatten(0, 1)[:length]
        x_LKD = x_LKD.to(torch.float64 if self.dtype is torch.float64 else torch.float32)
        if self.scale is not None:
            x_LKD = x_LKD * self.scale.to(x_LKD).reshape(-1, 1)
        return x_LKD.to(self.dtype)


def _requests(
    q_THD: Tensor,
    keys: _DequantisedPages,
    values: _DequantisedPages,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
) -> Iterator[_Request]:
    """The requests that have both a query token and a key, heads of the cache repeated."""
    starts = query_start_loc.tolist()
    group = q_THD.shape[1] // keys.cache_BSKD.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[row], starts[row + 1])
        if rows.start == rows.stop or length == 0:
            continue
        block_ids = _blocks_of(block_table[row], length, keys.cache_BSKD, row)
        k_LHD = keys.gather(block_ids, length).repeat_interleave(group, dim=1)
        v_LHD = values.gather(block_ids, length).repeat_interleave(group, dim=1)
        yield _Request(row, rows, q_THD[rows], k_LHD, v_LHD)


def _blocks_of(table_W: Tensor, length: int, cache_BSKD: Tensor, row: int) -> list[int]:
    num_blocks, block_size = cache_BSKD.shape[:2]
    needed = -(-length // block_size)
    if needed > table_W.shape[0]:
        raise ValueError(
            f"seq_lens[{row}] = {length} needs {needed} pages of {block_size} tokens, but "
            f"block_table has {table_W.shape[0]} columns; widen the table"
        )
    block_ids: list[int] = table_W[:needed].tolist()
    outside = [block for block in block_ids if not 0 <= block < num_blocks]
    if outside:
        raise ValueError(
            f"block_table[{row}] names blocks {outside}, but kv_cache has blocks 0..{num_blocks - 1}"
        )
    return block_ids


def _key_minus_query_position(request: _Request) -> Tensor:
    """j - p for every query token (rows) and key (columns) of the request, int64 [N, L]."""
    p_N1, j_1L = _positions(request)
    return j_1L - p_N1


def _visible_keys(request: _Request, asked: AttentionFeatures) -> Tensor:
    distance_NL = _key_minus_query_position(request)
    visible_NL = torch.ones_like(distance_NL, dtype=torch.bool)
    if asked.causal:
        visible_NL &= distance_NL <= 0
    if asked.sliding_window is not None:
        visible_NL &= distance_NL > -asked.sliding_window
        if asked.two_sided_window:
            visible_NL &= distance_NL < asked.sliding_window
    if asked.attention_chunk_size is not None:
        visible_NL &= _same_chunk(request, asked.attention_chunk_size)
    if asked.bidirectional_ranges is not None:
        for start, end in asked.bidirectional_ranges[request.row].tolist():
            visible_NL |= _both_within(request, start, end)
    return visible_NL


def _positions(request: _Request) -> tuple[Tensor, Tensor]:
    """Positions of the query tokens [N, 1] and of the keys [1, L]."""
    device = request.q_NHD.device
    p_N = torch.arange(request.q_NHD.shape[0], device=device) + request.first_position
    return p_N[:, None], torch.arange(request.k_LHD.shape[0], device=device)[None, :]


def _same_chunk(request: _Request, size: int) -> Tensor:
    p_N1, j_1L = _positions(request)
    return p_N1 // size == j_1L // size


def _both_within(request: _Request, start: int, end: int) -> Tensor:
    p_N1, j_1L = _positions(request)
    return (p_N1 >= start) & (p_N1 < end) & (j_1L >= start) & (j_1L < end)


def _alibi_bias(request: _Request, slopes_H: Tensor) -> Tensor:
    return -slopes_H[:, None, None] * _key_minus_query_position(request).abs()


def _softmax_with_sink(s_HNL: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities [H, N, L] (rows without a visible key are 0) and natural-log LSE [H, N]."""
    logits = s_HNL
    if sinks_H is not None:
        sink_HN1 = sinks_H.to(s_HNL)[:, None, None].expand(-1, s_HNL.shape[1], 1)
        logits = torch.cat([s_HNL, sink_HN1], dim=-1)
    lse_HN = torch.logsumexp(logits, dim=-1)
    # exp(-inf - -inf) is NaN: an empty row subtracts 0, which leaves exp(-inf) = 0.
    finite_HN = lse_HN.masked_fill(lse_HN == -torch.inf, 0.0)
    return torch.exp(s_HNL - finite_HN[..., None]), lse_HN


def _check_arguments(
    query: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
) -> None:
    _check_query_and_cache(query, kv_cache)
    rows = seq_lens.shape[0]
    if query_start_loc.shape != (rows + 1,) or block_table.shape[0] != rows:
        raise ValueError(
            f"seq_lens has {rows} rows, so query_start_loc must have {rows + 1} entries and "
            f"block_table {rows} rows; got {tuple(query_start_loc.shape)} and "
            f"{tuple(block_table.shape)}"
        )
    starts = query_start_loc.tolist()
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] > query.shape[0]:
        raise ValueError(
            f"query_start_loc must rise from 0 to at most the {query.shape[0]} query rows, got {starts}"
        )


def _check_query_and_cache(query: Tensor, kv_cache: Tensor) -> None:
    if query.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(
            "query must be [T, H, D] and kv_cache [B, 2, S, K, D], got shapes "
            f"{tuple(query.shape)} and {tuple(kv_cache.shape)}"
        )
    if query.shape[2] != kv_cache.shape[4]:
        raise ValueError(
            f"head size of query is {query.shape[2]}, of kv_cache {kv_cache.shape[4]}; they must be equal"
        )
    if query.shape[1] % kv_cache.shape[3]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {kv_cache.shape[3]} key/value heads "
            "evenly; the first must be a multiple of the second"
        )
