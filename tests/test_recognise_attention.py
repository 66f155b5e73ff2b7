"""Attention in a model's own words becomes the agnostic op; what the op cannot do is left alone.

Shape legend: B requests, H query heads, K key-value heads, N query tokens, L keys, D head size.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnbackend
from attnbackend._torch_compat import mark_dynamic
from attnbackend.fx_passes import GraphPass, PagedState, PassManager, RecogniseAttention, SelectBackend
from attnbackend.layers import BatchTensors

H, K, D = 4, 2, 32
pytestmark = pytest.mark.usefixtures("fresh_compiler")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tensors(
    batch: int = 2, queries: int = 6, keys: int = 6, kv_heads: int = H, seed: int = 0
) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = ((batch, H, queries, D), (batch, kv_heads, keys, D), (batch, kv_heads, keys, D))
    return [torch.randn(shape) for shape in shapes]


def check(function: Attention, given: list[Tensor], *, recognised: bool, dynamic: bool = False) -> str:
    """Compiled with the pass and eagerly: the same. Returns the pass's report."""
    expected = function(*given)
    passes: list[GraphPass] = [RecogniseAttention(), SelectBackend("CPU_ATTN")]
    compiled: Any = attnbackend.compile(
        function, passes=passes, compiler="aot_eager", fullgraph=True, dynamic=dynamic
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), expected, rtol=1e-5, atol=1e-5)
    report, selected = compiled.attnbackend_compiler.reports
    assert len(report.changes) == int(recognised), str(report)
    assert len(selected.changes) == int(recognised)
    return str(report)


def repeat_kv(x: Tensor, n: int = H // K) -> Tensor:
    b, k, length, d = x.shape
    return x[:, :, None, :, :].expand(b, k, n, length, d).reshape(b, k * n, length, d)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def grouped_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), None, 0.0, True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.2
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def by_hand_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) / math.sqrt(D)).softmax(dim=-1) @ v


def by_hand_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    hidden = torch.triu(torch.ones(length, length), diagonal=1).bool()
    logits = (q * D**-0.5) @ repeat_kv(k).transpose(-1, -2)
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), -1) @ repeat_kv(v)


def by_hand_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)) * 0.5
    logits = torch.tanh(logits / 2.0) * 2.0
    return torch.matmul(F.softmax(logits, dim=-1), v)


