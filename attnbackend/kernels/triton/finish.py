"""What a library's attention leaves to do: rows without keys, sinks, a scale of V, the LSE in its place.

Legend: T tokens, R rows, H query heads, Hk kv heads, Dv head size of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import QUERY_DTYPES, check_device, check_same_device, fail, names
from .config import padded_size
from .launch import on_device_of

WHERE = "finish_attention"
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of(token: tl.tensor, starts_ptr: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """The row that a token belongs to; num_rows for padding tokens.

    It is how many rows end up to the token: counting takes one round trip to memory for 128 rows, where a
    bisection takes seven.
    """
    row = 0
    for first in range(0, num_rows, 128):
        place = first + tl.arange(0, 128)
        stop = tl.load(starts_ptr + place + 1, mask=place < num_rows, other=2147483647)
        row += tl.sum((stop <= token).to(tl.int32))
    return row


@triton.jit
def place_of(
    token: tl.tensor, starts_ptr: tl.tensor, lens_ptr: tl.tensor, num_rows: tl.tensor, CAUSAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Whether a token's row has no keys, and whether the token sees none; padding tokens have none."""
    row = row_of(token, starts_ptr, num_rows)
    inside = row < num_rows
    seq_len = tl.load(lens_ptr + row, mask=inside, other=0)
    no_keys = seq_len == 0
    unseen = no_keys
    if CAUSAL:
        stop = tl.load(starts_ptr + row + 1, mask=inside, other=0)
        unseen = no_keys | (seq_len - stop + token < 0)
    return no_keys, unseen


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def clear_kernel(
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    CAUSAL: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Zeros for tokens that see no key; one program a token, which has nothing to do as a rule."""
    token = tl.program_id(0).to(tl.int64)
    _, unseen = place_of(token, starts_ptr, lens_ptr, num_rows, CAUSAL)
    if unseen:
        column = tl.arange(0, DV_PAD).to(tl.int64)
        for first in range(0, num_heads, HEADS):
            head = (first + tl.arange(0, HEADS)).to(tl.int64)
            mask = (head < num_heads)[:, None] & (column < DV)[None, :]
            ptrs = out_ptr + token * out_token + (head * out_head)[:, None] + column[None, :]
            tl.store(ptrs, tl.zeros([HEADS, DV_PAD], tl.float32).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_heads", "group", "scale_head", "in_token", "in_head", "lse_token"]
)
def finish_kernel(
    out_ptr: tl.tensor,
    lse_in_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    in_token: tl.tensor,
    in_head: tl.tensor,
    lse_token: tl.tensor,
    scale_head: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    CAUSAL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BASE_2: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    no_keys, unseen = place_of(token, starts_ptr, lens_ptr, num_rows, CAUSAL)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    keep = head < num_heads
    # Of one shape with the heads: Triton's interpreter mixes no scalar into a mask.
    unseen_H = head * 0 + unseen.to(tl.int64) > 0
    factor = tl.full([HEADS], 1.0, tl.float32)
    empty = float("-inf")
    if HAS_LSE or HAS_SINKS:
        lse = tl.load(lse_in_ptr + token * in_token + head * in_head, mask=keep, other=0.0)
        lse = tl.where(unseen_H, empty, lse)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=keep, other=0.0).to(tl.float32)
            if BASE_2:
                sink = sink * LOG2_E
            top = tl.maximum(lse, sink)
            top = tl.where(top == empty, 0.0, top)
            if BASE_2:
                total = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
                factor = tl.exp2(lse - tl.where(total == empty, 0.0, total))
            else:
                total = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
                factor = tl.exp(lse - tl.where(total == empty, 0.0, total))
            lse = tl.where(head * 0 + no_keys.to(tl.int64) > 0, empty, total)
        if HAS_LSE:
            tl.store(lse_ptr + token * lse_token + head, lse, mask=keep)
    column = tl.arange(0, DV_PAD).to(tl.int64)
    ptrs = out_ptr + token * out_token + (head * out_head)[:, None] + column[None, :]
    mask = keep[:, None] & (column < DV)[None, :]
    if HAS_SCALE:
        factor = factor * tl.load(scale_ptr + (head // group) * scale_head, mask=keep, other=0.0)
    if HAS_SINKS or HAS_SCALE:
        x = tl.load(ptrs, mask=mask & (unseen_H == 0)[:, None], other=0.0).to(tl.float32)
        tl.store(ptrs, (x * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        zero = tl.zeros([HEADS, DV_PAD], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(ptrs, zero, mask=mask & unseen_H[:, None])


def finish_attention(
    out: torch.Tensor,
    lse_in: torch.Tensor | None,
    lse: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    causal: bool,
    sinks: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    base_2: bool = False,
) -> None:
    """Turn what a kernel gave for plain rows into what every row must hold, in one pass.

    Rows of seq_len 0 and tokens past query_start_loc[-1] become (0, -inf); tokens that a causal mask lets
    see no key (0, -inf), or (0, sink) with sinks. Sinks join the denominator of all others, `v_scale`
    multiplies them. Nothing is read where a row has no keys, so it may have been left unwritten.

    out [T, H, Dv] float32, float16 or bfloat16, changed in place; lse_in [T, H] float32 with any strides,
    needed for `lse` and for `sinks`; lse [T, H] float32 or None, written, and may be lse_in;
    query_start_loc int32 [R+1]; seq_lens int32 [R]; sinks [H]; v_scale float32 [1] or [Hk]; base_2: both
    LSEs are base-2 logarithms instead of natural ones (sinks are natural logits in both cases).

    Raises ValueError for shapes or dtypes outside of these.
    """
    _check(out, lse_in, lse, query_start_loc, seq_lens, sinks, v_scale)
    tokens, heads, size = out.shape
    if tokens == 0:
        return
    width = padded_size(size)
    tile_heads = max(1, min(padded_size(heads), 4096 // width))
    kv_heads = 1 if v_scale is None else v_scale.numel()
    strides = (0, 0) if lse_in is None else lse_in.stride()
    rows = seq_lens.shape[0]
    if lse is None and sinks is None and v_scale is None:
        with on_device_of(out):
            clear_kernel[(tokens,)](
                out, query_start_loc, seq_lens, *out.stride()[:2], rows, heads, causal, size, width,
                tile_heads, num_warps=4,
            )  # fmt: skip
        return
    with on_device_of(out):
        finish_kernel[(tokens, -(-heads // tile_heads))](
            out, lse_in, lse, query_start_loc, seq_lens, sinks, v_scale,
            *out.stride()[:2], *strides, 0 if lse is None else lse.stride(0), 0 if kv_heads == 1 else 1,
            rows, heads, max(1, heads // kv_heads),
            causal, lse is not None, sinks is not None, v_scale is not None, base_2,
            size, width, tile_heads, num_warps=4,
        )  # fmt: skip


def _check(
    out: torch.Tensor,
    lse_in: torch.Tensor | None,
    lse: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_device(WHERE, out)
    check_same_device(
        WHERE, out, ("lse_in", "lse", "query_start_loc", "seq_lens", "sinks", "v_scale"),
        (lse_in, lse, query_start_loc, seq_lens, sinks, v_scale),
    )  # fmt: skip
    if out.dim() != 3 or out.stride(2) != 1 or out.dtype not in QUERY_DTYPES:
        found = f"{out.dtype}, {tuple(out.shape)} with strides {out.stride()}"
        fail(WHERE, "out", found, f"3 dimensions of {names(QUERY_DTYPES)}, the last with stride 1")
    for name, tensor in (("lse_in", lse_in), ("lse", lse)):
        if tensor is not None and (tensor.shape != out.shape[:2] or tensor.dtype != torch.float32):
            found = f"{tuple(tensor.shape)} of {tensor.dtype}"
            fail(WHERE, name, found, f"torch.float32 of shape {tuple(out.shape[:2])}")
    if lse is not None and lse.stride(1) != 1:
        fail(WHERE, "lse.stride(1)", lse.stride(1), "1")
    if lse_in is None and (lse is not None or sinks is not None):
        fail(WHERE, "lse_in", None, "the kernel's LSE, for lse and for sinks")
    if query_start_loc.shape != (seq_lens.shape[0] + 1,):
        fail(WHERE, "query_start_loc.shape", tuple(query_start_loc.shape), f"({seq_lens.shape[0]} + 1,)")
    heads = out.shape[1]
    if sinks is not None and sinks.shape != (heads,):
        fail(WHERE, "sinks.shape", tuple(sinks.shape), f"({heads},)")
    if v_scale is not None and heads % v_scale.numel():
        fail(WHERE, "v_scale.numel()", v_scale.numel(), f"1 or a divisor of the {heads} heads")
