"""Small models on the agnostic ops, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbackend import FullAttentionSpec, allocate_kv_cache, resolve_backend
from attnbackend.layers import Attention, BatchTensors, BoundLayer

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, BLOCK_SIZE, NUM_BLOCKS, WIDTH, MAX_REQS = (
    4,
    2,
    32,
    48,
    16,
    64,
    6,
    8,
)


class Layer(nn.Module):
    def __init__(self, **features: object) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.attention = Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS, **features)  # type: ignore[arg-type]

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        q, k, v = self.qkv(x).split(sizes, dim=-1)
        heads = [t.unflatten(-1, (-1, HEAD_SIZE)) for t in (q, k, v)]
        attended = self.attention(*heads, batch)
        return x + self.out(attended.flatten(1))


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2, **features: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**features) for _ in range(num_layers))

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


def make_stack(num_layers: int = 2, device: str = "cpu", **features: object) -> Stack:
    torch.manual_seed(0)
    stack = Stack(num_layers, **features).to(device).eval().requires_grad_(False)
    reset_caches(stack)
    return stack


def reset_caches(stack: Stack) -> None:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    for layer in stack.layers:
        device = layer.out.weight.device
        cache = allocate_kv_cache(resolve_backend("TORCH_SDPA"), spec, NUM_BLOCKS, device)
        layer.attention.bind(BoundLayer(cache.fill_(float("nan"))))


def caches(stack: Stack) -> list[Tensor]:
    return [layer.attention.kv_cache for layer in stack.layers]


def random_batch(
    seed: int, num_tokens: int | None = None, device: str = "cpu", mixed: bool = False
) -> tuple[Tensor, BatchTensors]:
    """A batch of whole prompts: random lengths, shuffled pages, padded rows.

    ``mixed``: decodes, chunks of longer prompts and whole prompts together, over caches that hold numbers.
    """
    g = torch.Generator().manual_seed(seed)
    num_reqs = int(torch.randint(1, MAX_REQS + 1, (), generator=g))
    lens = torch.randint(1, 12, (num_reqs,), generator=g)
    if num_tokens is not None:
        num_reqs, lens = 1, torch.tensor([num_tokens])
    contexts = torch.zeros_like(lens)
    if mixed:
        contexts = torch.randint(0, 60, (num_reqs,), generator=g) * torch.randint(
            0, 2, (num_reqs,), generator=g
        )
        lens = torch.where(torch.rand(num_reqs, generator=g) < 0.5, 1, lens)
    starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32)
    starts[1 : num_reqs + 1] = lens.cumsum(0)
    starts[num_reqs + 1 :] = starts[num_reqs]
    seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
    seq_lens[:num_reqs] = contexts + lens
    table = torch.zeros(MAX_REQS, WIDTH, dtype=torch.int32)
    pages = torch.randperm(NUM_BLOCKS - 1, generator=g)[: num_reqs * WIDTH] + 1
    table[:num_reqs] = pages.view(num_reqs, WIDTH)
    rows = zip(table, contexts.tolist(), lens.tolist(), strict=False)
    slots = torch.cat([_slots(row, context, length) for row, context, length in rows])
    x = torch.randn(int(lens.sum()), HIDDEN, generator=g)
    batch = BatchTensors(slots, starts, seq_lens, table)
    return x.to(device), BatchTensors(*(t.to(device) for t in batch))


def _slots(row: Tensor, first: int, length: int) -> Tensor:
    positions = torch.arange(first, first + length)
    return row[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