FORMS: dict[str, tuple[Attention, dict[str, int]]] = {
    "sdpa": (sdpa, {}),
    "sdpa, cross": (sdpa, {"keys": 9}),
    "sdpa, causal": (causal_sdpa, {}),
    "sdpa, grouped": (grouped_sdpa, {"kv_heads": K}),
    "sdpa, repeated heads": (repeated_sdpa, {"kv_heads": K}),
    "by hand": (by_hand, {}),
    "by hand, cross": (by_hand, {"queries": 1}),
    "by hand, divided": (by_hand_divided, {}),
    "by hand, causal, repeated heads": (by_hand_causal, {"kv_heads": K}),
    "by hand, soft cap": (by_hand_capped, {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_become_the_op(name: str) -> None:
    function, sizes = FORMS[name]
    check(function, tensors(**sizes), recognised=True)


def test_sizes_stay_open() -> None:
    """One graph for any batch and length."""

    def itself(x: Tensor) -> Tensor:
        return causal_sdpa(x, x + 1, x * 2)

    compiled: Any = attnbackend.compile(
        itself, passes=[RecogniseAttention()], compiler="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (5, 30)):
            x, _, _ = tensors(batch, length, length)
            mark_dynamic(x, (0, 2))
            torch.testing.assert_close(compiled(x), itself(x), rtol=1e-5, atol=1e-5)
    compiler = compiled.attnbackend_compiler
    assert sum(len(report.changes) for report in compiler.reports) == compiler.num_graphs <= 2, str(compiler)


def test_repeated_heads_are_read_once() -> None:
    """The op gets the heads before they were repeated."""
    seen: list[tuple[int, ...]] = []

    class Look(GraphPass):
        name = "look"

        def run(self, graph_module: torch.fx.GraphModule) -> Any:
            caches = [n.args[3] for n in graph_module.graph.nodes if "cpu_attn_forward" in str(n.target)]
            seen.extend(tuple(c.meta["example_value"].shape) for c in caches)
            return attnbackend.fx_passes.PassReport("look")

    compiled = attnbackend.compile(
        repeated_sdpa, passes=[RecogniseAttention(), SelectBackend("CPU_ATTN"), Look()], compiler="aot_eager"
    )
    compiled(*tensors(kv_heads=K))
    assert [shape[3] for shape in seen] == [K]


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q[0, 0, :, :1] > k[0, 0, :, 0])


def causal_from_the_top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query i sees keys up to i, whatever comes after: torch's meaning of is_causal, not the op's."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).softmax(2) @ v


def minimum_instead_of_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.triu(torch.ones(6, 6), diagonal=1).bool()
    return (q @ k.transpose(2, 3)).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1) @ v


def another_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.triu(torch.ones(6, 6), diagonal=2).bool()
    return (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def one_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of one element, which hides nothing."""
    hidden = torch.triu(torch.ones(1, 1), diagonal=1).bool()
    return (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def keys_of_one_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:1].transpose(2, 3)).softmax(-1) @ v[:1]


def whole_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).to(torch.int32).to(torch.float32).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3) + q[..., :1]).softmax(-1) @ v


def two_caps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.transpose(2, 3) / 3.0) * 2.0).softmax(-1) @ v


def untransposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(1, 3).transpose(1, 2).transpose(1, 3)[:, :, :, :6].contiguous()[..., :6]).softmax(
        -1
    ) @ v


def heads_repeated_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head h reads key-value head h % K, where the op reads h // (H / K): as many heads, other ones."""
    k, v = (x.repeat(1, H // K, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.transpose(2, 3)
    logits.masked_fill_(torch.triu(torch.ones(6, 6), diagonal=1).bool(), float("-inf"))
    return logits.softmax(-1) @ v


def mask_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.triu(torch.ones(6, 6), diagonal=1).bool()
    hidden[3:, 1] = True
    return (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def weights_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(2, 3)).softmax(-1)
    torch.mul(weights, 0.5, out=weights)
    return weights @ v


def source_of_repeated_keys_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k + 0
    wide = repeat_kv(k)
    k.zero_()
    return F.scaled_dot_product_attention(q, wide, repeat_kv(v))


def far_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=-0.5)


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.div(q @ k.transpose(2, 3), 5.0, rounding_mode="floor").softmax(-1) @ v


LEFT: dict[Attention, tuple[dict[str, int], str]] = {
    masked: ({}, "a tensor, whose contents are not known"),
    causal_from_the_top_left: ({"keys": 9}, "causal from the top left over 6 queries and 9 keys"),
    softmax_over_queries: ({}, "softmax over dimension 2"),
    minimum_instead_of_infinity: ({}, "-inf is wanted"),
    another_diagonal: ({}, "a mask whose contents are not known"),
    one_for_all: ({}, "a mask whose contents are not known"),
    keys_of_one_row: ({}, "are not one for one, or not 2 rows"),
    whole_numbers: ({}, "is to where a product"),
    biased: ({}, "is add where a product"),
    masked_in_place: ({}, "masked_fill_ writes in place"),
    mask_written: ({}, "setitem writes in place"),
    weights_written: ({}, "writes in place"),
    source_of_repeated_keys_written: ({"kv_heads": K}, "zero_ writes in place"),
    far_keys_first: ({}, "its scale is -0.5, and the ops take one above 0"),
    rounded: ({}, "div where a product"),
    two_caps: ({}, "caps by 2.0 what was divided by 3.0"),
}


@pytest.mark.parametrize("function", LEFT)
def test_forms_that_are_left_alone_with_the_reason(function: Attention) -> None:
    sizes, reason = LEFT[function]
    report = check(function, tensors(**sizes), recognised=False)
    assert re.search(re.escape(reason), report), report


def through_float8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).softmax(-1).to(torch.float8_e4m3fn).to(q.dtype) @ v


def test_what_is_no_candidate_keeps_its_meaning() -> None:
    check(through_float8, tensors(), recognised=False)


def viewed_as_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only rows that follow each other in memory are viewed so."""
    return F.scaled_dot_product_attention(q, k, v).view(q.shape[0], -1)


def products_by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = torch.transpose(input=k, dim0=2, dim1=3)
    logits = torch.mul(input=torch.matmul(input=q, other=turned), other=0.5)
    return torch.matmul(input=torch.softmax(input=logits, dim=-1), other=v)


def scaled_by_a_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query=q, key=k, value=v, scale=q.shape[2] / 10)


@pytest.mark.parametrize("function", [viewed_as_one, products_by_name, scaled_by_a_size, sdpa])
def test_results_lie_in_memory_as_they_did(function: Attention) -> None:
    check(function, given := tensors(), recognised=True)
    passes = [RecogniseAttention(), SelectBackend("CPU_ATTN")]
    compiled: Any = attnbackend.compile(function, passes=passes, compiler="aot_eager")
    plain: Any = torch.compile(function, backend="aot_eager")
    assert compiled(*given).stride() == plain(*given).stride()


def test_a_scale_that_each_graph_has_its_own_is_left_alone() -> None:
    given = tensors()
    for x in given:
        mark_dynamic(x, (2,))
    assert "is no number" in check(scaled_by_a_size, given, recognised=False, dynamic=True)


def test_types_that_no_backend_takes_are_left_alone() -> None:
    given = [x.double() for x in tensors()]
    assert "no attention backend can serve" in check(sdpa, given, recognised=False)


def test_heads_that_change_places_are_not_taken_for_repeated_ones() -> None:
    order = torch.tensor([1, 0])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, order, None].expand(2, K, H // K, 6, D).reshape(2, H, 6, D) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    check(function, tensors(kv_heads=K), recognised=True)


def test_a_reshape_that_repeats_no_heads_is_kept() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(2, K, 3, 4, D).reshape(2, H, 6, D) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    check(function, tensors(keys=4, kv_heads=K), recognised=True)


def test_heads_repeated_in_turn_keep_their_meaning() -> None:
    """The repetition stays in the graph; the op gets all heads."""
    check(heads_repeated_in_turn, tensors(kv_heads=K), recognised=True)


def test_a_cap_of_zero_is_not_taken_for_none() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = 0.0 * torch.tanh(q @ k.transpose(2, 3) / 0.0)
        return scores.softmax(-1) @ v

    assert "caps by 0.0" in check(capped, [x.abs() for x in tensors()], recognised=False)


def test_training_is_left_alone() -> None:
    given = [x.requires_grad_() for x in tensors()]
    compiled: Any = attnbackend.compile(sdpa, passes=[RecogniseAttention()], compiler="aot_eager")
    compiled(*given).sum().backward()
    assert given[0].grad is not None
    assert "its inputs require grad" in str(compiled.attnbackend_compiler)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, scale=0.25)


def flex_biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, m, n: score + (m - n))


def flex_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=CAUSAL)


CAUSAL = create_block_mask(lambda b, h, m, n: m >= n, None, None, 6, 6, device="cpu")


@pytest.mark.parametrize(
    ("function", "reason"),
    [(flex, ""), (flex_biased, "its score_mod changes the score"), (flex_masked, "it has a block mask")],
)
def test_flex_attention(function: Attention, reason: str) -> None:
    assert reason in check(function, tensors(), recognised=not reason)


@pytest.mark.parametrize("decompose", [False, True])
def test_an_exported_program_is_recognised(decompose: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_sdpa(q, k, v) + by_hand_divided(q, k, v)

    given = tuple(tensors())
    program = torch.export.export(Model(), given)
    reports = PassManager([RecogniseAttention(), SelectBackend("CPU_ATTN")]).run_on(program)
    assert len(reports[0].changes) == 2, str(reports[0])
    if decompose:
        program = program.run_decompositions()
    torch.testing.assert_close(program.module()(*given), Model()(*given), rtol=1e-5, atol=1e-5)


class TwoLayers(torch.nn.Module):
    """A decoder that knows nothing of caches: each layer attends causally to the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(48, (H + 2 * K) * D) for _ in range(2))
        self.outs = torch.nn.ModuleList(torch.nn.Linear(H * D, 48) for _ in range(2))
        self.requires_grad_(False)

    def layer(self, x: Tensor, i: int) -> Tensor:
        heads = self.projections[i](x).unflatten(-1, (-1, D)).transpose(1, 2)
        q, k, v = heads.split([H, K, K], dim=1)
        attended = F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)
        return x + self.outs[i](attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x, 0), 1)


