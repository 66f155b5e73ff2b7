"""Merging two attention states over disjoint sets of keys.

Legend: T tokens, H heads, Dv head size of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import QUERY_DTYPES, check_device, check_same_device, fail, names
from .codec import decode, encode, kernel_view, stored_format
from .config import padded_size
from .launch import on_device_of

WHERE = "merge_attention_states"


@triton.jit(do_not_specialize=["num_heads"])
def merge_states_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_a_ptr: tl.tensor,
    lse_b_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    a_token: tl.tensor,
    a_head: tl.tensor,
    a_dim: tl.tensor,
    b_token: tl.tensor,
    b_head: tl.tensor,
    b_dim: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_dim: tl.tensor,
    lse_a_token: tl.tensor,
    lse_a_head: tl.tensor,
    lse_b_token: tl.tensor,
    lse_b_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    num_heads: tl.tensor,
    A_FMT: tl.constexpr,
    B_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    keep = head < num_heads
    column = tl.arange(0, DV_PAD).to(tl.int64)
    mask = keep[:, None] & (column < DV)[None, :]
    a_ptrs = a_ptr + token * a_token + (head * a_head)[:, None] + (column * a_dim)[None, :]
    b_ptrs = b_ptr + token * b_token + (head * b_head)[:, None] + (column * b_dim)[None, :]
    a = decode(tl.load(a_ptrs, mask=mask, other=0.0), A_FMT).to(tl.float32)
    b = decode(tl.load(b_ptrs, mask=mask, other=0.0), B_FMT).to(tl.float32)
    empty = float("-inf")
    lse_a = tl.load(lse_a_ptr + token * lse_a_token + head * lse_a_head, mask=keep, other=empty)
    lse_b = tl.load(lse_b_ptr + token * lse_b_token + head * lse_b_head, mask=keep, other=empty)

    top = tl.maximum(lse_a, lse_b)
    # -inf minus -inf is NaN: where both are empty, subtract 0.
    pivot = tl.where(top == empty, 0.0, top)
    weight_a = tl.exp(lse_a - pivot)
    weight_b = tl.exp(lse_b - pivot)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = a * (weight_a / divisor)[:, None] + b * (weight_b / divisor)[:, None]
    # Selected, not computed: an empty state is the identity bit for bit, whatever it holds.
    merged = tl.where((lse_b == empty)[:, None], a, merged)
    merged = tl.where((lse_a == empty)[:, None], b, merged)
    merged = tl.where((top == empty)[:, None], 0.0, merged)
    lse = tl.where(top == empty, empty, pivot + tl.log(divisor))
    lse = tl.where(lse_b == empty, lse_a, tl.where(lse_a == empty, lse_b, lse))

    ptrs = out_ptr + token * out_token + (head * out_head)[:, None] + (column * out_dim)[None, :]
    tl.store(ptrs, encode(merged, out_ptr.dtype.element_ty, OUT_FMT), mask=mask)
    tl.store(lse_ptr + token * lse_token + head * lse_head, lse, mask=keep)


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention over the union of two disjoint sets of keys, from the state of each.

    out_a, out_b, out [T, H, Dv]: float32, float16 or bfloat16; lse_a, lse_b, lse [T, H]
    float32, natural logarithms. Each has strides of its own; `out` and `lse` may be one of the
    inputs. The empty state, lse -inf, is the identity bit for bit; two of them give (0, -inf).

    Raises ValueError for shapes or dtypes outside of these.
    """
    _check(out_a, lse_a, out_b, lse_b, out, lse)
    tokens, heads, size = out.shape
    if tokens == 0:
        return
    tensors = (out_a, out_b, out)
    formats = [stored_format(t.dtype, out.device) for t in tensors]
    views = [kernel_view(t, fmt) for t, fmt in zip(tensors, formats, strict=True)]
    width = padded_size(size)
    tile_heads = max(1, min(padded_size(heads), 2048 // width))
    with on_device_of(out):
        merge_states_kernel[(tokens, -(-heads // tile_heads))](
            *views, lse_a, lse_b, lse,
            *out_a.stride(), *out_b.stride(), *out.stride(),
            *lse_a.stride(), *lse_b.stride(), *lse.stride(), heads,
            *formats, size, width, tile_heads, num_warps=4,
        )  # fmt: skip


def merge_over(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """`merge_attention_states`, written over b."""
    merge_attention_states(out_a, lse_a, out_b, lse_b, out_b, lse_b)


def _check(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    check_device(WHERE, out)
    check_same_device(
        WHERE, out, ("out_a", "lse_a", "out_b", "lse_b", "lse"), (out_a, lse_a, out_b, lse_b, lse)
    )
    if out.dim() != 3:
        fail(WHERE, "out.shape", tuple(out.shape), "3 dimensions")
    for name, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        if tensor.shape != out.shape:
            fail(WHERE, f"{name}.shape", tuple(tensor.shape), f"that of out, {tuple(out.shape)}")
        if tensor.dtype not in QUERY_DTYPES:
            fail(WHERE, f"{name}.dtype", tensor.dtype, names(QUERY_DTYPES))
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if tensor.shape != out.shape[:2] or tensor.dtype != torch.float32:
            found = f"{tuple(tensor.shape)} of {tensor.dtype}"
            fail(WHERE, name, found, f"torch.float32 of shape {tuple(out.shape[:2])}")
