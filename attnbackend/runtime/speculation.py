"""Guesses of the tokens that follow, checked by the model in one step.

A decode with k drafts computes k + 1 tokens. Each draft is kept while it is the very token that the request
samples there, greedy or from its seed, so tokens are those of decoding one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnbackend.runtime.request import Request

__all__ = ["METHODS", "NgramProposer", "SpeculationStats", "drafts_of"]

METHODS = ("ngram",)
DEFAULT_DRAFTS = 3
_LONGEST, _SHORTEST = 4, 2
"""Tokens that must be equal for what followed them to be proposed."""


def drafts_of(speculative: str | None, num_speculative_tokens: int | None) -> int:
    """Drafts a decode, from what a person asked for; 0: no speculation.

    Raises:
        ValueError: an unknown method, a number below 1, or a number without a method.
        TypeError: a number that is no integer.
    """
    count = num_speculative_tokens
    if speculative is None:
        if count is not None:
            raise ValueError(
                f"num_speculative_tokens={count} needs a method; give speculative='ngram' as well, or neither"
            )
        return 0
    if speculative not in METHODS:
        raise ValueError(f"speculative={speculative!r} is unknown; allowed: {', '.join(METHODS)}")
    if count is None:
        return DEFAULT_DRAFTS
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"num_speculative_tokens={count!r} must be a whole number")
    if count < 1:
        raise ValueError(f"num_speculative_tokens={count} must be at least 1; leave speculative out for none")
    return count


@dataclass
class SpeculationStats:
    """What speculation brought.

    Attributes:
        num_decodes: decodes of a request with drafts.
        num_proposed: drafts that were found in the request's own tokens; what only fills up is not counted.
        num_accepted: those among them that the model agreed with.
        num_tokens: tokens that the decodes gave, at least one each.
    """

    num_decodes: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts among those proposed; 0 where none were."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def tokens_per_decode(self) -> float:
        """1 without any accepted draft; 0 before the first decode."""
        return self.num_tokens / self.num_decodes if self.num_decodes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_accepted} of {self.num_proposed} drafts accepted ({self.acceptance_rate:.0%}), "
            f"{self.tokens_per_decode:.2f} tokens a decode"
        )


class _Index:
    """What followed each run of tokens of one request, the last time it was there."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        for end in range(self._num_seen, len(token_ids)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._next[tuple(token_ids[end - length : end])] = end
        self._num_seen = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the tokens stand that followed the longest run that is the end of the request."""
        for length in range(min(_LONGEST, len(token_ids)), _SHORTEST - 1, -1):
            found = self._next.get(tuple(token_ids[-length:]))
            if found is not None:
                return found
        return None


class NgramProposer:
    """Proposes what followed, earlier in the request, the tokens that it now ends with.

    Every proposal has the same number of tokens, so that batches of decodes stay uniform; where nothing is
    found, the last token fills up.

    Args:
        num_drafts: tokens a proposal.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.stats = SpeculationStats()
        self._indices: dict[str, _Index] = {}

    def propose(self, request: Request) -> list[int]:
        """Drafts of the tokens behind the request's own; sets `num_proposed` of the request."""
        index = self._indices.setdefault(request.request_id, _Index())
        tokens = request.token_ids
        index.extend(tokens)
        found = index.find(tokens)
        request.num_proposed = 0 if found is None else self.num_drafts
        if found is None:
            return tokens[-1:] * self.num_drafts
        # A run that reaches the end goes on as it began: its period is what lies behind it.
        period = len(tokens) - found
        return [tokens[found + i % period] for i in range(self.num_drafts)]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._indices.pop(request_id, None)

    def count_accepted(self, request: Request, candidates: Sequence[int]) -> int:
        """How many drafts, from the first on, are what the model chose; noted in `stats`.

        Args:
            request: with the drafts of the step.
            candidates: what was chosen after the newest token and after each draft.
        """
        accepted, drafts = 0, request.drafts
        while accepted < len(drafts) and candidates[accepted] == drafts[accepted]:
            accepted += 1
        self.stats.num_decodes += 1
        self.stats.num_proposed += request.num_proposed
        self.stats.num_accepted += min(accepted, request.num_proposed)
        self.stats.num_tokens += accepted + 1
        return accepted
