"""Dense attention over a paged cache, written to be read: what every backend is judged against.

Nothing here is shared with a backend or a kernel. Shape suffixes: T tokens of the batch, N tokens
of one request, L keys of one request, H query heads, K key/value heads, D head size, B cache
blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DenseAttention", "plain_torch_attention", "reference_attention"]


@dataclass(frozen=True)
class _Request:
    """One request's query and keys, already gathered from the pages and dequantised."""

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
    """Dense attention over paged arguments, in one arithmetic.

    Two instances are public: ``reference_attention`` (float64 throughout) and
    ``plain_torch_attention`` (both matrix products in the query's dtype with their results rounded
    to it, everything between them in float32), the yardstick of the relative error rule.
    """

    exact: bool
    in_order: bool = False
    """Sums of both matrix products element after element, each rounded: the least exact honest order."""

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        causal: bool = True,
        sliding_window: int | None = None,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend each request's query tokens to its keys; arguments are only read.

        Args:
            query: [T, H, D], any floating dtype. Rows from ``query_start_loc[-1]`` on are padding.
            kv_cache: logical [B, 2, S, K, D], any floating dtype (fp8 too) and any strides.
            query_start_loc: integers [R + 1], non-decreasing.
            seq_lens: integers [R], context plus query tokens; 0 on padded rows.
            block_table: integers [R, W].
            scale: factor of q.k, before the soft-cap.
            causal: whether a token at position p sees keys j <= p only.
            sliding_window: W >= 1, the token itself counted: keys j > p - W. None: no window.
            logits_soft_cap: c > 0 turns a logit s into c * tanh(s / c); 0 is off.
            alibi_slopes: [H]; slope * (j - p) is added after the soft-cap.
            sinks: [H], one extra logit a head, in the denominator (and the LSE) only.
            k_scale, v_scale: one element or [K]; real value = stored value * scale.

        Returns:
            ``(output [T, H, D], lse [T, H])``, LSE in natural log. float64 both for
            ``reference_attention``; the query's dtype and float32 for ``plain_torch_attention``.
            A request of seq_len 0 and padding tokens give (0, -inf); a token that sees no key
            gives 0, and -inf or its sink.

        Raises:
            ValueError: shapes that contradict each other, a block id or window out of range.
        """
        _check_arguments(query, kv_cache, query_start_loc, seq_lens, block_table, sliding_window)
        work = torch.float64 if self.exact else query.dtype
        between = torch.float64 if self.exact else torch.float32
        out_THD = query.new_zeros(query.shape, dtype=work)
        lse_TH = query.new_full(query.shape[:2], -torch.inf, dtype=between)
        key_pages = _DequantisedPages(kv_cache[:, 0], k_scale, work)
        value_pages = _DequantisedPages(kv_cache[:, 1], v_scale, work)
        for request in _requests(
            query.to(work), key_pages, value_pages, query_start_loc, seq_lens, block_table
        ):
            q_HND, k_HDL = request.q_NHD.transpose(0, 1), request.k_LHD.permute(1, 2, 0)
            s_HNL = self._matmul(q_HND, k_HDL).to(between) * scale
            if logits_soft_cap > 0:
                s_HNL = logits_soft_cap * torch.tanh(s_HNL / logits_soft_cap)
            if alibi_slopes is not None:
                s_HNL = s_HNL + _alibi_bias(request, alibi_slopes.to(s_HNL))
            visible_NL = _visible_keys(request, causal, sliding_window)
            s_HNL = s_HNL.masked_fill(~visible_NL, -torch.inf)
            p_HNL, lse_HN = _softmax_with_sink(s_HNL, sinks)
            o_HND = self._matmul(p_HNL.to(work), request.v_LHD.transpose(0, 1))
            out_THD[request.rows] = o_HND.transpose(0, 1)
            lse_TH[request.rows] = lse_HN.transpose(0, 1)
        return out_THD, lse_TH

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """[H, N, X] @ [H, X, Y]."""
        if not self.in_order:
            return a @ b
        total = a.new_zeros(*a.shape[:2], b.shape[2])
        for x in range(a.shape[2]):
            total = total + a[:, :, x, None] * b[:, None, x]
        return total


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
        yield _Request(rows, q_THD[rows], k_LHD, v_LHD)


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
    device = request.q_NHD.device
    j_L = torch.arange(request.k_LHD.shape[0], device=device)
    p_N = torch.arange(request.q_NHD.shape[0], device=device) + request.first_position
    return j_L[None, :] - p_N[:, None]


def _visible_keys(request: _Request, causal: bool, sliding_window: int | None) -> Tensor:
    distance_NL = _key_minus_query_position(request)
    visible_NL = torch.ones_like(distance_NL, dtype=torch.bool)
    if causal:
        visible_NL &= distance_NL <= 0
    if sliding_window is not None:
        visible_NL &= distance_NL > -sliding_window
    return visible_NL


def _alibi_bias(request: _Request, slopes_H: Tensor) -> Tensor:
    return slopes_H[:, None, None] * _key_minus_query_position(request)


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
    sliding_window: int | None,
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
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window counts the token itself, so it is at least 1, got {sliding_window}; "
            "use None for no window"
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
