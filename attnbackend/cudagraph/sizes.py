"""The batch sizes, in tokens, that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attnbackend.types import Reason

__all__ = ["capture_sizes", "decode_sizes", "mixed_sizes", "padded_size", "uncovered_decodes"]

_FINE, _COARSE = 8, 16
"""Steps between sizes up to 256, where a step is short and padding shows, and above."""
_MIXED = 512
"""Tokens up to which mixed batches have graphs of their own, beyond those that decodes ask for."""


def capture_sizes(
    max_num_seqs: int, max_num_tokens: int, *, uniform_query_len: int = 1, sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Sizes in ascending order, with none missing that a batch of decodes needs.

    Args:
        max_num_seqs: most requests of a step.
        max_num_tokens: most tokens of a step.
        uniform_query_len: tokens a request of a decode step.
        sizes: a person's own, checked; None: 1, 2, 4, then steps of 8 up to 256 and of 16 above, up to
            the largest batch of decodes, which is a size itself.

    Raises:
        ValueError: an own size is not in 1..max_num_tokens, or none is given.
    """
    if sizes is None:
        return _up_to(min(max_num_seqs * uniform_query_len, max_num_tokens))
    wrong = [n for n in sizes if type(n) is not int or not 1 <= n <= max_num_tokens]
    if wrong or not sizes:
        raise ValueError(
            f"cudagraph_capture_sizes={list(sizes)}: {wrong or 'no size'} is not allowed; each must be a "
            f"whole number in 1..{max_num_tokens}, max_num_batched_tokens"
        )
    return tuple(sorted(set(sizes)))


def _up_to(largest: int) -> tuple[int, ...]:
    steps = [1, 2, 4, *range(_FINE, 256, _FINE), *range(256, largest + 1, _COARSE)]
    return tuple(sorted({*(n for n in steps if n <= largest), largest}))


def mixed_sizes(
    max_num_seqs: int, max_num_tokens: int, *, uniform_query_len: int = 1, sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Sizes of mixed batches: those of `capture_sizes`, and on to twice the largest batch of decodes.

    So a prompt has room beside decodes. Above 512 tokens decodes alone ask for more: in so large a step the
    GPU takes longer than the host.
    """
    if sizes is not None:
        return capture_sizes(max_num_seqs, max_num_tokens, sizes=sizes)
    decodes = max_num_seqs * uniform_query_len
    return _up_to(min(max(decodes, min(2 * decodes, _MIXED)), max_num_tokens))


def decode_sizes(sizes: Sequence[int], max_num_seqs: int, uniform_query_len: int) -> tuple[int, ...]:
    """The sizes of decode steps: each rounded up to whole requests, none above the largest such batch.

    Raises:
        ValueError: no size is left.
    """
    q, largest = uniform_query_len, max_num_seqs * uniform_query_len
    rounded = {-(-n // q) * q for n in sizes}
    kept = tuple(sorted(n for n in rounded if n <= largest))
    if not kept:
        raise ValueError(
            f"cudagraph_capture_sizes={list(sizes)} leave no decode step of {q} tokens a request and at most "
            f"{max_num_seqs} requests; give one of at most {largest}"
        )
    return kept


def uncovered_decodes(sizes: Sequence[int], max_num_seqs: int, uniform_query_len: int = 1) -> list[Reason]:
    """What says that some batches of decodes are larger than every size, so no graph serves them."""
    largest = max_num_seqs * uniform_query_len
    if sizes[-1] >= largest:
        return []
    allowed = f"{largest} among them, or decodes of {sizes[-1] + 1} to {largest} tokens run without a graph"
    return [Reason("cudagraph_capture_sizes", list(sizes), allowed)]


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest of ascending ``sizes`` that holds ``num_tokens``; None: all are smaller."""
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None