def paged_state() -> PagedState:
    slots = torch.full((64,), -1)
    starts, lens = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    caches = tuple(torch.full((6, 2, 16, K, D), float("nan")) for _ in range(2))
    return PagedState(BatchTensors(slots, starts, lens, table), caches)


def place(state: PagedState, context: int, length: int) -> None:
    positions = torch.arange(context, context + length)
    state.batch.slot_mapping[:length] = (
        state.batch.block_table[0][positions // 16].long() * 16 + positions % 16
    )
    state.batch.query_start_loc[1] = length
    state.batch.seq_lens[0] = context + length


def test_a_model_without_a_cache_gets_one() -> None:
    """The prompt in two steps, then token by token: what the model gives for the whole at once."""
    model, state = TwoLayers(), paged_state()
    passes: list[GraphPass] = [RecogniseAttention(state), SelectBackend("CPU_ATTN")]
    compiled: Any = attnbackend.compile(
        model, passes=passes, compiler="aot_eager", fullgraph=True, dynamic=True
    )
    x = torch.randn(1, 40, 48)
    expected, got, start = model(x), [], 0
    for length in (9, 20, *[1] * 11):
        place(state, start, length)
        got.append(compiled(x[:, start : start + length]))
        start += length
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-5, atol=1e-5)
    compiler = compiled.attnbackend_compiler
    assert [len(report.changes) for report in compiler.reports] == [2, 4] * compiler.num_graphs


