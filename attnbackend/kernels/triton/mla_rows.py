"""Tiles of absorbed queries: consecutive rows of one request, a row being one token and one head.

All heads of multi-head latent attention read one key, so rows of several tokens share a tile as well as
rows of several heads do. What a tile is part of, it finds by itself: no length is read on the host.

Legend: T tokens, Q requests, H heads, M rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


def tile_count(tokens: int, requests: int, heads: int, rows: int) -> int:
    """Tiles that are enough for any lengths of the requests, tokens past the last one included."""
    if heads % rows == 0:
        return tokens * (heads // rows)
    # A request's last tile may be partly empty, and so may that of the tokens past the last request.
    return tokens * heads // rows + requests + 1


@triton.jit
def find_request(
    starts_ptr: tl.tensor, tile: tl.tensor, num_requests: tl.tensor, H: tl.constexpr, M: tl.constexpr
) -> tl.tensor:
    """(request, number of the tile in it); request `num_requests` stands for tokens past the last one.

    Request i owns the tiles from starts[i] * H // M (+ i, where a tile need not end with a token): at
    least as many as its rows need. Those ascend, so the request is how many lie up to the tile, less one.
    """
    SLACK: tl.constexpr = 0 if H % M == 0 else 1
    count = 0
    for first in range(0, num_requests + 1, 128):
        request = first + tl.arange(0, 128)
        inside = request <= num_requests
        start = tl.load(starts_ptr + request, mask=inside, other=0) * H // M + request * SLACK
        count += tl.sum((inside & (start <= tile)).to(tl.int32))
    request = count - 1
    return request, tile - (tl.load(starts_ptr + request) * H // M + request * SLACK)


@triton.jit
def request_extent(
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    request: tl.tensor,
    num_tokens: tl.tensor,
    num_requests: tl.tensor,
) -> tl.tensor:
    """(first token, tokens, keys) of a request, and of the tokens past the last one, which have no keys."""
    real = request < num_requests
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1, mask=real, other=0)
    keys = tl.load(seq_lens_ptr + request, mask=real, other=0)
    return begin, tl.where(real, end, num_tokens) - begin, keys
