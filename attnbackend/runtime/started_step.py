"""A step that the device runs, and its tokens on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from attnbackend.runtime.request import Request
from attnbackend.runtime.sampler import Sampled


class StartedStep:
    """What one step samples, and for whom.

    Args:
        requests: the request of each row of logits.
        sampled: a row each, on the device. For CUDA the copy to the host starts here.
    """

    def __init__(self, requests: Sequence[Request], sampled: Sampled) -> None:
        self.requests = requests
        self._sampled, self._copied = sampled, None
        if sampled.ids.is_cuda:
            self._sampled = Sampled(*(x.to("cpu", non_blocking=True) for x in sampled))
            self._copied = torch.cuda.Event()
            self._copied.record()

    def rows_of_requests(self) -> Iterator[tuple[Request, int, int]]:
        """Each request once, with its rows from the first to behind the last."""
        start = 0
        for request, rows in groupby(self.requests):
            stop = start + len(list(rows))
            yield request, start, stop
            start = stop

    def tokens(self) -> list[int]:
        """A token for each row, `INVALID_TOKEN` where there is none; waits until the step is done."""
        self.wait()
        return self._sampled.tokens()

    def wait(self) -> None:
        """Return when the device has done the step."""
        if self._copied is not None:
            self._copied.synchronize()
