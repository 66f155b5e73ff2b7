"""Persistent host and device buffers, with one copy a step between them.

Shape suffixes: R requests, T tokens, N rows of logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnbackend.runtime.arrays import IntArray
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.sampling_table import SampledRows

_ROWS = 16
"""Rows of the block table that are copied together."""
_ALIGNMENT = 64
"""Bytes; at least the 16 that kernels vectorise on."""


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, pinned when they are copied to a CUDA device."""
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def device_twin(host: Tensor, device: torch.device) -> Tensor:
    """A buffer of zeros on the device; the host buffer itself when that is the device."""
    return host if device.type == "cpu" else torch.zeros_like(host, device=device)


class StepBuffers:
    """The arrays that are written anew at every step, packed so that one copy uploads them all.

    Fields `input_ids_T`, `positions_T`, `slot_mapping_T`, `logits_indices_N` (int64),
    `query_start_loc_R` and `seq_lens_R` (int32, the former one longer) are NumPy views of the host side of
    what models read, `fed_tokens_R` and `fed_rows_R` (int64) of where the last step's tokens go; `sampling`
    has those of `SampledRows` by name. `device` and `sampling_device` have the tensors by name.

    Args:
        max_reqs: rows.
        max_tokens: tokens.
        device: where the model runs; with a CPU both sides are the same memory.
        max_logits: rows of logits; None: as many as requests.
    """

    def __init__(
        self, max_reqs: int, max_tokens: int, device: torch.device, max_logits: int | None = None
    ) -> None:
        max_logits = max_logits or max_reqs
        tokens = dict.fromkeys(("positions", "slot_mapping", "input_ids"), (max_tokens, torch.int64))
        requests = {
            "logits_indices": (max_logits, torch.int64),
            "query_start_loc": (max_reqs + 1, torch.int32),
            "seq_lens": (max_reqs, torch.int32),
        }
        fed = dict.fromkeys(("fed_tokens", "fed_rows"), (max_reqs, torch.int64))
        sampling = {
            name: (max_logits, torch.float64 if name in ("temperature", "top_p") else torch.int64)
            for name in SampledRows._fields
        }
        # A step that goes on from the one before changes the small arrays and the heads of the next two.
        sizes = {**requests, **fed, **sampling, **tokens}
        num_bytes = [_padded_bytes(size, dtype) for size, dtype in sizes.values()]
        self._slots_from = sum(num_bytes[:-2])
        self._packed_host = host_zeros((sum(num_bytes),), torch.uint8, device)
        self._packed_device = device_twin(self._packed_host, device)
        self._is_shared = self._packed_device is self._packed_host
        self._sides: dict[int | None, tuple[Tensor, Tensor]] = {}
        self.host = _views(self._packed_host, sizes)
        on_device = _views(self._packed_device, sizes)
        self.device = {name: on_device[name] for name in (*requests, *tokens)}
        self.fed_tokens, self.fed_rows = on_device["fed_tokens"], on_device["fed_rows"]
        self.sampling_device = {name: on_device[name] for name in sampling}
        arrays = _arrays(self.host)
        self.input_ids_T, self.positions_T = arrays["input_ids"], arrays["positions"]
        self.slot_mapping_T, self.logits_indices_N = arrays["slot_mapping"], arrays["logits_indices"]
        self.query_start_loc_R, self.seq_lens_R = arrays["query_start_loc"], arrays["seq_lens"]
        self.fed_tokens_R, self.fed_rows_R = arrays["fed_tokens"], arrays["fed_rows"]
        self.sampling = {name: arrays[name] for name in sampling}
        kept = torch.zeros_like(self._packed_host, pin_memory=False) if self._is_shared else self._packed_host
        self._whole, self._whole_kept = self._packed_host.numpy(), kept.numpy()
        self._kept = _arrays(_views(kept, sizes))

    def keep(self) -> dict[str, IntArray]:
        """The arrays by name as they are now, to be changed from step to step, and written by `restore`.

        Where the host's memory is not the device's, nobody else writes it, and they are its own.
        """
        if self._is_shared:
            self._whole_kept[:] = self._whole
            self._kept["input_ids"].fill(0)
        return self._kept

    def restore(self) -> bool:
        """Make the host side what was kept, with its changes; whether that changed the device's input ids."""
        if self._is_shared:
            self._whole[:] = self._whole_kept
        return self._is_shared

    def sampling_plan(self, sampled: SampledRows) -> SamplingPlan:
        """Write the rows that sample, before `upload`; the plan is good after it."""
        count = len(sampled.rows)
        for name, values_M in sampled._asdict().items():
            self.sampling[name][:count] = values_M
        return SamplingPlan.of(sampled, {name: x[:count] for name, x in self.sampling_device.items()})

    def upload(self, num_tokens: int | None = None) -> None:
        """Start the copy to the device; the host side must not change before it is done.

        Args:
            num_tokens: copy no more than these tokens' places and the small arrays, and no input ids.
        """
        if self._is_shared:
            return
        if num_tokens not in self._sides:
            stop = None if num_tokens is None else self._slots_from + 8 * num_tokens
            self._sides[num_tokens] = self._packed_device[:stop], self._packed_host[:stop]
        on_device, on_host = self._sides[num_tokens]
        on_device.copy_(on_host, non_blocking=True)


