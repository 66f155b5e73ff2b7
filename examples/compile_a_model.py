"""A layer on the agnostic ops, compiled: the selected backend's ops end up in the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import attnbackend
from attnbackend.layers import Attention, BatchTensors, BoundLayer

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 2, 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        self.qkv = nn.Linear(256, sum(self.sizes), bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, 256, bias=False)
        self.attention = Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS)

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD_SIZE)) for t in self.qkv(x).split(self.sizes, dim=-1))
        return x + self.out(self.attention(q, k, v, batch).flatten(1))


def two_prompts() -> BatchTensors:
    """Prompts of 5 and 3 tokens, in blocks 2 and 7 of the cache; block 0 is reserved."""
    slots = torch.cat([2 * BLOCK_SIZE + torch.arange(5), 7 * BLOCK_SIZE + torch.arange(3)])
    return BatchTensors(
        slot_mapping=slots,
        query_start_loc=torch.tensor([0, 5, 8], dtype=torch.int32),
        seq_lens=torch.tensor([5, 3], dtype=torch.int32),
        block_table=torch.tensor([[2], [7]], dtype=torch.int32),
    )


def main() -> None:
    torch.manual_seed(0)
    layer = Layer().eval()
    layer.attention.bind(BoundLayer(torch.empty(8, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)))
    x, batch = torch.randn(8, 256), two_prompts()
    with torch.inference_mode():
        eager = layer(x, batch)
        plain = torch.compile(layer)(x, batch)
        compiled = attnbackend.compile(layer)
        torch.testing.assert_close(plain, eager)
        torch.testing.assert_close(compiled(x, batch), eager)
    print(compiled.attnbackend_compiler)


if __name__ == "__main__":
    main()
