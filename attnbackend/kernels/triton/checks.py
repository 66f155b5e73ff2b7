"""Validation that the wrappers share: cheap tests of shapes and dtypes, no device reads."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from .codec import FLOAT8_FORMATS, INTERPRETED

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*QUERY_DTYPES, *FLOAT8_FORMATS)


def fail(where: str, what: str, value: object, allowed: str) -> NoReturn:
    """Raise the ValueError that all wrappers use."""
    raise ValueError(f"{where}: {what} is {value}; allowed: {allowed}")


def check_device(where: str, tensor: torch.Tensor) -> None:
    """ValueError unless the kernels of this process run on the tensor's device."""
    if not (tensor.is_cuda or INTERPRETED):
        fail(where, "device", tensor.device, "CUDA, or any under TRITON_INTERPRET=1")


class AttentionShape(NamedTuple):
    """Sizes of one call ."""

    tokens: int
    heads: int
    head_size: int
    kv_heads: int
    value_size: int
    block_size: int
    rows: int
    table_width: int


def attention_shape(
    where: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> AttentionShape:
    """Sizes of a call, or ValueError for tensors that do not go together."""
    check_device(where, query)
    for name, tensor, dim in (("query", query, 3), ("key_cache", key_cache, 4)):
        if tensor.dim() != dim:
            fail(where, f"{name}.shape", tuple(tensor.shape), f"{dim} dimensions")
    tokens, heads, size = query.shape
    _, block_size, kv_heads, key_size = key_cache.shape
    _check_caches(where, key_cache, value_cache, block_size)
    if key_size != size:
        fail(where, "head size of key_cache", key_size, f"that of query, {size}")
    if size % 8 or not 8 <= size <= 256:
        fail(where, "head size", size, "multiples of 8 from 8 to 256")
    if heads % kv_heads:
        fail(where, "number of query heads", heads, f"multiples of the {kv_heads} kv heads")
    value_size = value_cache.shape[3]
    if output.shape != (tokens, heads, value_size):
        fail(where, "output.shape", tuple(output.shape), f"{(tokens, heads, value_size)}")
    _check_floats(where, query, output)
    rows, width = _batch_shape(where, query_start_loc, seq_lens, block_table)
    return AttentionShape(tokens, heads, size, kv_heads, value_size, block_size, rows, width)


def _check_caches(
    where: str, key_cache: torch.Tensor, value_cache: torch.Tensor, block_size: int
) -> None:
    if value_cache.shape[:3] != key_cache.shape[:3]:
        allowed = f"the blocks, block size and kv heads of key_cache, {tuple(key_cache.shape[:3])}"
        fail(where, "value_cache.shape", tuple(value_cache.shape), allowed)
    if block_size % 16:
        fail(where, "block size", block_size, "multiples of 16")
    value_size = value_cache.shape[3]
    if value_size % 8 or not 8 <= value_size <= 256:
        fail(where, "head size of value_cache", value_size, "multiples of 8 from 8 to 256")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in CACHE_DTYPES:
            fail(where, f"{name}.dtype", cache.dtype, names(CACHE_DTYPES))
        if cache.stride(3) != 1:
            fail(where, f"last stride of {name}", cache.stride(3), "1")


def _check_floats(where: str, query: torch.Tensor, output: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("output", output)):
        if tensor.dtype not in QUERY_DTYPES:
            fail(where, f"{name}.dtype", tensor.dtype, names(QUERY_DTYPES))
        if tensor.stride(2) != 1:
            fail(where, f"last stride of {name}", tensor.stride(2), "1")


def _batch_shape(
    where: str,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[int, int]:
    metadata = (query_start_loc, 1), (seq_lens, 1), (block_table, 2)
    for name, (tensor, dim) in zip(
        ("query_start_loc", "seq_lens", "block_table"), metadata, strict=True
    ):
        if tensor.dim() != dim or tensor.dtype != torch.int32:
            value = f"{tuple(tensor.shape)} of {tensor.dtype}"
            fail(where, f"{name}", value, f"torch.int32 with {dim} dimension(s)")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            fail(where, f"last stride of {name}", tensor.stride(-1), "1")
    rows, width = seq_lens.shape[0], block_table.shape[1]
    if query_start_loc.shape[0] != rows + 1:
        fail(where, "length of query_start_loc", query_start_loc.shape[0], f"{rows + 1}, rows + 1")
    if block_table.shape[0] != rows:
        fail(where, "rows of block_table", block_table.shape[0], f"{rows}, those of seq_lens")
    return rows, width


def check_options(
    where: str,
    shape: AttentionShape,
    sliding_window: int | None,
    logits_soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """ValueError for an optional argument that the kernels cannot honour."""
    if sliding_window is not None and sliding_window < 1:
        fail(where, "sliding_window", sliding_window, "None, or at least 1 (it counts the token)")
    if logits_soft_cap < 0:
        fail(where, "logits_soft_cap", logits_soft_cap, "0 for none, or a positive number")
    if alibi_slopes is not None:
        check_vector(where, "alibi_slopes", alibi_slopes, (torch.float32,), (shape.heads,))
    if sinks is not None:
        check_vector(where, "sinks", sinks, QUERY_DTYPES, (shape.heads,))
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != (shape.tokens, shape.heads)):
        allowed = f"torch.float32 of shape {(shape.tokens, shape.heads)}"
        fail(where, "lse", f"{tuple(lse.shape)} of {lse.dtype}", allowed)


def check_vector(
    where: str,
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    lengths: tuple[int, ...],
) -> None:
    """ValueError unless `tensor` is contiguous, of one of `dtypes` and one of `lengths`."""
    if tensor.dtype not in dtypes or tensor.numel() not in lengths or not tensor.is_contiguous():
        value = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
        counts = " or ".join(str(n) for n in lengths)
        fail(where, name, value, f"contiguous {names(dtypes)} with {counts} element(s)")


def scale_stride(where: str, name: str, scale: torch.Tensor | None, kv_heads: int) -> int:
    """Step from one kv head's scale to the next: 0 where all share one."""
    if scale is None:
        return 0
    check_vector(where, name, scale, (torch.float32,), (1, kv_heads))
    return 0 if scale.numel() == 1 else 1


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Dtypes in words, for a message."""
    return ", ".join(str(dtype) for dtype in dtypes)
