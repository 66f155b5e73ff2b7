"""C++ kernels for the CPU: paged attention and the cache writer.

Compiled on first use with the compiler in $CXX, or g++ or clang++, and kept under
$ATTNBACKEND_CACHE_DIR (default ~/.cache/attnbackend). They use `torch.get_num_threads()` threads
of the OpenMP runtime that torch uses.
"""

from __future__ import annotations

from attnbackend.kernels.cpu._attention import paged_attention
from attnbackend.kernels.cpu._cache_write import cache_write
from attnbackend.kernels.cpu._probe import unavailable_reason

__all__ = ["cache_write", "paged_attention", "unavailable_reason"]
