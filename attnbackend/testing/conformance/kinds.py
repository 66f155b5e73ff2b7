"""Features that depend on the lengths of the batch they are combined with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnbackend.testing.cases import AttentionCase
from attnbackend.types import AttentionType

__all__ = ["SPANS", "fit_to_batch", "resized"]

SPANS = "spans over the new tokens"
"""In place of an `AttentionCase`'s ``bidirectional_ranges``: made for each request by its lengths."""

Fields = dict[str, Any]


def resized(case: AttentionCase, lengths: Fields) -> AttentionCase:
    """The same case over another batch."""
    kept = {"query_lens": case.query_lens, "context_lens": case.context_lens, "attn_type": case.attn_type}
    spans = {} if case.bidirectional_ranges is None else {"bidirectional_ranges": SPANS}
    return replace(case, **fit_to_batch({**kept, **spans, **lengths}))


def fit_to_batch(fields: Fields) -> Fields:
    """``fields`` of an `AttentionCase` with what a kind of attention says of lengths and ranges."""
    query_lens, context_lens = fields["query_lens"], fields["context_lens"]
    kind = AttentionType(fields.get("attn_type", AttentionType.DECODER))
    if kind.keeps_no_cache:
        fields = {**fields, "context_lens": _no_context(query_lens, context_lens)}
    elif kind is AttentionType.ENCODER_DECODER:
        fields = {**fields, "context_lens": _encoder_context(query_lens, context_lens)}
    if fields.get("bidirectional_ranges") == SPANS:
        pairs = zip(query_lens, context_lens, strict=True)
        fields = {**fields, "bidirectional_ranges": tuple(_spans(n, c) for n, c in pairs)}
    return fields


def _no_context(query_lens: Sequence[int], context_lens: Sequence[int]) -> tuple[int, ...]:
    """An encoder's tokens are all its keys; requests without a key stay so."""
    pairs = zip(query_lens, context_lens, strict=True)
    return tuple(-query if query + context == 0 else 0 for query, context in pairs)


def _encoder_context(query_lens: Sequence[int], context_lens: Sequence[int]) -> tuple[int, ...]:
    """Every other request has an encoder shorter than its query, where the query leaves room for that."""
    pairs = enumerate(zip(query_lens, context_lens, strict=True))
    return tuple(
        1 - query if row % 2 and query > 1 and context > 0 else context for row, (query, context) in pairs
    )


def _spans(query: int, context: int) -> tuple[tuple[int, int], ...]:
    """One at the end of the new tokens, one from before them into them, of what the lengths have room for.

    An empty one comes first: neither order nor place is promised.
    """
    first, last, end = max(0, context - 2), context + query // 2, context + query
    spans = ((last + 2, end), (first, last + 1))
    return ((1, 1), *((a, b) for a, b in spans if 0 <= a < b <= end))
