"""Decoder layers of a Llama or Qwen3 in plain torch over attnbackend's attention, with random weights.

Shape legend: T tokens, H query heads, K key-value heads, D head size, N hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnbackend import FullAttentionSpec, allocate_kv_cache, resolve_backend
from attnbackend.layers import Attention, BatchTensors, BoundLayer

__all__ = ["LLAMA_8B", "TINY", "LlamaShape", "LlamaStack", "decode_step"]

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class LlamaShape:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    qk_norm: bool = False
    """Queries and keys are normalised head by head before they are rotated, as in Qwen3."""


LLAMA_8B = LlamaShape(4096, 14336, 32, 8, 128)
TINY = LlamaShape(64, 128, 4, 2, 32)


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_norm, self.post_norm = (nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2))
        q_size, kv_size = (heads * shape.head_size for heads in (shape.heads, shape.kv_heads))
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(shape.hidden, kv_size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(shape.head_size, eps=1e-6) for _ in range(2))
        self.attention = Attention(shape.heads, shape.head_size, num_kv_heads=shape.kv_heads)

    def forward(self, x_TN: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: BatchTensors) -> Tensor:
        normed_TN = self.input_norm(x_TN)
        q_THD, k_TKD, v_TKD = (
            project(normed_TN).unflatten(-1, (-1, self.shape.head_size))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.shape.qk_norm:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = (rotate(heads, cos_TD, sin_TD) for heads in (q_THD, k_TKD))
        x_TN = x_TN + self.o_proj(self.attention(q_THD, k_TKD, v_TKD, batch).flatten(1))
        normed_TN = self.post_norm(x_TN)
        return x_TN + self.down_proj(nn.functional.silu(self.gate_proj(normed_TN)) * self.up_proj(normed_TN))


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), halves paired as in Llama's checkpoints."""
    low, high = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin_TD.unsqueeze(1)


class LlamaStack(nn.Module):
    """Layers with random weights, without gradients, each with a cache of its own."""

    def __init__(
        self, shape: LlamaShape, num_layers: int, *, device: str, dtype: torch.dtype, num_blocks: int
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(device):
            self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.to(dtype).eval().requires_grad_(False)
        spec = FullAttentionSpec(
            block_size=_BLOCK_SIZE, num_kv_heads=shape.kv_heads, head_size=shape.head_size, dtype=dtype
        )
        for layer in self.layers:
            cache = allocate_kv_cache(resolve_backend("TORCH_SDPA"), spec, num_blocks, torch.device(device))
            layer.attention.bind(BoundLayer(cache.normal_()))

    def forward(self, x_TN: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: BatchTensors) -> Tensor:
        for layer in self.layers:
            x_TN = layer(x_TN, cos_TD, sin_TD, batch)
        return x_TN


def decode_step(
    shape: LlamaShape, batch: int, context: int, *, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, BatchTensors]:  # fmt: skip
    """Arguments of a step of ``batch`` requests of one new token each, after ``context`` others.

    They need ``batch * (context // 16 + 1) + 1`` blocks.
    """
    width = context // _BLOCK_SIZE + 1
    table = torch.arange(1, batch * width + 1, dtype=torch.int32, device=device).view(batch, width)
    slots = table[:, context // _BLOCK_SIZE].long() * _BLOCK_SIZE + context % _BLOCK_SIZE
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lens = torch.full((batch,), context + 1, dtype=torch.int32, device=device)
    angles_TD = torch.rand(batch, shape.head_size // 2, device=device).repeat(1, 2) * 6.28
    x_TN = torch.randn(batch, shape.hidden, device=device, dtype=dtype)
    return (
        x_TN,
        angles_TD.cos().to(dtype),
        angles_TD.sin().to(dtype),
        BatchTensors(slots, starts, lens, table),
    )
