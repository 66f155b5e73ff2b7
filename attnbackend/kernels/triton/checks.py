"""Validation that the wrappers share: cheap tests of shapes and dtypes, no device reads."""

from __future__ import annotations

from typing import NoReturn

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


def check_same_device(
    where: str,
    first: torch.Tensor,
    names: tuple[str, ...],
    tensors: tuple[torch.Tensor | None, ...],
) -> None:
    """ValueError unless the tensors lie on the device of `first`: a kernel sees no other memory."""
    index = first.get_device()
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.get_device() != index:
            fail(where, f"device of {name}", tensor.device, f"{first.device}, as all of the call")


def check_heads(
    where: str, heads: int, head_size: int, key_shape: torch.Size, value_shape: torch.Size
) -> None:
    """ValueError for head counts, head sizes or a block size that the kernels do not take."""
    kv_heads, key_size, value_size = *key_shape[-2:], value_shape[-1]
    if key_size != head_size:
        fail(where, "head size of key_cache", key_size, f"that of query, {head_size}")
    for name, size in (("query", head_size), ("value_cache", value_size)):
        if size % 8 or not 8 <= size <= 256:
            fail(where, f"head size of {name}", size, "multiples of 8 from 8 to 256")
    if kv_heads == 0 or heads % kv_heads:
        fail(where, "number of query heads", heads, f"multiples of the {kv_heads} kv heads")
    if value_shape[:-1] != key_shape[:-1]:
        allowed = f"all but the last of key_cache, {tuple(key_shape[:-1])}"
        fail(where, "value_cache.shape", tuple(value_shape), allowed)
    if len(key_shape) == 4 and (key_shape[1] % 16 or key_shape[1] == 0):
        fail(where, "block size", key_shape[1], "multiples of 16")


def check_dtypes(
    where: str, query: torch.dtype, key: torch.dtype, value: torch.dtype, output: torch.dtype
) -> None:
    """ValueError for a dtype that the attention kernels do not take."""
    if query not in QUERY_DTYPES:
        fail(where, "query.dtype", query, names(QUERY_DTYPES))
    for name, dtype in (("key_cache", key), ("value_cache", value), ("output", output)):
        if dtype not in CACHE_DTYPES:
            fail(where, f"{name}.dtype", dtype, names(CACHE_DTYPES))


def check_own_keys(where: str, tokens: int | None, key_shape: torch.Size, value_shape: torch.Size) -> None:
    """ValueError unless there is a key and a value for each token, as there must be with no cache.

    tokens None: as many values as keys are enough.
    """
    count = key_shape[0] if tokens is None else tokens
    for name, shape in (("key_cache", key_shape), ("value_cache", value_shape)):
        if shape[0] != count:
            allowed = f"[{count}, Hk, D], those of the tokens, since block_table is None"
            fail(where, f"{name}.shape", tuple(shape), allowed)


def check_key_starts(
    where: str, key_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor | None
) -> None:
    """ValueError unless these say where each row's keys begin, and no table does."""
    rows = seq_lens.shape[0]
    if block_table is not None:
        fail(where, "key_start_loc", "given", "None beside a block_table")
    if key_start_loc.dtype != torch.int32 or key_start_loc.shape != (rows + 1,):
        found = f"{tuple(key_start_loc.shape)} of {key_start_loc.dtype}"
        fail(where, "key_start_loc", found, f"torch.int32 of shape {(rows + 1,)}")


def check_dimensions(where: str, tensors: dict[str, torch.Tensor], keys: int = 4) -> None:
    """ValueError unless the tensors have the dimensions and the last stride of their role.

    `keys` are the dimensions of key_cache and value_cache.
    """
    counts = {"query": 3, "output": 3, "key_cache": keys, "value_cache": keys, "block_table": 2}
    for name, tensor in tensors.items():
        count = counts.get(name, 1)
        if tensor.dim() != count:
            fail(where, f"{name}.shape", tuple(tensor.shape), f"{count} dimension(s)")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            fail(where, f"last stride of {name}", tensor.stride(-1), "1")


def check_metadata(
    where: str,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    """ValueError unless these are int32 and agree on the number of rows."""
    for name, tensor in (
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
        ("block_table", block_table),
    ):
        if tensor is not None and tensor.dtype != torch.int32:
            fail(where, f"{name}.dtype", tensor.dtype, "torch.int32")
    rows = seq_lens.shape[0]
    if query_start_loc.shape[0] != rows + 1:
        fail(where, "length of query_start_loc", query_start_loc.shape[0], f"{rows + 1}, rows + 1")
    if block_table is not None and block_table.shape[0] != rows:
        fail(where, "rows of block_table", block_table.shape[0], f"{rows}, those of seq_lens")


def check_masks(
    where: str, sliding_window: int | None, attention_chunk_size: int | None, logits_soft_cap: float
) -> None:
    """ValueError for a window, a chunk or a soft-cap that has no meaning."""
    if sliding_window is not None and sliding_window < 1:
        fail(where, "sliding_window", sliding_window, "None, or at least 1 (it counts the token)")
    if attention_chunk_size is not None:
        if attention_chunk_size < 1:
            fail(where, "attention_chunk_size", attention_chunk_size, "None, or at least 1")
        if sliding_window is not None:
            fail(where, "attention_chunk_size", attention_chunk_size, "None beside a sliding_window")
    if not 0 <= logits_soft_cap < float("inf"):
        fail(where, "logits_soft_cap", logits_soft_cap, "0 for none, or a positive number")


def count_ranges(where: str, ranges: torch.Tensor | None, rows: int, allowed: bool) -> int:
    """Bidirectional ranges of each row. ValueError for another layout, or where not `allowed`."""
    if ranges is None:
        return 0
    if not allowed:
        fail(where, "bidirectional_ranges", "given", "None unless causal, over a paged cache")
    shape = ranges.shape
    fits = ranges.dim() == 3 and shape[0] == rows and shape[2] == 2 and ranges.is_contiguous()
    if ranges.dtype != torch.int32 or not fits:
        found = f"{tuple(shape)} of {ranges.dtype}, strides {ranges.stride()}"
        fail(where, "bidirectional_ranges", found, f"contiguous torch.int32 [{rows}, G, 2]")
    return int(shape[1])


def check_extras(
    where: str,
    tokens: int,
    heads: int,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """ValueError for an optional tensor of another shape, dtype or layout than documented."""
    if alibi_slopes is not None:
        check_vector(where, "alibi_slopes", alibi_slopes, (torch.float32,), (heads,))
    if sinks is not None:
        check_vector(where, "sinks", sinks, QUERY_DTYPES, (heads,))
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != (tokens, heads)):
        found = f"{tuple(lse.shape)} of {lse.dtype}"
        fail(where, "lse", found, f"torch.float32 of shape {(tokens, heads)}")


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
