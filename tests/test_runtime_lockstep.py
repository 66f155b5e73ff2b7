"""Requests in lockstep are, once settled, what a loop over requests and steps makes of them."""

from __future__ import annotations

import random

from attnbackend.runtime import SamplingParams, StepOutput
from attnbackend.runtime.lockstep import Lockstep
from attnbackend.runtime.request import Request
from attnbackend.runtime.request_progress import RequestProgress
from attnbackend.runtime.sampler import INVALID_TOKEN
from attnbackend.runtime.scheduler import ScheduledRequest

STOP = 99


def make_requests(max_tokens: tuple[int, ...] = (9, 6, 9)) -> list[Request]:
    requests = []
    for i, most in enumerate(max_tokens):
        prompt = [1 + i] * (3 + i)
        request = Request(f"r{i}", None, len(prompt), [*prompt, 7], SamplingParams(max_tokens=most), 0)
        request.num_computed = len(prompt)
        RequestProgress(request, frozenset([STOP + i]), None)
        requests.append(request)
    return requests


def lockstep_of(requests: list[Request]) -> Lockstep:
    return Lockstep([ScheduledRequest(request, 1) for request in requests])


def accept(request: Request, token_id: int) -> StepOutput:
    assert request.accept is not None
    return request.accept(token_id)


def state(requests: list[Request]) -> list[tuple[int, int, list[int]]]:
    return [(r.num_computed, r.num_pending, r.token_ids) for r in requests]


def test_settled_requests_and_outputs_are_those_of_a_loop() -> None:
    requests, expected = make_requests(), make_requests()
    lockstep, rng = lockstep_of(requests), random.Random(0)
    for step in range(4):
        lockstep.start()
        for request in expected:
            request.num_computed += 1
            request.num_pending += 1
        if step:  # One step behind, as in steps that are started ahead.
            tokens = [rng.randrange(90) for _ in requests]
            for request in expected:
                request.num_pending -= 1
            assert lockstep.take(tokens) == list(map(accept, expected, tokens))
        if step == 2:
            lockstep.settle()
            assert state(requests) == state(expected)
    assert state(requests) != state(expected)
    for _ in range(2):
        lockstep.settle()
        assert state(requests) == state(expected)


def test_tokens_that_may_end_a_request_are_left_to_it() -> None:
    requests = make_requests()
    lockstep = lockstep_of(requests)
    for special in (STOP, STOP + 2, INVALID_TOKEN):
        assert lockstep.take([5, special, 5]) is None, "of any request"
    for _ in range(4):
        assert lockstep.take([5, 5, 5]) is not None
    assert lockstep.take([5, 5, 5]) is None, "the sixth token is the second request's last"
    lockstep.settle()
    assert [len(r.token_ids) - r.prompt_len for r in requests] == [5, 5, 5]
    assert lockstep.take([5, 5, 5]) is None


def test_a_token_taken_otherwise_counts_too() -> None:
    requests = make_requests((4, 9))
    lockstep = lockstep_of(requests)
    assert lockstep.take([5, 5]) is not None
    lockstep.settle()
    for request in requests:
        accept(request, 5)
    assert lockstep.take([5, 5]) is None, "the fourth token is the first request's last"
