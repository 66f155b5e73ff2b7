"""What the attention wrappers hand to their kernels, derived once from the call's arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .checks import AttentionShape, attention_shape, check_options, scale_stride
from .codec import TRITON_DTYPE, kernel_view, product_dtype, stored_format
from .config import padded_size


class Launch(NamedTuple):
    """Arguments that the prefill and the decode kernel have in common."""

    shape: AttentionShape
    product: torch.dtype
    tensors: tuple[Any, ...]
    """query, key_cache, value_cache, output, lse, query_start_loc, seq_lens, block_table,
    alibi_slopes, sinks, k_scale, v_scale"""
    numbers: tuple[Any, ...]
    """scale, soft_cap, window, then the strides"""
    constants: dict[str, Any]


def prepare(
    where: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    logits_soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Launch:
    """Validate a call and lay out its arguments. ValueError for what the kernels cannot do."""
    shape = attention_shape(
        where, query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table
    )
    check_options(where, shape, sliding_window, logits_soft_cap, alibi_slopes, sinks, lse)
    product = product_dtype(query.dtype, key_cache.dtype, value_cache.dtype)
    views, formats = _views(query.device, query, key_cache, value_cache, output, sinks)
    q, k, v, out, sink = views
    metadata = (query_start_loc, seq_lens, block_table, alibi_slopes, sink, k_scale, v_scale)
    numbers = (
        float(scale),
        float(logits_soft_cap),
        sliding_window or 0,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *output.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        block_table.stride(0),
        scale_stride(where, "k_scale", k_scale, shape.kv_heads),
        scale_stride(where, "v_scale", v_scale, shape.kv_heads),
    )
    constants = {
        "CAUSAL": bool(causal),
        "HAS_WINDOW": sliding_window is not None,
        "HAS_CAP": logits_soft_cap > 0,
        "GROUP": shape.heads // shape.kv_heads,
        "S": shape.block_size,
        "D": shape.head_size,
        "DV": shape.value_size,
        "D_PAD": padded_size(shape.head_size),
        "DV_PAD": padded_size(shape.value_size),
        "DOT": TRITON_DTYPE[product],
        **formats,
    }
    return Launch(shape, product, (q, k, v, out, lse, *metadata), numbers, constants)


def _views(
    device: torch.device,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor | None, ...], dict[str, str]]:
    tensors = (query, key_cache, value_cache, output, sinks)
    found = ["native" if t is None else stored_format(t.dtype, device) for t in tensors]
    views = tuple(
        t if t is None else kernel_view(t, fmt) for t, fmt in zip(tensors, found, strict=True)
    )
    labels = ("Q_FMT", "K_FMT", "V_FMT", "OUT_FMT", "SINK_FMT")
    return views, dict(zip(labels, found, strict=True))
