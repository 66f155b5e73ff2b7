"""A second CUDA stream, for work that may run beside other work of the same step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["beside"]


class _Streams(threading.local):
    """By device, for each thread its own: one may be capturing."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, torch.cuda.Stream] = {}


_STREAMS = _Streams()


@contextmanager
def beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that has seen all work of the current one; at the end the current one waits for it.

    Memory that is allocated on either goes on being its own, so nothing needs to be recorded. A CUDA graph
    that is being captured gets both.
    """
    current = torch.cuda.current_stream(device)
    side = _STREAMS.of_device.get(device)
    if side is None:
        side = _STREAMS.of_device[device] = torch.cuda.Stream(device)
    side.wait_stream(current)
    try:
        yield side
    finally:
        current.wait_stream(side)
