"""`layers.MLAAttention`: right in both forms, eager, compiled and exported; clear about what it lacks.

Shape legend: T tokens, E hidden size, H heads, L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim,
V v_head_dim, J keys of a request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnbackend
from attnbackend import MLADims, set_config
from attnbackend.layers import BatchTensors, BoundLayer, DecodeTensors, MLAAttention

HIDDEN, HEADS, BLOCK = 48, 4, 16
DIMS = MLADims(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20)
CONTEXTS = (20, 0, 35)
QUERIES = {"mixed": (1, 7, 3), "decode": (1, 1, 1)}


def make_layer(q_lora_rank: int | None = 24, *, interleaved: bool = True) -> MLAAttention:
    torch.manual_seed(3)
    layer = MLAAttention(HIDDEN, HEADS, DIMS, q_lora_rank=q_lora_rank, interleaved=interleaved, bias=True)
    layer = layer.requires_grad_(False).eval()
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, std=0.3, mean=1.0 if "norm" in name else 0.0)
    row = DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
    layer.bind(BoundLayer(torch.full((16, BLOCK, row), torch.nan)))
    return layer


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    half = DIMS.qk_rope_head_dim // 2
    turns = positions[:, None] * 0.7 ** torch.arange(1, half + 1)
    return turns.cos(), turns.sin()


class Batch:
    """Requests with their context in the cache; tokens of a request follow each other."""

    def __init__(self, kind: str) -> None:
        self.queries = QUERIES[kind]
        g = torch.Generator().manual_seed(1)
        self.hidden = [
            torch.randn(context + new, HIDDEN, generator=g)
            for context, new in zip(CONTEXTS, self.queries, strict=True)
        ]
        self.table = (torch.randperm(15, generator=g)[:9] + 1).view(3, 3).int()
        lens = torch.tensor([len(h) for h in self.hidden], dtype=torch.int32)
        starts = torch.tensor([0, *self.queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.cls = DecodeTensors if kind == "decode" else BatchTensors
        self.new = self._step(self.queries, starts, lens, self.cls)

    def _step(self, counts: tuple[int, ...], starts: Tensor, lens: Tensor, cls: type[BatchTensors]) -> Any:
        hidden, positions, slots = [], [], []
        for row, (count, length) in enumerate(zip(counts, lens.tolist(), strict=True)):
            at = torch.arange(length - count, length)
            hidden.append(self.hidden[row][at])
            positions.append(at)
            slots.append(self.table[row][at // BLOCK].long() * BLOCK + at % BLOCK)
        batch = cls(torch.cat(slots), starts, lens, self.table)
        return torch.cat(hidden), *angles(torch.cat(positions)), batch

    def fill(self, layer: MLAAttention) -> None:
        """Runs the contexts as prompts."""
        starts = torch.tensor([0, *CONTEXTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        layer(*self._step(CONTEXTS, starts, torch.tensor(CONTEXTS, dtype=torch.int32), BatchTensors))


def reference(layer: MLAAttention, batch: Batch) -> Tensor:
    """[T, H * V] in float64, head by head, from whole sequences."""
    wide = copy.deepcopy(layer).double()
    outputs = []
    for hidden, new in zip(batch.hidden, batch.queries, strict=True):
        h_JE = hidden.double()
        row = wide.kv_a_proj_with_mqa(h_JE)
        c_JL = _norm(row[:, : DIMS.kv_lora_rank], wide.kv_a_layernorm.weight)
        k_JR = _turn(row[:, DIMS.kv_lora_rank :], layer.interleaved)
        q_JHD = _queries(wide, h_JE).view(len(h_JE), HEADS, -1)
        nope = DIMS.qk_nope_head_dim
        both_JHN = (c_JL @ wide.kv_b_proj.weight.t()).view(len(h_JE), HEADS, -1)
        own = []
        for head in range(HEADS):
            q_JR = _turn(q_JHD[:, head, nope:], layer.interleaved)
            scores = q_JHD[:, head, :nope] @ both_JHN[:, head, :nope].t() + q_JR @ k_JR.t()
            seen = torch.ones_like(scores, dtype=torch.bool).tril()
            weights = (scores * layer.scale).masked_fill(~seen, -torch.inf).softmax(-1)
            own.append(weights @ both_JHN[:, head, nope:])
        outputs.append(torch.cat(own, -1)[len(h_JE) - new :])
    return torch.cat(outputs)


def _queries(layer: MLAAttention, h_JE: Tensor) -> Tensor:
    if hasattr(layer, "q_proj"):
        return layer.q_proj(h_JE)
    return layer.q_b_proj(_norm(layer.q_a_proj(h_JE), layer.q_a_layernorm.weight))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turn(x_JR: Tensor, interleaved: bool) -> Tensor:
    """By complex numbers."""
    cos, sin = angles(torch.arange(len(x_JR)))
    half = x_JR.shape[1] // 2
    pairs = x_JR.unflatten(1, (half, 2)) if interleaved else x_JR.unflatten(1, (2, half)).transpose(1, 2)
    return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)).flatten(1)


Way = Callable[..., Any]


def _compiled(layer: MLAAttention, batch: Batch) -> Way:
    return attnbackend.compile(layer, compiler="aot_eager", fullgraph=True, dynamic=True)


def _exported(layer: MLAAttention, batch: Batch) -> Way:
    tokens = torch.export.Dim("tokens", min=2, max=64)
    of_tokens = {0: tokens}
    dynamic = (of_tokens, of_tokens, of_tokens, batch.cls(of_tokens, {}, {}, {}))
    return torch.export.export(layer, batch.new, dynamic_shapes=dynamic).module()


WAYS: dict[str, Callable[[MLAAttention, Batch], Way]] = {
    "eager": lambda layer, batch: layer, "compiled": _compiled, "exported": _exported,
}  # fmt: skip


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize(("q_lora_rank", "interleaved"), [(24, True), (None, True), (24, False)])
@pytest.mark.parametrize("way", WAYS)
def test_the_layer_is_right(
    way: str, q_lora_rank: int | None, interleaved: bool, kind: str, fresh_compiler: None
) -> None:
    layer, batch = make_layer(q_lora_rank, interleaved=interleaved), Batch(kind)
    with torch.no_grad(), set_config(mla_context_tokens=16):
        batch.fill(layer)
        run = WAYS[way](layer, batch)
        output = run(*batch.new)
    torch.testing.assert_close(output.double(), reference(layer, batch), rtol=2e-5, atol=2e-6)


def test_the_decode_form_is_right_for_any_batch() -> None:
    layer, batch = make_layer(), Batch("mixed")
    batch.fill(layer)
    *inputs, step = batch.new
    output = layer(*inputs, DecodeTensors(*step))
    torch.testing.assert_close(output.double(), reference(layer, batch), rtol=2e-5, atol=2e-6)


def test_selected_tokens_that_are_all_tokens_change_nothing() -> None:
    layer, batch = make_layer(), Batch("mixed")
    batch.fill(layer)
    every = torch.arange(64, dtype=torch.int32).expand(sum(batch.queries), -1).contiguous()
    output = layer(*batch.new, every)
    torch.testing.assert_close(output.double(), reference(layer, batch), rtol=2e-5, atol=2e-6)
    few = layer(*batch.new, every[:, :5].contiguous())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(few.double(), reference(layer, batch), rtol=2e-5, atol=2e-6)


def test_the_products_around_forward_mqa_are_nodes_of_the_graph(fresh_compiler: None) -> None:
    layer, batch = make_layer(), Batch("decode")
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(layer, backend=keep, fullgraph=True)(*batch.new)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    names = [name for name in calls if "bmm" in name or "mla_attention" in name]
    assert len(names) == 3
    assert "mla_attention" in names[1]


class Quantized(nn.Module):
    """A linear layer of 8-bit integers and a scale a row."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", weight.abs().amax(1) / 127)
        self.register_buffer("rows", (weight / self.scale[:, None]).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.rows * self.scale[:, None]).to(x.dtype).t()


