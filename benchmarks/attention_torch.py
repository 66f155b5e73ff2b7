"""torch's own attention as sides of `benchmarks.attention`: they read keys and values that lie in order.

Shape legend: B requests, L tokens of each, T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from benchmarks.attention_grid import Inputs, Point
from benchmarks.attention_sides import Run, Unserved

__all__ = ["cudnn_sdpa", "torch_varlen"]


def cudnn_sdpa(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """cuDNN's kernel through ``scaled_dot_product_attention``, for prompts of one length without context."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _require_new_tokens(point)
    if len(set(point.seq_lens)) > 1:
        raise Unserved("requests of unequal lengths")
    rows, length = len(point.seq_lens), point.seq_lens[0]
    query_BHLD, key_BKLD, value_BKLD = (
        x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)
    )

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out_BHLD = torch.nn.functional.scaled_dot_product_attention(
                query_BHLD, key_BKLD, value_BKLD, is_causal=True, scale=point.params.scale, enable_gqa=True
            )
        return out_BHLD.transpose(1, 2)

    return run


def torch_varlen(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """FlashAttention 2 as torch ships it, for prompts without context."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unserved(f"ImportError: {error}") from None
    _require_new_tokens(point)
    known = inspect.signature(varlen_attn).parameters
    how = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    keys, values = inputs.key, inputs.value
    if "enable_gqa" in known:
        how["enable_gqa"] = True
    elif point.num_heads != point.num_kv_heads:
        raise Unserved("fewer key-value heads than query heads")
    starts, longest = inputs.common.query_start_loc, inputs.max_query_len
    return lambda: varlen_attn(inputs.query, keys, values, starts, starts, longest, longest, **how)


def _require_new_tokens(point: Point) -> None:
    if point.query_lens != point.seq_lens:
        raise Unserved("keys in a paged cache")
    if point.kv_cache_dtype != "auto":
        raise Unserved(f"kv_cache_dtype={point.kv_cache_dtype}")
