"""The loaded C++ library, and what it says when it refuses a call."""

from __future__ import annotations

import ctypes
from typing import NoReturn

from attnbackend.kernels.cpu._build import cached_library
from attnbackend.kernels.cpu._checks import refusal_message
from attnbackend.kernels.cpu._structs import REFUSAL_STRUCT


def library() -> ctypes.CDLL:
    """The library. RuntimeError with the reason where it cannot be built."""
    loaded = cached_library()
    if isinstance(loaded, str):
        raise RuntimeError(f"the C++ CPU kernels are unavailable: {loaded}")
    return loaded


def raise_refusal(loaded: ctypes.CDLL, **limits: int) -> NoReturn:
    """Turns this thread's last refusal into a ValueError."""
    refusal = ctypes.create_string_buffer(REFUSAL_STRUCT.size)
    loaded.attnbackend_last_refusal(refusal)
    code, *numbers = REFUSAL_STRUCT.unpack(refusal)
    raise ValueError(refusal_message(code, numbers, limits))
