"""Between a head's own space and the latent one: products with the weight that `kv_b_proj` holds.

``kv_b_weight`` is [H, P + V, L]: its first P rows of a head are W_UK, which makes a key of a latent, the
others W_UV, which makes a value. As score = query . (W_UK c) = (query W_UK) . c, a query can be moved to the
latent space once in place of every key to its head (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

Shape legend: T tokens, S keys, H heads, L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["absorb", "expand", "up_project"]


def absorb(query_nope_THP: Tensor, kv_b_weight: Tensor) -> Tensor:
    """Queries in the latent space, [T, H, L]."""
    w_uk_HPL = kv_b_weight[:, : query_nope_THP.shape[-1]]
    return torch.bmm(query_nope_THP.transpose(0, 1), w_uk_HPL).transpose(0, 1)


def up_project(latent_THL: Tensor, kv_b_weight: Tensor, v_head_dim: int) -> Tensor:
    """Attention in the latent space as values of heads, [T, H, V]."""
    w_uv_HVL = kv_b_weight[:, kv_b_weight.shape[1] - v_head_dim :]
    return torch.bmm(latent_THL.transpose(0, 1), w_uv_HVL.transpose(1, 2)).transpose(0, 1)


def expand(kv_c_SL: Tensor, k_pe_SR: Tensor, kv_b_weight: Tensor, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [S, H, P + R] and values [S, H, V] of latents and rotated keys; values are a view."""
    heads, rows, rank = kv_b_weight.shape
    both_SHN = (kv_c_SL @ kv_b_weight.reshape(-1, rank).t()).view(-1, heads, rows)
    k_nope, value = both_SHN.split((rows - v_head_dim, v_head_dim), dim=-1)
    k_pe = k_pe_SR.unsqueeze(1).expand(-1, heads, -1)
    return torch.cat([k_nope, k_pe], -1), value
