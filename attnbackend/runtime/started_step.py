"""A step that the device runs, and its tokens on their way to the host.

Shape suffixes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from attnbackend.runtime.batch_buffers import device_twin, host_zeros
from attnbackend.runtime.request import Request
from attnbackend.runtime.sampler import Sampled, SamplingPlan, sample


class _Slot:
    """Where one step's tokens are: on the device, and, for CUDA, copied to pinned memory of the host."""

    def __init__(self, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        split = rows * torch.int64.itemsize
        self.host = host_zeros((split + rows * dtype.itemsize,), torch.uint8, device)
        self.device = device_twin(self.host, device)
        self._on_host, self._on_device = (
            Sampled(packed[:split].view(torch.int64), packed[split:].view(dtype))
            for packed in (self.host, self.device)
        )
        self._leading: dict[int, tuple[Sampled, Sampled]] = {}
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def fits(self, logits_NV: Tensor) -> bool:
        return self._on_device.largest.dtype is logits_NV.dtype

    def leading(self, count: int) -> tuple[Sampled, Sampled]:
        """The first rows on the host and on the device; views that are made once."""
        found = self._leading.get(count)
        if found is None:
            host, device = (Sampled(*(x[:count] for x in s)) for s in (self._on_host, self._on_device))
            found = self._leading[count] = host, device
        return found

    def start_copy(self) -> None:
        if self.copied is not None:
            self.host.copy_(self.device, non_blocking=True)
            self.copied.record()


class SampledTokens:
    """Memory of the tokens of two steps: one that is being read, and one that is being computed.

    Args:
        max_logits: most rows of logits.
        device: where the logits are.
    """

    def __init__(self, max_logits: int, device: torch.device) -> None:
        self._max_logits, self._device = max_logits, device
        self._slots: list[_Slot | None] = [None, None]

    def sample(
        self, logits_NV: Tensor, plan: SamplingPlan | None, requests: Sequence[Request]
    ) -> StartedStep:
        """Chooses the tokens of a step, and starts their copy to the host.

        Args:
            logits_NV, plan: as `sampler.sample` takes them.
            requests: the request of each row.
        """
        slot = self._slots[0]
        if slot is None or not slot.fits(logits_NV):
            slot = _Slot(self._max_logits, self._device, logits_NV.dtype)
        sample(logits_NV, plan, out=slot.leading(len(requests))[1])
        slot.start_copy()
        self._slots = [self._slots[1], slot]
        return StartedStep(requests, slot)


class StartedStep:
    """What one step samples, and for whom.

    Args:
        requests: the request of each row of logits.
        slot: has a row each.
    """

    def __init__(self, requests: Sequence[Request], slot: _Slot) -> None:
        self.requests = requests
        self._copied = slot.copied
        self._on_host, on_device = slot.leading(len(requests))
        self.ids = on_device.ids
        """int64 [N], the tokens on the device, each inside the vocabulary."""

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
        return self._on_host.tokens()

    def wait(self) -> None:
        """Return when the device has done the step."""
        if self._copied is not None:
            self._copied.synchronize()
