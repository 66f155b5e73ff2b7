"""Steps of a model with rotations: what the fusion of rotation and cache write is tried on.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnbackend
from attnbackend import ops
from attnbackend.fx_passes import FuseRopeCacheWrite, GraphPass, SelectBackend
from attnbackend.layers import BatchTensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, H, K, D = 5, 4, 2, 32


def turn(x: Tensor) -> Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def turn_chunks(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    return x_THD * cos_TD[:, None] + turn(x_THD) * sin_TD[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: BatchTensors, like_query: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    ops.kv_cache_update(k, v, cache, batch.slot_mapping)
    out = torch.empty_like(q) if like_query else q.new_empty(q.shape)
    ops.attention(
        q, k, v, cache, out, batch.query_start_loc, batch.seq_lens, batch.block_table, scale=0.2, **options
    )
    return out


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, BatchTensors], Any]


def step_arguments() -> tuple[Any, ...]:
    """Two requests, of three tokens and of one; the last token is padding."""
    torch.manual_seed(1)
    q, k, v = torch.randn(T, H, D), torch.randn(T, K, D), torch.randn(T, K, D)
    angles = torch.rand(T, D) * 6
    starts, lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    slots = torch.tensor([16, 17, 18, 48, -1])
    cache = torch.zeros(4, 2, 16, K, D)
    batch = BatchTensors(*(x.to(DEVICE) for x in (slots, starts, lens, table)))
    return (*(x.to(DEVICE) for x in (q, k, v, angles.cos(), angles.sin(), cache)), batch)


def run(step: Step, passes: list[GraphPass] | None = None) -> tuple[Any, Tensor, str]:
    """Result, cache and report, with passes or eagerly."""
    given = step_arguments()
    if passes is None:
        return step(*given), given[5], ""
    compiled: Any = attnbackend.compile(step, passes=passes, compiler="aot_eager", fullgraph=True)
    return (
        compiled(*given),
        given[5],
        str(compiled.attnbackend_compiler.reports[2 if len(passes) > 2 else -1]),
    )


def check(step: Step, *, fused: bool) -> str:
    """With the pass and without: same results, same cache. Returns the pass's report."""
    expected, expected_cache, _ = run(step)
    actual, cache, report = run(step, [SelectBackend("TORCH_SDPA"), FuseRopeCacheWrite()])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-6)
    assert bool(cache.any())
    assert ("1 changes" in report) == fused, report
    return report


def plain(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, batch)


def model_layout(q, k, v, cos, sin, cache, batch, like_query=False):  # type: ignore[no-untyped-def]
    """Requests, heads, tokens, elements, as transformers has it."""
    q4, k4, v4 = (x[None].transpose(1, 2) for x in (q, k, v))
    cos4, sin4 = cos[None].unsqueeze(1), sin[None].unsqueeze(1)
    q4, k4 = (sin4 * turn_chunks(x) + x * cos4 for x in (q4, k4))
    return attend(*(x[0].transpose(0, 1) for x in (q4, k4, v4)), cache, batch, like_query)


def norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norms(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    weight = cos[0].abs() + 0.5
    q, k = norm_by_hand(q, weight), torch.nn.functional.rms_norm(k, (D,), weight, 1e-6)
    return attend(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, batch)


def attend_late(q, k, v, cos, sin, cache, batch, change):  # type: ignore[no-untyped-def]
    """Queries are rotated once the keys are in the cache, and something is changed."""
    ops.kv_cache_update(rotate(k, cos, sin), v, cache, batch.slot_mapping)
    change()
    q = rotate(q, cos, sin)
    out = q.new_empty(q.shape)
    ops.attention(q, None, None, cache, out, *batch[1:], scale=0.2)
    return out


def rotated_late(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend_late(q, k, v, cos, sin, cache, batch, lambda: v.mul_(2))
