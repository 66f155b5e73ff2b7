"""Sizes that probe a claimed range: its ends, what is typical, and an odd multiple of its step."""

from __future__ import annotations

from collections.abc import Sequence

from attnbackend.types import MultipleOf

__all__ = ["pick_size", "probing_sizes"]


def probing_sizes(
    claimed: Sequence[int | MultipleOf], *, typical: Sequence[int], largest: int
) -> tuple[int, ...]:
    """Rising sizes to try.

    Args:
        claimed: a backend's ``supported_head_sizes`` or ``supported_block_sizes``.
        typical: sizes that are tried wherever they are claimed.
        largest: what an open range is tried up to.
    """
    found: set[int] = set()
    for item in claimed:
        if isinstance(item, MultipleOf):
            low = item.at_least(1)
            odd = low + item.base * (1 + low // item.base % 2)
            ends = (low, odd, item.at_most(item.high or max(largest, low)))
            found.update(size for size in (*ends, *typical) if size in item)
        else:
            found.add(item)
    return tuple(sorted(found))


def pick_size(claimed: Sequence[int | MultipleOf], wanted: int) -> int:
    """``wanted`` where it is claimed, else the claimed size nearest to it.

    Raises:
        ValueError: nothing is claimed.
    """
    sizes = probing_sizes(claimed, typical=(wanted,), largest=max(wanted, 64))
    if not sizes:
        raise ValueError("no size is claimed, so there is nothing to check; state supported sizes")
    return min(sizes, key=lambda size: (abs(size - wanted), size))
