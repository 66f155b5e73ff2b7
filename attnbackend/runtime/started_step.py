"""A step that the device runs, and its tokens on their way to the host.

Shape suffixes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from attnbackend.runtime.batch_buffers import host_zeros
from attnbackend.runtime.request import Request
from attnbackend.runtime.sampler import INVALID_TOKEN, Sampled, SamplingPlan, sample, sample_rows


class TokenMemory:
    """Tokens and largest logits of a step in one piece of memory, so that one copy moves both.

    Args:
        packed: uint8, 8 bytes and the size of a logit for each row.
        rows: most rows of logits.
        dtype: of the logits.
    """

    def __init__(self, packed: Tensor, rows: int, dtype: torch.dtype) -> None:
        self.packed, self.rows, self.dtype = packed, rows, dtype
        split = rows * torch.int64.itemsize
        self._all = Sampled(packed[:split].view(torch.int64), packed[split:].view(dtype))
        self._leading: dict[int, Sampled] = {}

    @classmethod
    def on(cls, device: torch.device, rows: int, dtype: torch.dtype) -> TokenMemory:
        """Zeros on a device."""
        num_bytes = rows * (torch.int64.itemsize + dtype.itemsize)
        return cls(torch.zeros(num_bytes, dtype=torch.uint8, device=device), rows, dtype)

    def leading(self, count: int) -> Sampled:
        """The first rows; views that are made once."""
        found = self._leading.get(count)
        if found is None:
            found = self._leading[count] = Sampled(*(x[:count] for x in self._all))
        return found


_BITS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float64: ("Q", 0x7FF << 52), torch.float32: ("I", 0xFF << 23),
    torch.float16: ("H", 0x1F << 10), torch.bfloat16: ("H", 0xFF << 7),
}  # fmt: skip
"""Type of a logit's bits, and those of its exponent: all are set where it is not finite."""


class _Slot:
    """Memory of the host that the tokens of a step are copied to, pinned for CUDA."""

    def __init__(self, like: TokenMemory) -> None:
        device, split = like.packed.device, 8 * like.rows
        self.rows, self.dtype = like.rows, like.dtype
        self.packed = host_zeros(tuple(like.packed.shape), torch.uint8, device)
        # Not `torch.cuda.Event`, which looks for the stream in Python.
        self.copied = torch.Event(device) if device.type == "cuda" else None
        # Python's own views: torch's code is seldom in a near cache after a wait, and slow then.
        view, (kind, self._exponent) = self.packed.numpy().data, _BITS[like.dtype]
        self._ids, self._largest = view[:split].cast("q"), view[split:].cast(kind)
        size = like.dtype.itemsize
        self._ends = view[split:][size - 1 if sys.byteorder == "little" else 0 :: size]
        end = self._exponent >> 8 * (size - 1)
        self._suspect = bytes(byte for byte in range(256) if byte & end == end)
        """The bytes at the end, that of the sign, of logits that are not finite; few others have them."""

    def fits(self, memory: TokenMemory) -> bool:
        return self.rows == memory.rows and self.dtype is memory.dtype

    def start_copy(self, memory: TokenMemory) -> None:
        self.packed.copy_(memory.packed, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def tokens(self, count: int) -> list[int]:
        """Of the first rows, `INVALID_TOKEN` for those whose largest logit is not finite."""
        ids: list[int] = self._ids[:count].tolist()
        if len(self._ends[:count].tobytes().translate(None, self._suspect)) == count:
            return ids
        exponent = self._exponent
        for row, bits in enumerate(self._largest[:count].tolist()):
            if bits & exponent == exponent:
                ids[row] = INVALID_TOKEN
        return ids


class SampledTokens:
    """Memory of the tokens of two steps: one that is being read, and one that is being computed.

    Args:
        max_logits: most rows of logits.
        device: where the logits are.
    """

    def __init__(self, max_logits: int, device: torch.device) -> None:
        self._max_logits, self._device = max_logits, device
        self._own: TokenMemory | None = None
        self._slots: list[_Slot | None] = [None, None]

    def sample(
        self, logits_NV: Tensor, plan: SamplingPlan | None, requests: Sequence[Request],
        greedy: TokenMemory | None = None,
    ) -> StartedStep:  # fmt: skip
        """Chooses the tokens of a step, and starts their copy to the host.

        Args:
            logits_NV, plan: as `sampler.sample` takes them.
            requests: the request of each row.
            greedy: where the greedy choice of each row is already; it is written.
        """
        memory, count = greedy, len(requests)
        if memory is None:
            memory = self._memory_for(logits_NV.dtype)
            sample(logits_NV, plan, out=memory.leading(count))
        elif plan is not None:
            sample_rows(logits_NV, plan, memory.leading(count))
        return self.start(memory, requests)

    def start(self, memory: TokenMemory, requests: Sequence[Request]) -> StartedStep:
        """Starts the copy of the requests' tokens, which the device leaves in this memory, to the host."""
        slot = self._slots[0]
        if slot is None or not slot.fits(memory):
            slot = _Slot(memory)
        slot.start_copy(memory)
        started = StartedStep(requests, slot, memory)
        self._slots = [self._slots[1], slot]
        return started

    def _memory_for(self, dtype: torch.dtype) -> TokenMemory:
        if self._own is None or self._own.dtype is not dtype:
            self._own = TokenMemory.on(self._device, self._max_logits, dtype)
        return self._own


class StartedStep:
    """What one step samples, and for whom.

    Args:
        requests: the request of each row of logits.
        slot: where its tokens are copied to.
        memory: where they are on the device, until the next step is started.
    """

    def __init__(self, requests: Sequence[Request], slot: _Slot, memory: TokenMemory) -> None:
        self.requests = requests
        self._copied = slot.copied
        self._slot, self.memory = slot, memory
        self.ids = memory.leading(len(requests)).ids
        """int64 [N], the tokens on the device, each inside the vocabulary."""

    def put_back(self) -> None:
        """Copy the tokens to the device again, where a step that failed may have written others."""
        self.memory.packed.copy_(self._slot.packed, non_blocking=True)

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
        return self._slot.tokens(len(self.requests))

    def wait(self) -> None:
        """Return when the device has done the step."""
        if self._copied is not None:
            self._copied.synchronize()
