"""What the project's Gluon kernels share.

Legend: M rows of queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

LN_2 = gl.constexpr(0.6931471805599453)
TILE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# The names of Triton 3.6, and of later versions.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
send_block = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
sync_group = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def copy_queries(
    shared: gl.shared_memory_descriptor, ptr: gl.tensor, offsets: gl.tensor, keep: gl.tensor
) -> None:
    """Rows of queries [M, width] to shared memory, zeros where not `keep`."""
    WIDTH: gl.constexpr = shared.shape[1]
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, TILE_COPY))
    mask = gl.convert_layout(keep, gl.SliceLayout(1, TILE_COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    for first in gl.static_range(0, WIDTH, 64):
        part = gl.load(ptr + offsets[:, None] + (first + column)[None, :], mask=mask[:, None], other=0.0)
        shared.slice(first, 64, dim=1).store(part)


@gluon.jit
def seen_as(
    buffers: gl.shared_memory_descriptor, SHAPE: gl.constexpr, LAYOUT: gl.constexpr
) -> gl.shared_memory_descriptor:
    """The same memory in another shape."""
    if _IS_PUBLIC:
        return buffers.reinterpret(buffers.dtype, SHAPE, LAYOUT)
    else:  # noqa: RET505 (Triton wants both branches)
        return buffers._reinterpret(buffers.dtype, SHAPE, LAYOUT)


@gluon.jit
def token_pieces(rooms: gl.shared_memory_descriptor, G: gl.constexpr) -> gl.shared_memory_descriptor:
    """Rooms [COUNT, M, D] of rows, G of a token, as pieces [M / G, G, 64] by room and columns."""
    COUNT: gl.constexpr = rooms.shape[0] * (rooms.shape[2] // 64)
    BLOCK: gl.constexpr = [rooms.shape[1] // G, G, 64]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, rooms.dtype)
    return seen_as(rooms, [COUNT, rooms.shape[1] // G, G, 64], LAYOUT)
