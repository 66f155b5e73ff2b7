"""The text of a request: stop strings are found and cut off, and no piece is sent too early."""

from __future__ import annotations

from collections.abc import Sequence

from attnbackend.runtime.detokenizer import IncrementalDetokenizer


class TextStream:
    """Joins decoded text and watches for stop strings.

    The stop string that is complete first ends the text before its first character (of several
    complete at once, the longest). Text that may be the beginning of a stop string is held back,
    so pieces already returned never turn out to be part of one.

    Args:
        detokenizer: gives the text of each token.
        stops: the stop strings, none of them empty.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._pieces: list[str] = []
        self._held = ""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All pieces returned so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Add a token and return the next piece; sets `is_stopped` when a stop string is met."""
        return self._advance(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the last piece, all that was held back; may still meet a stop string."""
        piece = self._advance(self._detokenizer.flush())
        return piece if self.is_stopped else piece + self._emit(len(self._held))

    def _advance(self, delta: str) -> str:
        if self.is_stopped:
            return ""
        self._held += delta
        start = _first_stop(self._held, self._stops)
        if start is None:
            return self._emit(len(self._held) - _open_length(self._held, self._stops))
        self.is_stopped = True
        return self._emit(start)

    def _emit(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        if piece:
            self._pieces.append(piece)
        return piece


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that ends first in the text, None when there is none."""
    starts = ((text.find(stop), len(stop)) for stop in stops)
    ends = [(start + length, start) for start, length in starts if start >= 0]
    return min(ends)[1] if ends else None


def _open_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins, but does not complete, a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
