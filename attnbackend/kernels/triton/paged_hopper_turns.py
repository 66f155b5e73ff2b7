"""Which tile of `paged_hopper` is whose: programs take the next when they are done with one.

The warp that copies takes tiles, finds where they lie and tells the groups that compute. Prompts have tiles
of few keys and of many: shares fixed beforehand, or tiles taken long before they are begun, leave programs
idle.

Legend: G query heads of a kv head, M = 64 rows of a group, ROWS of a tile, one group's or two, N keys of
a step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_parts import sync_group

M = gl.constexpr(64)
SLOTS = gl.constexpr(2)
"""Tiles that are announced at once."""
_NUMBERS = gl.constexpr(7)
"""Of an announcement."""
ROOM = gl.constexpr(SLOTS * _NUMBERS)
_TAKE = gl.constexpr(
    "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0; "
    "@first atom.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
)


@gluon.jit
def take(counter_ptr: gl.tensor) -> gl.tensor:
    """How many were taken before; for a group of one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pointer = counter_ptr + gl.arange(0, 1, ONE)
    # An atomic addition of Triton's goes through shared memory and waits there.
    found = gl.inline_asm_elementwise(_TAKE, "=r,l", [pointer], gl.int32, is_pure=False, pack=1)
    return gl.max(found, 0)


@gluon.jit
def find_request(
    starts_ptr: gl.tensor, tile: gl.tensor, num_requests: gl.tensor, G: gl.constexpr, ROWS: gl.constexpr
) -> gl.tuple:
    """(request, first row in it) of a tile; num_requests for tokens past the last request."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    count = 0
    for start in range(0, num_requests + 1, 128):
        request = start + gl.arange(0, 128, LANES)
        inside = request <= num_requests
        first = gl.load(starts_ptr + request, mask=inside, other=0) * G // ROWS + request
        count += gl.sum((inside & (first <= tile)).to(gl.int32), 0)
    request = count - 1
    return request, (tile - (gl.load(starts_ptr + request) * G // ROWS + request)) * ROWS


@gluon.jit
def find_work(
    work: gl.tensor, batch: gl.tuple, G: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr
) -> gl.tuple:
    """(kv head, request, rows, place) of a tile of a kv head; no rows where there is none.

    The last tile of a prompt sees the most keys: it comes first.
    """
    starts_ptr, seq_lens_ptr, num_tokens, num_requests, num_tiles, kv_heads = batch
    request, first = find_request(starts_ptr, num_tiles - 1 - work // kv_heads, num_requests, G, ROWS)
    real = request < num_requests
    begin = gl.load(starts_ptr + request)
    end = gl.load(starts_ptr + request + 1, mask=real, other=0)
    seq_len = gl.load(seq_lens_ptr + request, mask=real, other=0)
    tokens = gl.where(real, end, num_tokens) - begin
    last_token = (gl.minimum(first + ROWS, tokens * G) - 1) // G
    top = (gl.maximum(seq_len - tokens + last_token + 1, 0) + N - 1) // N - 1
    rows = gl.minimum(gl.maximum(tokens * G - first, 0), ROWS)
    return work % kv_heads, request, rows, (begin, tokens, first, seq_len, top)


@gluon.jit
def announce(board: gl.tuple, turn: gl.tensor, numbers: gl.tuple) -> None:
    """Tells the groups that compute."""
    notes, full, free = board
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % SLOTS
    mbarrier.wait(free.index(slot), turn // SLOTS & 1 ^ 1)
    for i in gl.static_range(_NUMBERS):
        notes.index(slot * _NUMBERS + i).store(gl.zeros([1], gl.int32, ONE) + numbers[i])
    sync_group()
    mbarrier.arrive(full.index(slot))


@gluon.jit
def hear(board: gl.tuple, turn: gl.tensor) -> gl.tuple:
    """(rows, kv head, place) of the next tile; no rows: there is none."""
    notes, full, free = board
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % SLOTS
    mbarrier.wait(full.index(slot), turn // SLOTS & 1)
    numbers: gl.tuple = ()
    for i in gl.static_range(_NUMBERS):
        number = gl.max(notes.index(slot * _NUMBERS + i).load(LANES), 0)
        numbers = numbers + (number,)  # noqa: RUF005 (Triton takes no starred tuple)
    sync_group()
    mbarrier.arrive(free.index(slot))
    rows, kv_head, begin, tokens, first, seq_len, top = numbers
    return rows, kv_head, (begin, tokens, first, seq_len, top)