def _padded_bytes(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _views(packed: Tensor, sizes: dict[str, tuple[int, torch.dtype]]) -> dict[str, Tensor]:
    views, start = {}, 0
    for name, (size, dtype) in sizes.items():
        views[name] = packed[start : start + size * dtype.itemsize].view(dtype)
        start += _padded_bytes(size, dtype)
    return views


def _arrays(views: dict[str, Tensor]) -> dict[str, IntArray]:
    return {name: view.numpy() for name, view in views.items()}


class BlockTableBuffer:
    """The block table of the batch, kept from step to step; only rows that changed are copied.

    Args:
        max_reqs: rows.
        width: blocks a row.
        device: as for `StepBuffers`.
    """

    def __init__(self, max_reqs: int, width: int, device: torch.device) -> None:
        self.host = host_zeros((max_reqs, width), torch.int32, device)
        self.device = device_twin(self.host, device)
        self.rows: IntArray = self.host.numpy()
        self._homes: IntArray = np.full(max_reqs, -1, dtype=np.int64)
        self._num_rows = 0
        self._sides: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def invalidate(self) -> None:
        """Forget what the rows hold: the next `update` rewrites and uploads all of them."""
        self._homes[:] = -1
        self._num_rows = len(self.rows)

    def update(self, table: IntArray, homes_R: IntArray, appended: list[tuple[int, int]]) -> None:
        """Make row i equal `table[homes_R[i]]`, all further rows zero, and upload what changed.

        Args:
            table: int32 [*, W], a row for each request, zero past its blocks.
            homes_R: for each row of the batch, its row in `table`.
            appended: (row, first column) of rows whose table entries changed from that column on.
        """
        num_rows = len(homes_R)
        moved = np.flatnonzero(self._homes[:num_rows] != homes_R).tolist()
        for row, first_column in appended:
            self.rows[row, first_column:] = table[homes_R[row], first_column:]
        for row in moved:
            self.rows[row] = table[homes_R[row]]
        self.rows[num_rows : self._num_rows] = 0
        changed = moved + [row for row, _ in appended] + [*range(num_rows, self._num_rows)]
        self._homes[:num_rows] = homes_R
        self._homes[num_rows : self._num_rows] = -1
        self._num_rows = num_rows
        if changed:
            self.upload(min(changed), max(changed))

    def upload(self, first: int, last: int) -> None:
        """Start the copy of these rows, and of those between and around them, to the device."""
        if self.device is self.host:
            return
        start, stop = first - first % _ROWS, last - last % _ROWS + _ROWS
        if (start, stop) not in self._sides:  # Slicing anew takes longer than what is copied too much.
            self._sides[start, stop] = self.device[start:stop], self.host[start:stop]
        on_device, on_host = self._sides[start, stop]
        on_device.copy_(on_host, non_blocking=True)
