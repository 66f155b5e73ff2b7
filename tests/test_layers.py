"""Layers of encoders, cross attention and shared caches in toy models, against plain torch.

Shape legend: T tokens, E encoder tokens, H query heads, K key-value heads, D head size, R requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_claims import require_features
from torch import Tensor, nn
from toy_models import BLOCK_SIZE, HEAD_SIZE, HEADS, KV_HEADS, random_batch

import attnbackend
from attnbackend import CrossAttentionSpec, FullAttentionSpec, allocate_kv_cache, resolve_backend, set_config
from attnbackend.layers import (
    Attention,
    BatchTensors,
    BoundLayer,
    CrossAttention,
    CrossTensors,
    EncoderAttention,
    EncoderTensors,
    bind_layers,
)
from attnbackend.selector import AttentionSelectorConfig

SPEC: dict[str, Any] = {
    "block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32
}  # fmt: skip
BACKENDS = ("TORCH_SDPA", "CPU_ATTN", "FLEX_ATTENTION")
LENGTHS = (5, 0, 17, 1)
ENCODER_LENGTHS = (3, 2, 21, 0)


def random_heads(tokens: int, heads: int, seed: int) -> Tensor:
    return torch.randn(tokens, heads, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def plain(
    q_NHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, visible_NL: Tensor, bias_HNL: Tensor | None = None
) -> Tensor:
    """Softmax written out in float64; zeros where a query sees no key."""
    k_LHD, v_LHD = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_LKD, v_LKD))
    s_HNL = torch.einsum("nhd,lhd->hnl", q_NHD.double(), k_LHD) * HEAD_SIZE**-0.5
    s_HNL = s_HNL if bias_HNL is None else s_HNL + bias_HNL
    p_HNL = s_HNL.masked_fill(~visible_NL, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnl,lhd->nhd", p_HNL, v_LHD).float()


def positions(n: int, length: int) -> tuple[Tensor, Tensor]:
    """Of queries [N, 1] and keys [L]; the queries are the last ones."""
    return torch.arange(length - n, length).unsqueeze(1), torch.arange(length)


def empty_cache(num_blocks: int = 16) -> Tensor:
    cache = allocate_kv_cache(resolve_backend("TORCH_SDPA"), FullAttentionSpec(**SPEC), num_blocks, "cpu")
    return cache.fill_(float("nan"))


def compiled(module: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return attnbackend.compile(module, backend=backend, compiler="aot_eager", fullgraph=True, dynamic=True)


def as_it_is(module: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return module


WAYS = {"eager": as_it_is, "compiled": compiled}

MASKS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "all": ({}, lambda p, j: (p >= 0) & (j >= 0)),
    "a window to both sides": ({"sliding_window": 4}, lambda p, j: (p - j).abs() < 4),
    "causal": ({"causal": True}, lambda p, j: j <= p),
    "causal with a window": ({"causal": True, "sliding_window": 4}, lambda p, j: (j <= p) & (j > p - 4)),
    "chunks": ({"attention_chunk_size": 3}, lambda p, j: p // 3 == j // 3),
}


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", MASKS)
def test_an_encoder_s_layer_equals_plain_attention(
    what: str, way: str, backend: str, attn_type: str, fresh_compiler: None
) -> None:
    features, sees = MASKS[what]
    own = {"causal": False} | features | {"attn_type": attn_type}
    require_features(backend, **own)
    layer = EncoderAttention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS, attn_type=attn_type, **features)
    starts, tokens = starts_of(LENGTHS), sum(LENGTHS) + 2
    query, key, value = (random_heads(tokens, n, seed) for seed, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    with set_config(backend=backend):
        output = WAYS[way](layer, backend)(query, key, value, EncoderTensors(starts, starts.diff()))
    expected = torch.zeros_like(query)
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        rows = slice(start, stop)
        expected[rows] = plain(
            query[rows], key[rows], value[rows], sees(*positions(stop - start, stop - start))
        )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_an_encoder_s_layer_takes_alibi_to_both_sides_and_rows_of_one_dimension() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    layer = EncoderAttention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS, alibi_slopes=slopes)
    query, key, value = (random_heads(7, n, seed) for seed, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    p, j = positions(7, 7)
    bias_HNL = -slopes.double().view(-1, 1, 1) * (p - j).abs()
    with set_config(backend="TORCH_SDPA"):
        output = layer(
            *(x.flatten(1) for x in (query, key, value)),
            EncoderTensors(starts_of((7,)), torch.tensor([7], dtype=torch.int32)),
        )
    expected = plain(query, key, value, torch.ones(7, 7, dtype=torch.bool), bias_HNL)
    torch.testing.assert_close(output, expected.flatten(1), rtol=1e-5, atol=1e-6)


class Decoder(nn.Module):
    """Cross attention that writes an encoder's keys where it is given any."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = CrossAttention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS)

    def forward(
        self, query: Tensor, batch: CrossTensors, encoded: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Tensor:
        if encoded is not None:
            self.cross.write(*encoded)
        return self.cross(query, batch)


def cross_batch() -> tuple[CrossTensors, Tensor]:
    """Blocks in no order, and the slots of the encoder's tokens."""
    table = torch.tensor([[7, 0], [2, 0], [9, 4], [0, 0]], dtype=torch.int32)
    lens = torch.tensor(ENCODER_LENGTHS, dtype=torch.int32)
    slots = [
        table[row, place // BLOCK_SIZE].item() * BLOCK_SIZE + place % BLOCK_SIZE
        for row, length in enumerate(ENCODER_LENGTHS) for place in range(length)
    ]  # fmt: skip
    return CrossTensors(starts_of(LENGTHS), lens, table), torch.tensor(slots)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_cross_attention_reads_what_was_written_once(way: str, backend: str, fresh_compiler: None) -> None:
    """Encoder lengths below, above and of zero, and a request without queries."""
    require_features(backend, attn_type="encoder_decoder", causal=False)
    decoder, (batch, slots) = Decoder(), cross_batch()
    decoder.cross.bind(BoundLayer(empty_cache()))
    key, value = (random_heads(len(slots), KV_HEADS, seed) for seed in (1, 2))
    run = WAYS[way](decoder, backend)
    for step in range(2):
        query = random_heads(sum(LENGTHS), HEADS, 10 + step)
        with set_config(backend=backend):
            output = run(query, batch, (key, value, slots) if step == 0 else None)
        torch.testing.assert_close(output, plain_cross(query, key, value, batch), rtol=1e-5, atol=1e-6)


def plain_cross(query: Tensor, key: Tensor, value: Tensor, batch: CrossTensors) -> Tensor:
    expected, starts, sources = torch.zeros_like(query), batch.query_start_loc, starts_of(ENCODER_LENGTHS)
    for row, (n, length) in enumerate(zip(LENGTHS, ENCODER_LENGTHS, strict=True)):
        rows = slice(int(starts[row]), int(starts[row]) + n)
        keys = slice(int(sources[row]), int(sources[row]) + length)
        everything = torch.ones(n, length, dtype=torch.bool)
        expected[rows] = plain(query[rows], key[keys], value[keys], everything)
    return expected


class Sharing(nn.Module):
    """Two layers with caches of their own; the third reads the first's, and the fourth the third's."""

    def __init__(self) -> None:
        super().__init__()
        targets = (None, None, "layers.0", "layers.2")
        self.layers = nn.ModuleList(
            Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS, kv_sharing_target=target) for target in targets
        )

    def forward(self, query: Tensor, pairs: list[tuple[Tensor, Tensor]], batch: BatchTensors) -> list[Tensor]:
        own: list[Any] = [*pairs, (None, None), (None, None)]
        return [layer(query, *pair, batch) for layer, pair in zip(self.layers, own, strict=True)]


def named_layers(model: Sharing) -> dict[str, Attention]:
    return {f"layers.{i}": layer for i, layer in enumerate(model.layers)}  # type: ignore[misc]


@pytest.mark.parametrize("way", WAYS)
def test_layers_read_the_cache_of_the_one_at_the_end_of_their_chain(way: str, fresh_compiler: None) -> None:
    model = Sharing()
    caches = {name: empty_cache(64) for name in ("layers.0", "layers.1")}
    specs = dict.fromkeys(named_layers(model), FullAttentionSpec(**SPEC))
    bind_layers(named_layers(model), {name: BoundLayer(cache) for name, cache in caches.items()}, specs)
    assert model.layers[3].kv_cache is caches["layers.0"]
    _, batch = random_batch(3)
    tokens = len(batch.slot_mapping)
    pairs = [tuple(random_heads(tokens, KV_HEADS, 10 * layer + i) for i in (1, 2)) for layer in (0, 1)]
    query = random_heads(tokens, HEADS, 0)
    with set_config(backend="TORCH_SDPA"):
        first, second, third, fourth = WAYS[way](model, "TORCH_SDPA")(query, pairs, batch)
    assert torch.equal(first, third)
    assert torch.equal(first, fourth)
    assert not torch.allclose(first, second)
    assert first.isfinite().all()


SHARING_FAULTS: dict[str, tuple[dict[str, str | None], dict[str, Any], str]] = {
    "a circle": ({"a": "b", "b": "a"}, {}, r"share caches in a circle: a -> b -> a"),
    "an unknown layer": ({"a": "z"}, {}, r"unknown layer 'z' in the chain a -> z"),
    "a layer that runs later": ({"a": "b", "b": None}, {}, r"'a' shares the cache of 'b', which runs after"),
    "another spec": (
        {"a": None, "b": "a"}, {"b": CrossAttentionSpec(**SPEC)}, r"layer 'b' cannot share the cache of 'a'",
    ),
    "no cache": ({"a": None, "c": None}, {}, r"there is no cache for layer 'c'; caches: \['a', 'b'\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARING_FAULTS)
def test_sharing_that_cannot_be_is_refused(what: str) -> None:
    targets, changed, message = SHARING_FAULTS[what]
    layers = {name: Attention(HEADS, HEAD_SIZE, kv_sharing_target=target) for name, target in targets.items()}
    specs = dict.fromkeys(layers, FullAttentionSpec(**SPEC)) | changed
    owned = {name: BoundLayer(empty_cache(2)) for name in ("a", "b")}
    with pytest.raises(ValueError, match=message):
        bind_layers(layers, owned, specs)


@pytest.mark.parametrize("target", [None, "layers.0"])
def test_keys_are_given_where_a_layer_writes_a_cache_and_nowhere_else(target: str | None) -> None:
    layer = Attention(HEADS, HEAD_SIZE, kv_sharing_target=target)
    layer.bind(BoundLayer(empty_cache(64)))
    _, batch = random_batch(3)
    query = random_heads(len(batch.slot_mapping), HEADS, 0)
    given = None if target is None else query
    with pytest.raises(ValueError, match=rf"writes_cache={target is None}; a layer with a cache of its own"):
        layer(query, given, given, batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_chunks_and_ranges_in_a_decoder_s_layer(way: str, backend: str, fresh_compiler: None) -> None:
    features = {"attention_chunk_size": 5, "has_bidirectional_ranges": True}
    require_features(backend, **features)
    layer = Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS, attention_chunk_size=5)
    layer.bind(BoundLayer(empty_cache(4)))
    query, key, value = (random_heads(17, n, seed) for seed, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    table, slots = (
        torch.tensor([[3, 1]], dtype=torch.int32),
        torch.cat([torch.arange(48, 64), torch.tensor([16])]),
    )
    batch = BatchTensors(slots, starts_of((17,)), torch.tensor([17], dtype=torch.int32), table)
    ranges = torch.tensor([[[3, 8], [0, 0]]], dtype=torch.int32)
    with set_config(backend=backend):
        output = WAYS[way](layer, backend)(query, key, value, batch, ranges)
    p, j = positions(17, 17)
    visible_NL = ((j <= p) & (j // 5 == p // 5)) | ((p >= 3) & (p < 8) & (j >= 3) & (j < 8))
    torch.testing.assert_close(output, plain(query, key, value, visible_NL), rtol=1e-5, atol=1e-6)


FAULTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a window and chunks": (
        lambda: Attention(4, 32, sliding_window=4, attention_chunk_size=8), ValueError,
        r"sliding_window=4 and attention_chunk_size=8 are both given",
    ),
    "an encoder with a cache": (
        lambda: EncoderAttention(4, 32, attn_type="decoder"), ValueError, r"'decoder' keeps a cache",
    ),
    "heads that do not divide": (
        lambda: CrossAttention(4, 32, num_kv_heads=3), ValueError,
        r"num_heads=4 is not a multiple of num_kv_heads=3",
    ),
    "no cache": (
        lambda: CrossAttention(4, 32)(torch.zeros(1, 4, 32), cross_batch()[0]), RuntimeError,
        r"this CrossAttention layer has no cache; call bind",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_layers_say_what_is_wrong(what: str) -> None:
    make, kind, message = FAULTS[what]
    with pytest.raises(kind, match=message):
        make()


class TwoParts(nn.Module):
    """An encoder's layer, a decoder's, and the cross attention between them."""

    def __init__(self, chunk: int | None = 5) -> None:
        super().__init__()
        heads = {"num_heads": HEADS, "head_size": HEAD_SIZE, "num_kv_heads": KV_HEADS}
        self.encoder = EncoderAttention(**heads, attn_type="encoder")
        self.decoder = Attention(**heads, attention_chunk_size=chunk)
        self.cross = CrossAttention(**heads)
        self.decoder.bind(BoundLayer(empty_cache(64)))
        self.cross.bind(BoundLayer(empty_cache()))

    def forward(
        self, source: tuple[Tensor, Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor], slots: Tensor,
        rows: EncoderTensors, batch: BatchTensors, cross: CrossTensors,
    ) -> Tensor:  # fmt: skip
        encoded = self.encoder(*source, rows)
        self.cross.write(encoded[:, :KV_HEADS], source[2], slots)
        return self.cross(self.decoder(*target, batch), cross)


def two_parts_inputs() -> tuple[Any, ...]:
    cross, slots = cross_batch()
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    source = tuple(random_heads(len(slots), n, 20 + i) for i, n in enumerate(sizes))
    target = tuple(random_heads(sum(LENGTHS), n, 30 + i) for i, n in enumerate(sizes))
    table = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.int32)
    places = [(row, i) for row, n in enumerate(LENGTHS) for i in range(n)]
    own = torch.tensor([int(table[r, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for r, i in places])
    starts = starts_of(LENGTHS)
    rows = EncoderTensors(starts_of(ENCODER_LENGTHS), torch.tensor(ENCODER_LENGTHS, dtype=torch.int32))
    return source, target, slots, rows, BatchTensors(own, starts, starts.diff(), table), cross


def test_each_kind_of_attention_in_a_graph_is_selected_for_what_it_asks(fresh_compiler: None) -> None:
    asked: list[AttentionSelectorConfig] = []

    def choose(config: AttentionSelectorConfig) -> str:
        asked.append(config)
        return "TORCH_SDPA"

    model, inputs = TwoParts(), two_parts_inputs()
    with set_config(backend="TORCH_SDPA"):
        expected = model(*inputs)
    compiled_model: Any = attnbackend.compile(model, backend=choose, compiler="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled_model(*inputs), expected, rtol=1e-6, atol=1e-6)
    assert [(str(c.attn_type), c.causal, c.attention_chunk_size) for c in asked] == [
        ("encoder", False, None), ("decoder", True, 5), ("encoder_decoder", False, None)
    ]  # fmt: skip
    (report,) = compiled_model.attnbackend_compiler.reports
    assert [change.after for change in report.changes] == ["attnbackend::torch_sdpa_forward"] * 3


def test_a_cache_write_follows_the_cross_attention_that_reads_it(fresh_compiler: None) -> None:
    """CPU_ATTN has a writer of its own: only the cache that its attention reads is written by it."""
    require_features("CPU_ATTN")
    model, inputs = TwoParts(chunk=None), two_parts_inputs()
    with set_config(backend="TORCH_SDPA"):
        expected = model(*inputs)
    compiled_model: Any = attnbackend.compile(
        model, compiler="aot_eager", fullgraph=True,
        backend=lambda asked: "CPU_ATTN" if asked.attn_type == "decoder" else "TORCH_SDPA",
    )  # fmt: skip
    torch.testing.assert_close(compiled_model(*inputs), expected, rtol=1e-5, atol=1e-5)
    (report,) = compiled_model.attnbackend_compiler.reports
    assert sorted(change.after.removeprefix("attnbackend::") for change in report.changes) == [
        "cpu_attn_forward", "cpu_attn_kv_cache_update", "torch_sdpa_forward", "torch_sdpa_forward"
    ]  # fmt: skip