def test_a_quantised_projection_is_dequantised_when_the_layer_is_bound() -> None:
    layer, batch = make_layer(), Batch("decode")
    parts = {name: part for name, part in layer.named_children() if name != "kv_b_proj"}
    quantized = Quantized(layer.kv_b_proj.weight)
    own = MLAAttention.from_projections(
        parts | {"kv_b_proj": quantized}, HEADS, DIMS, scale=layer.scale
    )  # fmt: skip
    layer.kv_b_proj.weight.copy_(quantized.rows * quantized.scale[:, None])
    for each in (layer, own):
        each.bind(BoundLayer(torch.full((16, BLOCK, 48), torch.nan)))
        batch.fill(each)
    torch.testing.assert_close(own(*batch.new), layer(*batch.new), rtol=1e-6, atol=1e-6)


def test_a_quantised_projection_is_dequantised_in_the_model_s_type_whatever_its_scales_are() -> None:
    layer = make_layer().bfloat16()
    parts = dict(layer.named_children())
    parts["kv_b_proj"] = Quantized(parts["kv_b_proj"].weight.float())
    own = MLAAttention.from_projections(parts, HEADS, DIMS, scale=layer.scale)
    own.split_kv_b()
    assert own.kv_b_weight.dtype is torch.bfloat16
    # Half a step of the quantised weights, and their rounding to bfloat16.
    torch.testing.assert_close(own.kv_b_weight, layer.kv_b_weight, rtol=0.0, atol=0.02)