def test_layers_of_two_graphs_do_not_share_a_cache() -> None:
    class Broken(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x, 0)
            torch._dynamo.graph_break()
            return self.layer(x, 1)

    model = Broken()
    step = attnbackend.compile(model, passes=[RecogniseAttention(paged_state())], compiler="aot_eager")
    with pytest.raises(Exception, match="kept in the same caches; compile the model in one graph"):
        step(torch.randn(1, 9, 48))


@pytest.mark.parametrize(
    ("function", "given", "reason"),
    [
        (sdpa, tensors(1), "causal=False attention"),
        (causal_sdpa, tensors(2), "attention of 2 rows"),
        (causal_sdpa, tensors(1), "its keys 4 heads of 32"),
    ],
)
def test_what_no_page_can_hold_is_left_alone(function: Attention, given: list[Tensor], reason: str) -> None:
    compiled: Any = attnbackend.compile(
        function, passes=[RecogniseAttention(paged_state())], compiler="aot_eager"
    )
    torch.testing.assert_close(compiled(*given), function(*given))
    assert reason in str(compiled.attnbackend_compiler)


@pytest.mark.parametrize("seed", range(12))
def test_random_spellings_keep_their_meaning(seed: int) -> None:
    choose = random.Random(seed)
    causal, grouped, capped, divided, early, last = (choose.random() < 0.5 for _ in range(6))
    fault = choose.choice([None, None, "bias", "power"])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x) if grouped else x for x in (k, v))
        q = q * 0.5 if early else q
        logits = q @ (k.transpose(-1, -2) if last else k.transpose(2, 3))
        logits = logits / 4.0 if divided else logits * 0.3
        if capped:
            logits = 5.0 * torch.tanh(logits / 5.0)
        if fault == "bias":
            logits = logits + 0.1 * k[..., 0].unsqueeze(-2)
        if causal:
            hidden = torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1)
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = F.softmax(logits, -1)
        return (weights**2 if fault == "power" else weights) @ v

    check(function, tensors(kv_heads=K if grouped else H), recognised=fault is None)
