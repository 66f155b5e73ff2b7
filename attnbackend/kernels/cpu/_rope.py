"""Queries and keys rotated, and keys and values written to a paged cache, in C++.

Shapes: T tokens, H query heads, Hk kv heads, D head size, R rotated elements.
"""

from __future__ import annotations

from torch import Tensor

from attnbackend.kernels.cpu import _checks
from attnbackend.kernels.cpu._cache_write import raise_slot_refusal, write_fields
from attnbackend.kernels.cpu._library import library
from attnbackend.kernels.cpu._structs import ROPE_STRUCT


def _heads(
    name: str, x: Tensor, out: Tensor, weight: Tensor | None, eps: float, like: Tensor
) -> tuple[float, ...]:  # fmt: skip
    """TurnedHeads, as in args.h."""
    shape = (like.shape[0], x.shape[1], like.shape[2])
    for what, tensor in ((name, x), (f"output of {name}", out)):
        _checks.require_cpu(what.replace(" ", "_"), tensor)
        _checks.require_shape(what, tensor, shape, f"tokens and head size of key, heads of {name}")
        if tensor.dtype != like.dtype:
            raise ValueError(f"{what} is {tensor.dtype} and key {like.dtype}; they must agree")
    _checks.require_last_stride(name, x, x.stride())
    if not out.is_contiguous():
        raise ValueError(f"output of {name} has strides {list(out.stride())}; it must be contiguous")
    address, code = _weight(f"weight of {name}", weight, shape[2])
    return x.data_ptr(), address, out.data_ptr(), shape[1], *x.stride()[:2], code, eps


def _weight(name: str, weight: Tensor | None, size: int) -> tuple[int, int]:
    """Address and dtype; 0 for none."""
    if weight is None:
        return 0, 0
    code = _checks.dtype_code(name, weight, _checks.FLOAT_CODES)
    _checks.require_vector(name, weight, weight.dtype, size)
    return weight.data_ptr(), code


def _angles(cos: Tensor, sin: Tensor, key: Tensor) -> tuple[int, ...]:
    """cos .. angle_dtype, as in args.h."""
    for name, angle in (("cos", cos), ("sin", sin)):
        _checks.require_cpu(name, angle)
        _checks.require_rank(name, angle, 2, "[T, R]")
        _checks.require_shape(name, angle, (key.shape[0], cos.shape[1]), "[T, R], tokens of key, R of cos")
        _checks.require_last_stride(name, angle, angle.stride())
    if cos.dtype != sin.dtype:
        raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; they must agree")
    rotated, size = cos.shape[1], key.shape[2]
    if rotated % 2 or not 2 <= rotated <= size:
        raise ValueError(f"cos and sin have {rotated} elements; allowed: even numbers up to head size {size}")
    code = _checks.dtype_code("cos", cos, _checks.FLOAT_CODES)
    return cos.data_ptr(), sin.data_ptr(), rotated, cos.stride(0), sin.stride(0), code


def rope_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_eps: float = 0.0,
    k_eps: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotates query to q_out and key to k_out, and stores k_out and value as `cache_write` does.

    Sums and products are in float32 and rounded once. Rows of a negative slot are rotated like all others.

    Args:
        query: [T, H, D] float32, float16 or bfloat16; outer strides are free here and below.
        key, value: [T, Hk, D], same dtype as query.
        cos, sin: [T, R] of any of these dtypes, R even and at most D. Elements i and i + R / 2 of a head turn
            together; those from R on stay as they are.
        q_out, k_out: written, contiguous, as query and key.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as in `cache_write`.
        q_weight, k_weight: [D] of any of these dtypes. Before heads are rotated they are divided by their
            root mean square, of epsilon q_eps or k_eps, and multiplied by these; None: they are not.

    Raises:
        ValueError: a shape, dtype, stride or slot that is not allowed; nothing was written then.
        RuntimeError: the kernels cannot be built here (see `unavailable_reason`).
    """
    loaded = library()
    fields = (
        *write_fields(k_out, value, key_cache, value_cache, slot_mapping, k_scale, v_scale),
        *_heads("query", query, q_out, q_weight, q_eps, k_out),
        *_heads("key", key, k_out, k_weight, k_eps, k_out),
        *_angles(cos, sin, k_out),
    )
    if loaded.attnbackend_rope(ROPE_STRUCT.pack(*fields)):
        raise_slot_refusal(loaded, key_cache)
