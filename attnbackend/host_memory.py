"""Memory of a CPU that serves: weights in huge pages, and activations that are not asked for anew each step.

Linux alone; elsewhere, and where the kernel does not oblige, nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from attnbackend.plain_weights import is_plain_weight

__all__ = ["keep_freed_memory", "move_to_huge_pages"]

_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_ALIGNMENT = 64
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST_KEPT = 1 << 30


def keep_freed_memory(max_bytes: int) -> None:
    """Lets the C library keep what activations free for the next step, in this process as a whole.

    The GNU library gives large allocations back, and each page of them costs a fault the next time. From here
    on it keeps up to ``max_bytes``, and 1 GiB at most.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, min(max_bytes, _MOST_KEPT))


def move_to_huge_pages(parameters: Iterable[Tensor], max_bytes: int) -> int:
    """Lays weights on a CPU into huge pages: a decode step reads all of them, which small ones slow down.

    Those in memory of their own stay at their addresses. Those that are a file's, as safetensors maps it, are
    copied, all into one allocation, and the parameters take the copies over.

    Args:
        parameters: others than plain contiguous ones on a CPU are left alone.
        max_bytes: what copies may take together; where they would take more, none is made.

    Returns:
        Bytes that were copied.
    """
    if not sys.platform.startswith("linux"):
        return 0
    mapped: list[Tensor] = []
    files = _mapped_files()
    for parameter in dict.fromkeys(parameters):
        if not is_plain_weight(parameter) or parameter.is_inference() or parameter.device.type != "cpu":
            continue
        if not parameter.is_contiguous():
            continue
        if any(first <= parameter.data_ptr() < end for first, end in files):
            mapped.append(parameter)
        else:
            _advise(parameter, _MADV_HUGEPAGE, _MADV_COLLAPSE)
    return _copy(mapped, max_bytes)


def _copy(parameters: list[Tensor], max_bytes: int) -> int:
    sizes = [-(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for p in parameters]
    if not 0 < sum(sizes) <= max_bytes:
        return 0
    memory = torch.empty(sum(sizes) + _PAGE, dtype=torch.uint8, device="cpu")
    _advise(memory, _MADV_HUGEPAGE)  # before it is touched
    at = -memory.data_ptr() % _PAGE
    for parameter, size in zip(parameters, sizes, strict=True):
        place = memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
        at += size
    return sum(sizes)


def _advise(x: Tensor, *advice: int) -> None:
    """Of all pages that the tensor lies in, its neighbours' parts included; refusals do not matter."""
    first = x.data_ptr() // _PAGE * _PAGE
    length = -(-(x.data_ptr() + x.nbytes - first) // _PAGE) * _PAGE
    for each in advice:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), each)


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of this process that are files on a disk."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    files = (line for line in lines if len(line) == 6 and line[5][0] == "/")
    ranges = [line[0].split("-") for line in files if not line[5].startswith("/dev/")]
    return [(int(first, 16), int(end, 16)) for first, end in ranges]
