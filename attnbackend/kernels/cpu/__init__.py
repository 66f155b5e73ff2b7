"""C++ kernels for the CPU: paged attention and the cache writer, with and without rotations before it.

Compiled on first use with the compiler in $CXX, or g++ or clang++, and kept under $ATTNBACKEND_CACHE_DIR
(default ~/.cache/attnbackend); `attnbackend build cpu` does it ahead of time. They use the instruction set
that torch uses, which $ATEN_CPU_CAPABILITY limits, and `torch.get_num_threads()` threads of the OpenMP
runtime that torch uses.
"""

from __future__ import annotations

from attnbackend.kernels.cpu._attention import paged_attention
from attnbackend.kernels.cpu._build import (
    BuildError,
    build_library_calls,
    build_ops,
    load_library_calls,
    load_ops,
)
from attnbackend.kernels.cpu._build import build as build_library
from attnbackend.kernels.cpu._cache_write import cache_write
from attnbackend.kernels.cpu._library import library
from attnbackend.kernels.cpu._probe import unavailable_reason
from attnbackend.kernels.cpu._rope import rope_cache_write
from attnbackend.kernels.cpu._target import TARGETS, Target, current_target, find_target

__all__ = [
    "TARGETS",
    "BuildError",
    "Target",
    "build_library",
    "build_library_calls",
    "build_ops",
    "cache_write",
    "current_target",
    "find_target",
    "library",
    "load_library_calls",
    "load_ops",
    "paged_attention",
    "rope_cache_write",
    "unavailable_reason",
]