def test_the_split_weight_is_the_projection_s_own_memory() -> None:
    layer = make_layer()
    assert layer.kv_b_weight.data_ptr() == layer.kv_b_proj.weight.data_ptr()
    assert not [name for name in layer.state_dict() if "dequantized" in name or "kv_cache" in name]


def _with_bias() -> None:
    layer = make_layer()
    layer.kv_b_proj = nn.Linear(32, HEADS * 44)
    layer.bind(BoundLayer(torch.zeros(2, BLOCK, 48)))


def _with_hidden_bias() -> None:
    class Biased(Quantized):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    layer = make_layer()
    layer.kv_b_proj = Biased(layer.kv_b_proj.weight)
    layer.split_kv_b()


def _of_sizes(**changes: int) -> None:
    parts = dict(make_layer().named_children())
    MLAAttention.from_projections(parts, HEADS, replace(DIMS, **changes), scale=1.0).split_kv_b()


def _turned_by(tokens: int, half: int) -> Tensor:
    layer, batch = make_layer(), Batch("decode")
    hidden, _, _, where = batch.new
    return layer(hidden, torch.ones(tokens, half), torch.zeros(tokens, half), where)


FAULTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no cache": (
        lambda: MLAAttention(HIDDEN, HEADS, DIMS)(*Batch("decode").new), RuntimeError,
        r"this MLAAttention layer has no cache; call bind",
    ),
    "a bias of kv_b_proj": (_with_bias, ValueError, "kv_b_proj has a bias"),
    "a bias of a quantised kv_b_proj": (_with_hidden_bias, ValueError, "kv_b_proj has a bias"),
    "narrower values than the weight's": (
        lambda: _of_sizes(v_head_dim=10), ValueError,
        r"the weight of kv_b_proj is \(176, 32\); expected \(4 \* 34, 32\)",
    ),
    "narrower keys than the weight's": (
        lambda: _of_sizes(qk_nope_head_dim=20), ValueError, r"q_b_proj gives 160 elements; expected .* = 144",
    ),
    "another rank than the weight's": (
        lambda: _of_sizes(kv_lora_rank=16), ValueError, "kv_a_proj_with_mqa gives 48 elements; .* = 32, for",
    ),
    "an odd number of rotated elements": (
        lambda: _of_sizes(qk_rope_head_dim=15), ValueError, "qk_rope_head_dim is 15; expected an even",
    ),
    "no heads": (
        lambda: MLAAttention(HIDDEN, 0, DIMS), ValueError, "num_heads is 0; expected a whole number above 0",
    ),
    "no latent": (
        lambda: MLAAttention(HIDDEN, HEADS, replace(DIMS, kv_lora_rank=0)), ValueError, "kv_lora_rank is 0",
    ),
    "a batch of sequences": (
        lambda: make_layer()(torch.zeros(1, 3, HIDDEN), *Batch("decode").new[1:]), ValueError,
        r"shape of hidden_states is \(1, 3, 48\); expected \(tokens, hidden_size\)",
    ),
    "angles of one token": (
        lambda: _turned_by(1, 8), ValueError, r"shape of cos is \(1, 8\); expected \(3, 8\)",
    ),
    "angles of both halves": (
        lambda: _turned_by(3, 16), ValueError, r"shape of cos is \(3, 16\); expected \(3, 8\)",
    ),
    "sizes left open": (
        lambda: MLAAttention(HIDDEN, HEADS, MLADims(kv_lora_rank=32, qk_rope_head_dim=16)), ValueError,
        "lacks qk_nope_head_dim or v_head_dim",
    ),
    "a projection that is missing": (
        lambda: MLAAttention.from_projections({"q_proj": nn.Identity()}, HEADS, DIMS, scale=1.0), ValueError,
        r"projections lack kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj; given: q_proj",
    ),
    "a cache of another width": (
        lambda: _bound_to(torch.zeros(2, BLOCK, 64)), ValueError,
        r"shape of kv_cache is \(2, 16, 64\); expected \(num_blocks, block_size, 48\)",
    ),
}  # fmt: skip


def _bound_to(cache: Tensor) -> Tensor:
    layer = make_layer()
    layer.bind(BoundLayer(cache))
    return layer(*Batch("decode").new)


@pytest.mark.parametrize("what", FAULTS)
def test_the_layer_says_what_is_wrong(what: str) -> None:
    make, kind, message = FAULTS[what]
    with pytest.raises(kind, match=message), torch.no_grad():
        make()


def test_gradients_are_refused_with_the_remedy() -> None:
    layer = make_layer().requires_grad_()
    with pytest.raises(RuntimeError, match=r"no backward.*torch.inference_mode"):
        partial(layer, *Batch("decode").new)()
