"""Random programs over two caches, through any of our passes in any order: results and caches stay.

Shape legend: T tokens, H heads, D head size, C channels = H * D.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import attnbackend
from attnbackend import ops
from attnbackend.fx_passes import (
    FuseOutputQuantization,
    FuseRopeCacheWrite,
    GraphPass,
    MergeLinears,
    PassManager,
    PickRowsEarly,
    QuantizeQueries,
    RecogniseAttention,
    RemoveNoOps,
    SelectBackend,
    UndoFunctionalization,
)

T, H, D = 5, 2, 32
C = H * D
WEIGHT = torch.randn(C, C, generator=torch.Generator().manual_seed(5)) * 0.15
BATCH = tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5], [7, 2], [[1, 2], [3, 0]]))
SLOTS, ROWS = torch.tensor([20, 21, 22, 48, 49]), torch.tensor([4, 0, 0])
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def attend(q: Tensor, k: Tensor, cache: Tensor, buffer: Callable[[Tensor], Tensor]) -> Tensor:
    q, k = (x.view(T, H, D) for x in (q, k))
    ops.kv_cache_update(k, k * 0.5, cache, SLOTS)
    output = buffer(q)
    ops.attention(q, None, None, cache, output, *BATCH, scale=0.2)
    return output.view(T, C)


_STEPS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda a, b, cache: attend(a, b, cache, torch.empty_like),
    lambda a, b, cache: attend(a, b, cache, torch.zeros_like),
    lambda a, b, cache: attend(b, a, cache.view(cache.shape), lambda q: q.new_empty(q.shape)),
    lambda a, b, cache: attend(a, b, cache * 0.9, torch.empty_like),
    lambda a, b, cache: a + b,
    lambda a, b, cache: a.mul_(0.9) + 0,
    lambda a, b, cache: F.linear(a, WEIGHT) * F.linear(a, WEIGHT + 1).sigmoid(),
    lambda a, b, cache: b.copy_(a.clone() * 0.5),
    lambda a, b, cache: a.view(T, H, D).transpose(0, 1).transpose(0, 1).reshape(T, C),
    lambda a, b, cache: a[:],
    lambda a, b, cache: torch.cat([a[:2], b[2:]]),
    lambda a, b, cache: a + cache.mul_(0.99)[1, 0, :T].reshape(T, C),
    lambda a, b, cache: a + cache[1, 0, :T].reshape(T, C),
    lambda a, b, cache: a.chunk(2, -1)[0].repeat(1, 2) + a.chunk(2, -1)[1].repeat(1, 2),
]


def random_step(choose: random.Random) -> Callable[..., Any]:
    calls = [(choose.choice(_STEPS), choose.random(), choose.random(), choose.randrange(2)) for _ in range(9)]
    picks, returns_two = choose.random() < 0.6, choose.random() < 0.4

    def step(x: Tensor, *caches: Tensor) -> Any:
        values = [x * 1, x.sin()]
        for call, one, other, cache in calls:
            recent = values[-4:]
            values.append(
                call(recent[int(4 * one) % len(recent)], recent[int(4 * other) % len(recent)], caches[cache])
            )
        last = values[-1].index_select(0, ROWS) if picks else values[-1]
        return (last, values[-2]) if returns_two else last

    return step


def random_passes(choose: random.Random) -> Iterator[GraphPass]:
    yield from choose.sample(
        [
            SelectBackend("TORCH_SDPA"), RemoveNoOps(), MergeLinears(), PickRowsEarly(), FuseRopeCacheWrite(),
            RecogniseAttention(), UndoFunctionalization(), QuantizeQueries(),
            FuseOutputQuantization(in_kernel_only=False), RemoveNoOps(),
        ],
        k=8,
    )  # fmt: skip


def rewritten(manager: PassManager, graph_module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
    manager.run(graph_module)
    return graph_module.forward


@pytest.mark.parametrize("functionalised", [False, True], ids=["as_traced", "functionalised"])
@pytest.mark.parametrize("seed", range(5))
def test_random_programs_keep_their_meaning(seed: int, functionalised: bool) -> None:
    choose = random.Random(seed)
    step, run = random_step(choose), partial(rewritten, PassManager(list(random_passes(choose))))
    generator = torch.Generator().manual_seed(seed)
    shapes = [(T, C), *[(5, 2, 16, H, D)] * 2]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    wanted = [x.clone() for x in given]
    backend = aot_autograd(fw_compiler=run, keep_inference_input_mutations=True) if functionalised else run
    with torch.no_grad(), attnbackend.set_config(backend="TORCH_SDPA"):
        expected = step(*wanted)
        actual = torch.compile(step, backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(given, wanted)
