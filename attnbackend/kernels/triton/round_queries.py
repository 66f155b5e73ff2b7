"""Queries rounded to float8, for libraries that multiply in it.

Legend: T tokens, H heads, D head size, N elements of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import QUERY_DTYPES, check_device, fail, names
from .codec import FINITE_MAX, decode, encode, kernel_view, stored_format
from .launch import on_device_of

WHERE = "round_queries"
ELEMENTS = 4096
"""Of a program, at most."""


@triton.jit
def round_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_token: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    keep = column < WIDTH
    x = decode(tl.load(x_ptr + token * x_token + column, mask=keep, other=0.0), FMT).to(tl.float32)
    # Comparisons, so that NaN stays NaN.
    x = tl.where(x > LIMIT, LIMIT, x)
    x = tl.where(x < -LIMIT, -LIMIT, x)
    tl.store(y_ptr + token * WIDTH + column, encode(x, y_ptr.dtype.element_ty, OUT_FMT), mask=keep)


def round_queries(query: torch.Tensor) -> torch.Tensor:
    """The queries in float8_e4m3fn, limited to its range, rounded to nearest even: [T, H, D], contiguous.

    query [T, H, D] float16, bfloat16 or float32. Raises ValueError for another dtype.
    """
    check_device(WHERE, query)
    if query.dtype not in QUERY_DTYPES:
        fail(WHERE, "query.dtype", query.dtype, names(QUERY_DTYPES))
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    output = query.new_empty(query.shape, dtype=torch.float8_e4m3fn)
    if not output.numel():
        return output
    width = query.shape[1] * query.shape[2]
    block = min(ELEMENTS, triton.next_power_of_2(width))
    formats = [stored_format(x.dtype, query.device) for x in (query, output)]
    views = [kernel_view(x, fmt) for x, fmt in zip((query, output), formats, strict=True)]
    with on_device_of(query):
        round_kernel[len(query), triton.cdiv(width, block)](
            *views, query.stride(0), FINITE_MAX[output.dtype], width, block, *formats
        )
    return output
