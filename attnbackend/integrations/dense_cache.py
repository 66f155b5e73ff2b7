"""Attention over the dense caches that transformers keeps, by way of a temporary paged one.

It copies the cache at every call, so that ``model.generate`` is right on any backend; a serving loop uses
paged caches instead.

Shape legend: B sequences, N query tokens a sequence, L keys a sequence, P blocks a sequence, S block_size,
H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.ops import attention

__all__ = ["attend_dense"]

_BLOCK_SIZE = 16


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, features: dict[str, Any]
) -> Tensor:
    """Attention of the last N positions over all L.

    Args:
        query: [B, H, N, D].
        key, value: [B, K, L, D].
        mask: bool [B, L], False where padded; None where nothing is. Padding may be anywhere.
        features: keyword arguments of the attention op.

    Returns:
        [B, N, H, D]; zeros at padded queries.
    """
    q_BNHD, k_BLKD, v_BLKD = (x.transpose(1, 2) for x in (query, key, value))
    if mask is None:
        return _attend_packed(q_BNHD.flatten(0, 1), k_BLKD, v_BLKD, None, None, features).view(q_BNHD.shape)
    _check_holes(mask, features["sliding_window"])
    order_BL = mask.int().argsort(dim=1, descending=True, stable=True)
    k_BLKD, v_BLKD = (x.take_along_dim(order_BL[..., None, None], dim=1) for x in (k_BLKD, v_BLKD))
    query_mask_BN = mask[:, -query.shape[2] :]
    out_BNHD = torch.zeros_like(q_BNHD, memory_format=torch.contiguous_format)
    out_BNHD[query_mask_BN] = _attend_packed(
        q_BNHD[query_mask_BN], k_BLKD, v_BLKD, query_mask_BN.sum(1), mask.sum(1), features
    )
    return out_BNHD


def _check_holes(mask_BL: Tensor, window: int | None) -> None:
    """A window counts positions, and padding between tokens is squeezed out."""
    if window is None:
        return
    begins_BL = mask_BL & ~torch.nn.functional.pad(mask_BL, (1, 0))[:, :-1]
    if bool((begins_BL.sum(1) > 1).any()):
        raise ValueError(
            f"padding between tokens together with a sliding window of {window} is not supported; pad on one "
            "side, or use attn_implementation='sdpa'"
        )


def _attend_packed(
    q_THD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, query_lens: Tensor | None, seq_lens: Tensor | None,
    features: dict[str, Any],
) -> Tensor:  # fmt: skip
    batch, length = k_BLKD.shape[:2]
    device = q_THD.device
    if query_lens is None or seq_lens is None:
        query_lens = torch.full((batch,), q_THD.shape[0] // batch, device=device)
        seq_lens = torch.full((batch,), length, device=device)
    kv_cache, block_table = _as_pages(k_BLKD, v_BLKD)
    query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    attention(
        q_THD, None, None, kv_cache, out_THD, query_start_loc, seq_lens.int(), block_table, **features
    )  # fmt: skip
    return out_THD


def _as_pages(k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, kv_heads, head_size = k_BLKD.shape
    pages = -(-length // _BLOCK_SIZE)
    cache = k_BLKD.new_zeros(batch * pages + 1, 2, _BLOCK_SIZE, kv_heads, head_size)
    for side, x_BLKD in enumerate((k_BLKD, v_BLKD)):
        padded = torch.nn.functional.pad(x_BLKD, (0, 0, 0, 0, 0, pages * _BLOCK_SIZE - length))
        cache[1:, side] = padded.reshape(batch * pages, _BLOCK_SIZE, kv_heads, head_size)
    table = torch.arange(1, batch * pages + 1, dtype=torch.int32, device=k_BLKD.device)
    return cache, table.view(batch, pages)
