"""The requests of a batch, on the host."""

from __future__ import annotations

from typing import NamedTuple

from attnbackend.metadata import CommonAttentionMetadata

__all__ = ["Span", "host_spans"]


class Span(NamedTuple):
    """One request that brings tokens."""

    row: int
    start: int
    """Its first token."""
    stop: int
    seq_len: int
    """Its keys, from position 0 on; its last query is at position ``seq_len - 1``."""

    @property
    def length(self) -> int:
        return self.stop - self.start


def host_spans(batch: CommonAttentionMetadata, *, block_size: int, keeps_no_cache: bool) -> tuple[Span, ...]:
    """The requests that bring tokens, those of ``seq_len`` 0 among them.

    Args:
        batch: its lengths are copied to the host where it does not bring them there.
        block_size: tokens of a block.
        keeps_no_cache: the keys are the call's own, so a request has as many as queries, or none.

    Raises:
        ValueError: a request lies outside the tokens, or has more keys than there is room for.
    """
    starts, lens = batch.host_query_start_loc().tolist(), batch.host_seq_lens().tolist()
    if starts[0] != 0:
        raise ValueError(f"query_start_loc[0] is {starts[0]}; expected 0")
    rows = zip(range(len(lens)), starts[:-1], starts[1:], lens, strict=True)
    spans = tuple(Span(*row) for row in rows if row[1] != row[2])
    for span in spans:
        _check_tokens(span, batch.num_actual_tokens)
        if keeps_no_cache:
            _check_own_keys(span)
        else:
            _check_keys(span, batch.block_table.shape[1] * block_size)
    return spans


def _check_tokens(span: Span, num_tokens: int) -> None:
    if not span.start < span.stop <= num_tokens:
        raise ValueError(
            f"query_start_loc[{span.row + 1}] is {span.stop}; expected {span.start}, the one before it, or "
            f"more, and at most {num_tokens}, the number of tokens"
        )


def _check_own_keys(span: Span) -> None:
    if span.seq_len not in (0, span.length):
        raise ValueError(
            f"seq_lens[{span.row}] is {span.seq_len}; expected {span.length}, the row's tokens, or 0, since "
            "no cache is kept"
        )


def _check_keys(span: Span, limit: int) -> None:
    if not 0 <= span.seq_len <= limit:
        raise ValueError(
            f"seq_lens[{span.row}] is {span.seq_len}; expected 0 to {limit}, what block_table holds"
        )
