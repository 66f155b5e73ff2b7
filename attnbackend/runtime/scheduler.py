"""Which requests run in the next step, with how many tokens, on which blocks.

Order of arrival decides everything: running requests are all older than waiting ones, older ones
are served first, and when blocks run out the youngest running request gives its blocks back. So
the oldest request advances at every step, which rules out live-lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from attnbackend.runtime.block_allocator import BlockAllocator
from attnbackend.runtime.lockstep import Lockstep
from attnbackend.runtime.request import Request, RequestStatus


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


class ScheduledRequest(NamedTuple):
    """A request and how many tokens the step computes for it (at least one).

    More than it has uncomputed ones: the rest are its drafts.
    """

    request: Request
    num_tokens: int


@dataclass
class Schedule:
    """One step: what runs, decodes first, and what lost its blocks to make room for it.

    Steps of the same requests, all of them decoding, have the same list, which nobody may change.
    """

    scheduled: Sequence[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    budget: int = 0
    lockstep: Lockstep | None = None
    """Where the step repeats those before it: what it changes in the requests is known there alone."""
    has_new_blocks: bool = False
    """Whether requests of such a step have got blocks."""

    def take(self, request: Request, num_tokens: int) -> None:
        """Add a request to the step."""
        assert isinstance(self.scheduled, list)
        self.scheduled.append(ScheduledRequest(request, num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    A request gets the blocks of all its known tokens when it is admitted, so only decodes ask for
    more later. A preempted request loses its cache, goes to the front of the waiting queue and is
    recomputed from its prompt and the tokens generated so far.

    Steps may be scheduled while those before run: a request whose last token is being sampled is
    left out, and one that was preempted meanwhile waits until its tokens are known.

    Args:
        allocator: the cache's blocks.
        block_size: tokens a block.
        max_num_seqs: most requests running at a time.
        max_num_batched_tokens: most tokens a step, at least `decode_len`.
        decode_len: tokens that each decoding request brings to a step: its newest, and its drafts.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_len: int = 1,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_len = decode_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrivals = count()
        self._steady: Sequence[ScheduledRequest] | None = None
        """The last step, where it was all that runs, decoding, and nothing has come or gone since."""
        self.lockstep: Lockstep | None = None
        """Of the steps since, if there are any."""

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
        if not self._repeat(step):
            self._schedule_decodes(step)
            self._schedule_prefills(step)
        self._admit(step)
        return step

    def repeats(self, lockstep: Lockstep) -> bool:
        """Whether the next step is sure to be one more of these."""
        return lockstep is self.lockstep and lockstep.room > 0 and not self.waiting

    def settle(self) -> None:
        """Bring the requests up to date; before, those in lockstep are as they were some steps ago."""
        if self.lockstep is not None:
            self.lockstep.settle()

    def commit(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Record that the step has been started: its tokens will be in the cache."""
        if self.lockstep is not None and self.lockstep.scheduled is scheduled:
            self.lockstep.start()
            return
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens

    def finish(self, request: Request) -> None:
        """Forget a waiting or running request and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request, RequestStatus.FINISHED)

    def restart(self, requests: Sequence[Request]) -> None:
        """Let these requests, and no others, wait as if they had just come, but for their tokens."""
        self.settle()
        self._steady = self.lockstep = None
        self.allocator = BlockAllocator(self.allocator.num_blocks)
        for request in requests:
            request.arrival, request.status = next(self._arrivals), RequestStatus.WAITING
            request.num_computed = request.num_pending = 0
            request.block_ids, request.drafts = [], []
        self.running, self.waiting = [], deque(requests)

    def _repeat(self, step: Schedule) -> bool:
        """Take the last step again, if nothing has changed but the lengths."""
        if self._steady is None:
            return False
        if self.lockstep is None:
            self.lockstep = Lockstep(self._steady)
        if not self.lockstep.room:
            step.has_new_blocks = self._make_room(self.lockstep)
        if not self.lockstep.room:
            self._end_lockstep()
            return False
        step.scheduled, step.lockstep = self._steady, self.lockstep
        step.budget -= len(self._steady)
        return True

    def _make_room(self, lockstep: Lockstep) -> bool:
        """Count the steps that all can make, with new blocks if need be; whether there are new ones."""
        lockstep.settle()
        requests = lockstep.requests
        if any(r.num_computed >= r.max_computed for r in requests):
            return False
        # One upload for all that soon need a block, where they take none from others.
        needed = [self._missing_blocks(r, self.block_size) for r in requests]
        if sum(needed) > self.allocator.num_free // 2:
            needed = [self._missing_blocks(r) for r in requests]
        if sum(needed) > self.allocator.num_free:
            return False
        for request, num_blocks in zip(requests, needed, strict=True):
            if num_blocks:
                self._give_blocks(request, num_blocks)
        lockstep.room = min(r.limit - r.num_computed for r in requests)
        return any(needed)

    def _schedule_decodes(self, step: Schedule) -> None:
        decodes = [r for r in self.running if r.is_decoding]
        for request in decodes:
            if step.budget < self.decode_len:
                break
            # An older decode may have preempted this one a moment ago.
            if request.status is RequestStatus.RUNNING and self._can_go_on(request, step):
                step.take(request, self.decode_len)
        if step.scheduled and len(step.scheduled) == len(self.running) and self.decode_len == 1:
            self._steady = step.scheduled

    def _schedule_prefills(self, step: Schedule) -> None:
        if self._steady is not None:
            return
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
            if request.num_pending or needed + len(self.running) > self.allocator.num_free:
                return
            self.waiting.popleft()
            self._give_blocks(request, needed)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            if step.scheduled is self._steady:
                step.scheduled, step.lockstep = list(step.scheduled), None
                self._end_lockstep()
            step.take(request, min(request.num_uncomputed, step.budget))

    def _missing_blocks(self, request: Request, num_decodes: int = 1) -> int:
        """Blocks that the request's next decodes, as far as it makes any, need and it has not."""
        tokens = request.num_computed + num_decodes * self.decode_len
        needed = blocks_for(min(tokens, request.max_computed + self.decode_len - 1), self.block_size)
        return max(0, needed - len(request.block_ids))

    def _give_blocks(self, request: Request, count: int) -> None:
        request.block_ids += self.allocator.allocate(count)
        room = len(request.block_ids) * self.block_size
        request.limit = min(room, request.max_computed + self.decode_len - 1)

    def _can_go_on(self, request: Request, step: Schedule) -> bool:
        if request.num_computed + self.decode_len <= request.limit:
            return True
        return request.num_computed < request.max_computed and self._has_slot(request, step)

    def _has_slot(self, request: Request, step: Schedule) -> bool:
        """Give the request room for its next decode, from younger ones if need be."""
        missing = self._missing_blocks(request)
        while self.allocator.num_free < missing:
            youngest = self.running[-1]
            if youngest is request:
                return False  # It keeps its cache and waits for an older one to finish.
            self._preempt(youngest)
            step.preempted.append(youngest)
        if missing:
            self._give_blocks(request, missing)
        return True

    def _preempt(self, request: Request) -> None:
        assert self.running[-1] is request, f"{request.request_id} is not the youngest"
        self.running.pop()
        self._release(request, RequestStatus.WAITING)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _end_lockstep(self) -> None:
        self.settle()
        self._steady = self.lockstep = None

    def _release(self, request: Request, status: RequestStatus) -> None:
        self._end_lockstep()
        self.allocator.free(request.block_ids)
        request.block_ids = []
        request.status = status
