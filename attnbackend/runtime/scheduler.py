"""Which requests run in the next step, with how many tokens, on which blocks.

Order of arrival decides everything: running requests are all older than waiting ones, older ones
are served first, and when blocks run out the youngest running request gives its blocks back. So
the oldest request advances at every step, which rules out live-lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from attnbackend.runtime.block_allocator import BlockAllocator
from attnbackend.runtime.request import Request, RequestStatus


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


class ScheduledRequest(NamedTuple):
    """A request and how many of its uncomputed tokens the step computes (at least one)."""

    request: Request
    num_tokens: int


@dataclass
class Schedule:
    """One step: what runs, decodes first, and what lost its blocks to make room for it."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    budget: int = 0

    def take(self, request: Request, num_tokens: int) -> None:
        """Add a request to the step."""
        self.scheduled.append(ScheduledRequest(request, num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    A request gets the blocks of all its known tokens when it is admitted, so only decodes ask for
    more later. A preempted request loses its cache, goes to the front of the waiting queue and is
    recomputed from its prompt and the tokens generated so far.

    Args:
        allocator: the cache's blocks.
        block_size: tokens a block.
        max_num_seqs: most requests running at a time.
        max_num_batched_tokens: most tokens a step.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrivals = count()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request. The caller has checked that the cache can hold it."""
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Choose the next step and allocate its blocks.

        Nothing counts as computed until `commit`; a step that failed is simply chosen again.
        """
        step = Schedule(budget=self.max_num_batched_tokens)
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        self._admit(step)
        return step

    def commit(self, scheduled: list[ScheduledRequest]) -> None:
        """Record that the step's tokens are in the cache."""
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens

    def finish(self, request: Request) -> None:
        """Forget a waiting or running request and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request, RequestStatus.FINISHED)

    def _schedule_decodes(self, step: Schedule) -> None:
        for request in [r for r in self.running if r.is_decoding]:
            if step.budget == 0:
                return
            # An older decode may have preempted this one a moment ago.
            if request.status is RequestStatus.RUNNING and self._has_slot(request, step):
                step.take(request, 1)

    def _schedule_prefills(self, step: Schedule) -> None:
        for request in self.running:
            if step.budget == 0:
                return
            if not request.is_decoding:
                step.take(request, min(request.num_uncomputed, step.budget))

    def _admit(self, step: Schedule) -> None:
        while self.waiting and step.budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = blocks_for(len(request.token_ids), self.block_size)
            # One spare block a running request: else its next block would preempt the newcomer.
            if needed + len(self.running) > self.allocator.num_free:
                return
            self.waiting.popleft()
            request.block_ids = self.allocator.allocate(needed)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            step.take(request, min(request.num_uncomputed, step.budget))

    def _has_slot(self, request: Request, step: Schedule) -> bool:
        """Give the request room for one token more, from younger ones if need be."""
        if request.num_computed < len(request.block_ids) * self.block_size:
            return True
        while not self.allocator.num_free:
            youngest = self.running[-1]
            if youngest is request:
                return False  # It keeps its cache and waits for an older one to finish.
            self._preempt(youngest)
            step.preempted.append(youngest)
        request.block_ids += self.allocator.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        assert self.running[-1] is request, f"{request.request_id} is not the youngest"
        self.running.pop()
        self._release(request, RequestStatus.WAITING)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request, status: RequestStatus) -> None:
        self.allocator.free(request.block_ids)
        request.block_ids = []
        request.status = status
