"""Checks of the kernels' arguments: each says what, where, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_CODES = FLOAT_CODES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
# Bounds the row buffer of the cache writer (kernels.cpp, MAX_ROW).
MAX_HEAD_SIZE = 1024


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dtype_code(name: str, tensor: Tensor, codes: dict[torch.dtype, int]) -> int:
    """The number by which the kernels know the tensor's dtype."""
    code = codes.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name}.dtype is {tensor.dtype}; allowed: {_names(list(codes))}")
    return code


def require_cpu(names: str, *tensors: Tensor) -> None:
    """Every tensor is on the CPU; `names` are theirs, separated by spaces."""
    for index, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            name = names.split()[index]
            raise ValueError(f"{name} is on {tensor.device}; the C++ kernels take CPU tensors")


def require_rank(name: str, tensor: Tensor, rank: int, meaning: str) -> None:
    """The tensor has `rank` dimensions, named by `meaning`, e.g. "[T, H, D]"."""
    if tensor.dim() != rank:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {meaning}")


def require_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """The tensor has exactly this shape."""
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {meaning} = {list(expected)}")


def require_last_stride(name: str, tensor: Tensor, strides: tuple[int, ...]) -> None:
    """The last dimension is contiguous; the others may have any stride."""
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {list(strides)}; the last must be 1 (call .contiguous())")


def require_vector(name: str, tensor: Tensor, dtype: torch.dtype, length: int) -> None:
    """A contiguous CPU vector of this dtype and length."""
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} [{length}]")
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError(
            f"{name} is on {tensor.device} with strides {list(tensor.stride())}; "
            "expected a contiguous CPU tensor"
        )


def scale_address(name: str, scale: Tensor | None, kv_heads: int) -> tuple[int, int]:
    """Address and step of a dequantisation scale: step 0 for one, 1 for one a head; 0 for none."""
    if scale is None:
        return 0, 0
    count = scale.numel()
    if scale.dtype != torch.float32 or count not in (1, kv_heads):
        raise ValueError(
            f"{name} is {scale.dtype} with {count} elements; expected float32 with 1 or "
            f"{kv_heads} (one a kv head)"
        )
    if not (scale.is_cpu and scale.is_contiguous()):
        raise ValueError(
            f"{name} is on {scale.device} with strides {list(scale.stride())}; "
            "expected a contiguous CPU tensor"
        )
    return scale.data_ptr(), int(count > 1)


def float_vector(name: str, tensor: Tensor, length: int) -> Tensor:
    """A float vector of any precision as contiguous float32."""
    if not tensor.dtype.is_floating_point or tensor.shape != (length,) or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
            f"expected a CPU float tensor [{length}]"
        )
    return tensor.to(torch.float32).contiguous()


def ranges_address(ranges: Tensor | None, requests: int, allowed: bool) -> tuple[int, int]:
    """Address of bidirectional ranges and how many a request has; 0 for none."""
    if ranges is None:
        return 0, 0
    if not allowed:
        raise ValueError("bidirectional_ranges is given; allowed: None unless causal, over a paged cache")
    fits = ranges.dim() == 3 and ranges.shape[0] == requests and ranges.shape[2] == 2
    if ranges.dtype != torch.int32 or not (fits and ranges.is_contiguous() and ranges.is_cpu):
        raise ValueError(
            f"bidirectional_ranges is {ranges.dtype} {list(ranges.shape)} on {ranges.device} with strides "
            f"{list(ranges.stride())}; expected a contiguous CPU int32 [{requests}, G, 2]"
        )
    return ranges.data_ptr(), ranges.shape[1]


def require_heads(heads: int, kv_heads: int, head_size: int, value_size: int) -> None:
    """Query heads divide into kv heads, and head sizes are in range."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and the cache {kv_heads}: query heads must be a multiple of kv heads"
        )
    if not (1 <= head_size <= MAX_HEAD_SIZE and 1 <= value_size <= MAX_HEAD_SIZE):
        raise ValueError(
            f"head size {head_size} and value head size {value_size}: allowed 1..{MAX_HEAD_SIZE}"
        )


def require_rules(
    scale: float, sliding_window: int | None, attention_chunk_size: int | None, logits_soft_cap: float
) -> None:
    """The numbers that shape the scores are in range."""
    if scale != scale:
        raise ValueError("scale is NaN; usually 1 / sqrt(head size)")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window is {sliding_window}; it counts the token itself, so it is at least 1, "
            "or None for no window"
        )
    if attention_chunk_size is not None and (attention_chunk_size < 1 or sliding_window is not None):
        raise ValueError(
            f"attention_chunk_size is {attention_chunk_size} and sliding_window {sliding_window}; allowed: "
            "a chunk of at least 1 with no window, or None"
        )
    if not 0 <= logits_soft_cap < float("inf"):
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}; allowed: finite, 0 for none")


def refusal_message(code: int, numbers: Sequence[int], limits: dict[str, int]) -> str:
    """The message for what the C++ side refused (RefusalCode in args.h)."""
    a, b, c = numbers
    messages = {
        1: f"query_start_loc must start at 0 and not decrease: row {a} runs from {c} to {b}",
        2: f"query_start_loc ends rows at {a}, but query has {limits.get('tokens')} tokens",
        3: f"seq_lens[{a}] is {b}; allowed: 0 or more",
        4: f"seq_lens[{a}] is {b}, more than the {limits.get('capacity')} tokens that a row of "
        "block_table can hold (width * block_size)",
        5: f"block_table[{a}, {b}] is {c}, not a block of the cache; allowed: 0 to "
        f"{limits.get('blocks', 0) - 1}",
        6: f"slot_mapping[{a}] is {b}; allowed: negative (not written) or 0 to {limits.get('slots', 0) - 1}",
        7: f"seq_lens[{a}] is {b}, more than its {c} tokens, which are its keys where block_table is None",
    }
    return messages[code]
