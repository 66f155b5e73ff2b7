"""Requests that decode together: what changes from step to step is kept once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnbackend.runtime.request import StepOutput

if TYPE_CHECKING:
    from attnbackend.runtime.scheduler import ScheduledRequest


class Lockstep:
    """Steps of the same requests, each of which computes one token in each, and what they brought.

    The requests themselves change when `settle` is called, before anybody looks at them: after a wait,
    little of them is in a near cache.

    Args:
        scheduled: the requests, as each of the steps has them.
    """

    def __init__(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.scheduled = scheduled
        self.requests = [request for request, _ in scheduled]
        self.room = 0
        """Steps that may be started before the scheduler must look at the requests."""
        self._ids = [request.request_id for request in self.requests]
        self._special_ids = frozenset[int]().union(*(request.special_ids for request in self.requests))
        self._num_started = 0
        self._taken: list[list[int]] = []
        self._num_plain: int | None = None
        """Tokens of each, from those taken on, that are nothing but one more if they are no special ones."""

    def start(self) -> None:
        """A step has been started, whose tokens are to be taken in."""
        self.room -= 1
        self._num_started += 1

    def take(self, tokens: list[int]) -> list[StepOutput] | None:
        """Take in the tokens of a step; None, and nothing done, if one may be more than one token more."""
        if self._num_plain is None:
            self._num_plain = min(request.plain_len - len(request.token_ids) for request in self.requests)
        if len(self._taken) >= self._num_plain or not self._special_ids.isdisjoint(tokens):
            return None
        self._taken.append(tokens)
        # Twice as fast as the class's own `__new__`, for every token of every request.
        new, kind = tuple.__new__, StepOutput
        pairs = zip(self._ids, tokens, strict=True)
        return [new(kind, (request_id, [token_id], "", None, None)) for request_id, token_id in pairs]

    def settle(self) -> None:
        """Bring the requests up to date."""
        started, taken = self._num_started, self._taken
        self._num_started, self._taken, self._num_plain = 0, [], None
        if started or taken:
            columns = zip(*taken, strict=True) if taken else [()] * len(self.requests)
            for request, token_ids in zip(self.requests, columns, strict=True):
                request.num_computed += started
                request.num_pending += started - len(taken)
                request.token_ids += token_ids
