"""Where attention's output is wanted of a few tokens alone, those alone are its queries.

Shape legend: T tokens, R tokens that are picked, S requests, H heads, D head size, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend import ops
from attnbackend.config import set_config
from attnbackend.fx_passes import PickRowsEarly
from attnbackend.fx_passes.cache_order import cache_history, check_cache_history

QUERY_LENS, CONTEXT_LENS = (3, 0, 2, 1), (9, 4, 2, 18)
T, S, H, D, E = sum(QUERY_LENS), len(QUERY_LENS), 2, 32, 8
STARTS = torch.tensor([0, 3, 3, 5, 6, 6], dtype=torch.int32)
LENS = torch.tensor([*CONTEXT_LENS, 0], dtype=torch.int32)
TABLE = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [0, 0]], dtype=torch.int32)
"""The last request is padding."""
PLACES = torch.tensor([16 + 6, 16 + 7, 16 + 8, 5 * 16, 5 * 16 + 1, 8 * 16 + 1])
WEIGHT = torch.randn(3 * H * D, E, generator=torch.Generator().manual_seed(9))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "chunks": {"attention_chunk_size": 4},
    "soft cap": {"logits_soft_cap": 0.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "sinks": {"sinks": torch.tensor([0.3, -1.0])},
}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def layer(x_1TE: Tensor, rows_R: Tensor, cache: Tensor, **options: Any) -> Tensor:
    """Projection, cache write, attention, and a product of each row."""
    q, k, v = (x.view(T, H, D) for x in F.linear(x_1TE, WEIGHT).chunk(3, -1))
    ops.kv_cache_update(k, v, cache, PLACES, kv_cache_dtype=options.get("kv_cache_dtype", "auto"))
    output = q.new_empty(q.shape)
    arguments = {"scale": 0.2, "group": 0} | options
    ops.attention(q * 2, k, v, cache, output, STARTS, LENS, TABLE, **arguments)
    return F.linear(output.view(1, T, -1), WEIGHT[:, :4].repeat(1, H * D // 4)).index_select(1, rows_R)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(9, 2, 16, H, D, generator=generator)
    return torch.randn(1, T, E, generator=generator), torch.tensor([5, 1, 2, 4]), cache.to(dtype)


def run(step: Any, tensors: tuple[Tensor, ...]) -> tuple[str, list[Any]]:
    """The pass's report and the calls after it; what is computed and written is as without it."""
    reports, calls = [], []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> object:
        before = cache_history(graph_module)
        reports.append(PickRowsEarly().run(graph_module))
        graph_module.graph.lint()
        check_cache_history("pick_rows_early", before, cache_history(graph_module))
        calls.extend(node for node in graph_module.graph.nodes if node.op.startswith("call_"))
        return graph_module

    plain = tuple(x.clone() for x in tensors)
    with torch.no_grad(), set_config(backend="TORCH_SDPA"):
        expected = step(*plain)
        actual = torch.compile(step, backend=backend, fullgraph=True)(*tensors)
    torch.testing.assert_close(actual, expected)
    for got, wanted in zip(tensors, plain, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    return str(reports[0]), calls


def attended(calls: list[Any]) -> Any:
    (call,) = [node for node in calls if node.target is torch.ops.attnbackend.attention.default]
    return call.kwargs.get("query", call.args[0] if call.args else None).meta["example_value"]


@pytest.mark.parametrize("name", FEATURES)
def test_picked_tokens_are_requests_of_their_own(name: str) -> None:
    def step(x: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
        return layer(x, rows, cache, **FEATURES[name])

    report, calls = run(step, inputs())
    assert "each picked token is a request" in report, report
    assert attended(calls).shape == (4, H, D)


LEFT = {
    "another reader": "reads all rows of output",
    "logarithms": "has lse",
    "bfloat16 over float8": "may read new keys before they were rounded",
    "all keys": "is no causal attention over a cache",
}


@pytest.mark.parametrize("name", LEFT)
def test_attention_stays_where_its_rows_are_wanted_or_are_not_of_one_token(name: str) -> None:
    lse = torch.empty(T, H)
    options: dict[str, dict[str, Any]] = {
        "logarithms": {"lse": lse},
        "bfloat16 over float8": {"kv_cache_dtype": "fp8"},
        "all keys": {"causal": False},
    }

    def step(x: Tensor, rows: Tensor, cache: Tensor) -> Any:
        return layer(x, rows, cache, **options.get(name, {}))

    def kept(x: Tensor, rows: Tensor, cache: Tensor) -> Any:
        output = x.new_zeros(T, H, D)
        q = F.linear(x, WEIGHT[: H * D]).view(T, H, D)
        ops.attention(q, None, None, cache, output, STARTS, LENS, TABLE, scale=0.2)
        return (output * 2).index_select(0, rows), output

    given = inputs(torch.float8_e4m3fn if name == "bfloat16 over float8" else torch.float32)
    report, calls = run(kept if name == "another reader" else step, given)
    assert LEFT[name] in report, report
    assert attended(calls).shape == (T, H, D)


@pytest.mark.parametrize("change", [lambda q: q[:1].mul_(2), lambda q: LENS.sub_(0)])
def test_what_attention_reads_is_not_read_before_a_write(change: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
        q = F.linear(x, WEIGHT[: H * D]).view(T, H, D)
        change(q)
        output = q.new_empty(q.shape)
        ops.attention(q, None, None, cache, output, STARTS, LENS, TABLE, scale=0.2)
        return F.silu(output).index_select(0, rows)

    report, calls = run(step, inputs())
    assert "writes what attention_default reads" in report
    assert attended(calls).shape == (T, H, D)


def test_tokens_of_no_request_may_be_picked() -> None:
    """Two more tokens than the requests have, whose output stays as it was before: zeros."""

    def step(x: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
        q = F.linear(x, WEIGHT[: H * D]).view(T + 2, H, D)
        output = q.new_zeros(q.shape)
        ops.attention(q, None, None, cache, output, STARTS, LENS, TABLE, scale=0.2)
        return F.silu(output).index_select(0, rows)

    x, _, cache = inputs()
    report, _ = run(step, (torch.cat([x, x[:, :2]], 1), torch.tensor([T + 1, 5, T, 0]), cache))
    assert "each picked token is a request" in report


def test_who_reads_a_cache_stays() -> None:
    def step(x: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
        q = F.linear(x, WEIGHT[: H * D]).view(T, H, D)
        output = q.new_empty(q.shape)
        ops.attention(q, None, None, cache, output, STARTS, LENS, TABLE, scale=0.2)
        return F.silu(output + cache[1, 0, :T]).index_select(0, rows)

    report, _ = run(step, inputs())
    assert "of silu -> of add (1 calls" in report
