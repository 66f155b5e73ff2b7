"""Turns tokens into text one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Prompt tokens in the first window: what comes before decides about a leading space."""
_WINDOW_TOKENS = 16
"""Tokens decoded again at a step before the window moves on."""
_MAX_HELD_TOKENS = 32
"""Tokens that may wait for a character to be completed. UTF-8 needs at most 4 bytes, so what is
incomplete for so long is no character."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model wants before it."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens; bytes that make no character come as U+FFFD."""
        ...


class IncrementalDetokenizer:
    """Text of a growing list of tokens, in linear time.

    Only a window of the last tokens is decoded at a step. It begins where the text had no open
    character, and the text of its first part, which is out already, is cut off. Characters whose
    bytes are spread over tokens come out once complete.

    Args:
        tokenizer: a transformers tokenizer, or what decodes like one.
        prompt_token_ids: the prompt, of which the last tokens give the context.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._boundary = len(self._window)
        self._emitted = len(self._decode().rstrip(_REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became certain, possibly none."""
        self._window.append(token_id)
        text = self._decode()
        is_overdue = len(self._window) - self._boundary >= _MAX_HELD_TOKENS
        stable = text if is_overdue else text.rstrip(_REPLACEMENT)
        delta = self._take(stable)
        if len(stable) == len(text):
            self._close()
        return delta

    def flush(self) -> str:
        """Return what is held back, incomplete characters as U+FFFD."""
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        delta = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return delta

    def _close(self) -> None:
        """The text is complete here: move the window to the boundary before, if it is long."""
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[self._boundary :]
            self._emitted = len(self._decode())
        self._boundary = len(self._window)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)
