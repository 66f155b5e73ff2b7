"""`FLEX_ATTENTION`: block masks against dense masks, the compiled form, its shapes, and what is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from op_cases import BATCHES, DEVICE, FEATURES, case, forward_op, require
from torch import Tensor

import attnbackend
from attnbackend import AttentionSelectorConfig, CommonAttentionMetadata, set_forward_context
from attnbackend._torch_compat import compiler_backend
from attnbackend.backends import flex_attention
from attnbackend.forward_context import ForwardContext
from attnbackend.impl import AttentionParams
from attnbackend.kernels.flex import Packing, Span, TileSizes, Visibility, forms, pack, tile_sizes
from attnbackend.kv_cache import spec_of
from attnbackend.selector import backend_reasons
from attnbackend.testing import (
    AttentionCase,
    assert_attention_within_rule,
    make_batch,
    op_kwargs,
    op_positional,
)
from attnbackend.types import AttentionCGSupport

NAME = "FLEX_ATTENTION"

KINDS: dict[str, dict[str, Any]] = {
    "chunks": {"attention_chunk_size": 8},
    "chunks_and_sinks": {"attention_chunk_size": 16, "use_sinks": True},
    "ranges": {"bidirectional_ranges": (((3, 9), (20, 41)), ((0, 5),), ((2, 4),), ((25, 30), (31, 37)), ())},
    "ranges_under_a_window": {
        "bidirectional_ranges": (((3, 41),), ((1, 4),), (), ((5, 30),), ((0, 1),)),
        "sliding_window": 4,
        "use_alibi": True,
    },
    "ranges_that_overlap_in_chunks": {
        "bidirectional_ranges": (((30, 38), (36, 41)), ((0, 3), (2, 5)), (), ((4, 25), (20, 36)), ()),
        "attention_chunk_size": 6,
    },
    "alibi_on_both_sides": {"causal": False, "use_alibi": True},
}
CROSS: dict[str, dict[str, Any]] = {
    "cross": {"query_lens": (3, 9, 1, 0), "context_lens": (30, -4, 12, 5)},
    "cross_without_keys": {"query_lens": (3, 2), "context_lens": (30, -2)},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "not_causal": {"causal": False},
    "causal": {},
    "two_sided_window": {"causal": False, "sliding_window": 3},
    "two_sided_alibi": {"causal": False, "use_alibi": True, "use_sinks": True},
    "chunks": {"causal": False, "attention_chunk_size": 5},
}


def kind_cases() -> dict[str, AttentionCase]:
    mixed = BATCHES["mixed"]
    cases = {name: AttentionCase(**{**mixed, **changes}) for name, changes in KINDS.items()}
    for name, changes in CROSS.items():
        cases[name] = AttentionCase(attn_type="encoder_decoder", causal=False, **changes)
    lengths = {"query_lens": (5, 0, 17, 4, 1), "context_lens": (0, 0, 0, -4, 0), "num_padded_tokens": 2}
    for name, changes in ENCODERS.items():
        cases[f"encoder_{name}"] = AttentionCase(**{**lengths, **changes}, attn_type="encoder")
    return cases


def run(attention_case: AttentionCase) -> None:
    require(NAME, attention_case.dtype)
    batch = make_batch(attention_case, DEVICE)
    forward_op(NAME)(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.parametrize("name", kind_cases())
def test_each_kind_of_attention_equals_float64(name: str) -> None:
    run(kind_cases()[name])


# --- Block masks ------------------------------------------------------------------------------------------


def dense_mask(spans: list[Span], rules: Visibility, ranges: Tensor | None) -> dict[tuple[int, int], Tensor]:
    """(row, token) -> which of the row's keys the token sees, by the definition, key by key."""
    seen: dict[tuple[int, int], Tensor] = {}
    for span in spans:
        for i in range(span.length):
            p, j = span.seq_len - span.length + i, torch.arange(span.seq_len)
            visible = j <= p if rules.causal else torch.ones_like(j, dtype=torch.bool)
            if rules.window is not None:
                visible &= j > p - rules.window
                if rules.two_sided:
                    visible &= j < p + rules.window
            if rules.chunk is not None:
                visible &= j // rules.chunk == p // rules.chunk
            for start, end in [] if ranges is None else ranges[span.row].tolist():
                if start <= p < end:
                    visible |= (j >= start) & (j < end)
            seen[span.row, span.start + i] = visible
    return seen


def random_spans(draw: random.Random, own_keys: bool) -> list[Span]:
    spans, start = [], 0
    for row in range(draw.randint(1, 6)):
        length = draw.choice([1, 1, 2, 3, 7, 8, 9, 16, 17, 40])
        seq_len = length if own_keys else draw.choice([0, length, length + draw.randint(0, 60), length // 2])
        spans.append(Span(row, start, start + length, seq_len))
        start += length
    return spans


def random_rules(draw: random.Random) -> Visibility:
    causal, own_keys = draw.random() < 0.6, draw.random() < 0.3
    limit = draw.choice(["none", "none", "window", "chunk"])
    return Visibility(
        causal=causal,
        window=draw.choice([1, 2, 5, 8, 33]) if limit == "window" else None,
        two_sided=own_keys and not causal,
        chunk=draw.choice([1, 3, 8, 20]) if limit == "chunk" else None,
    )


def random_ranges(draw: random.Random, spans: list[Span]) -> Tensor:
    ranges = torch.zeros(len(spans), 3, 2, dtype=torch.int32)
    for span in spans:
        for g in range(draw.randint(0, 3)):
            start = draw.randint(0, max(0, span.seq_len - 1))
            ranges[span.row, g] = torch.tensor([start, start + draw.randint(0, 30)])
    return ranges


def packed(spans: list[Span], rules: Visibility, sizes: TileSizes, ranges: Tensor | None) -> Packing:
    width = max(1, -(-max(span.seq_len for span in spans) // 4))
    table = torch.arange(1, 1 + len(spans) * width, dtype=torch.int32).view(len(spans), width)
    return pack(
        spans, rules, sizes, block_table=table, block_size=4, device=torch.device("cpu"),
        all_keys=ranges is not None,
    )  # fmt: skip


def tiles_of(count: Tensor, indices: Tensor, query_tile: int) -> list[int]:
    return indices[0, 0, query_tile, : int(count[0, 0, query_tile])].tolist()


@pytest.mark.parametrize("sizes", [(8, 8), (4, 16), (1, 1)], ids=["8_by_8", "4_by_16", "untiled"])
@pytest.mark.parametrize("seed", range(60))
def test_a_block_mask_is_the_dense_mask(seed: int, sizes: tuple[int, int]) -> None:
    draw = random.Random(seed)
    rules = random_rules(draw)
    spans = random_spans(draw, rules.two_sided)
    ranges = random_ranges(draw, spans) if rules.causal and draw.random() < 0.5 else None
    packing = packed(spans, rules, TileSizes(*sizes, 2, 2), ranges)
    first, stop = packing.interval(ranges)
    key_of_row = {int(r): n for n, r in enumerate(_key_ids(packing, spans)) if r >= 0}
    listed = _visible_by_lists(packing, first, stop)
    for (row, token), visible in dense_mask(spans, rules, ranges).items():
        if spans[row].seq_len == 0:
            assert token in packing.empty.tolist()
            continue
        expected = {key_of_row[row * 1000 + j] for j in visible.nonzero().flatten().tolist()}
        place = int(packing.place_T[token])
        assert int(packing.token_M[place]) == token
        assert {*range(int(first[place]), int(stop[place]))} == expected, "the interval"
        assert listed[place] == expected, "the tile lists"


def _key_ids(packing: Packing, spans: list[Span]) -> list[int]:
    """row * 1000 + position of each packed key, -1 for padding, read back from what is gathered."""
    width = max(1, -(-max(span.seq_len for span in spans) // 4))
    ids = torch.full((1 + len(spans) * width, 4, 1, 1), -1.0)
    for span in spans:
        slots = torch.arange(span.seq_len)
        ids[1 + span.row * width + slots // 4, slots % 4, 0, 0] = span.row * 1000.0 + slots
    ids = ids.where(ids >= 0, torch.nan) + 1
    gathered = packing.keys.gather(ids, None, torch.float32).flatten()
    assert not gathered.isnan().any(), "a slot that holds no key was read"
    return (gathered - 1).int().tolist()


def _visible_by_lists(packing: Packing, first: Tensor, stop: Tensor) -> list[set[int]]:
    """What a kernel that reads listed tiles only lets each packed query row see."""
    lists, size = packing.lists, packing.sizes
    seen: list[set[int]] = []
    for place in range(len(first)):
        tile = place // size.queries
        assert lists.partial.stride() == lists.full.stride(), "torch's kernel takes both by the first's"
        partial = tiles_of(lists.partial_count, lists.partial, tile)
        full = tiles_of(lists.full_count, lists.full, tile)
        assert len({*partial, *full}) == len(partial) + len(full), "a tile is listed twice"
        keys = {t * size.keys + k for t in partial for k in range(size.keys)}
        keys = {n for n in keys if first[place] <= n < stop[place]}
        seen.append(keys | {t * size.keys + k for t in full for k in range(size.keys)})
    return seen


def test_full_tiles_are_told_from_partial_ones() -> None:
    packing = packed([Span(0, 0, 8, 40)], Visibility(causal=True), TileSizes(8, 8), None)
    assert tiles_of(packing.lists.full_count, packing.lists.full, 0) == [0, 1, 2, 3]
    assert tiles_of(packing.lists.partial_count, packing.lists.partial, 0) == [4]


def test_keys_before_the_window_are_not_packed() -> None:
    packing = packed([Span(0, 0, 2, 1000)], Visibility(causal=True, window=10), TileSizes(8, 8), None)
    assert packing.spans[0].keys == slice(0, 11)
    assert len(packing.keys.source[0]) == 16


@pytest.mark.parametrize("rules", [Visibility(causal=True), Visibility(causal=True, window=64)], ids=str)
def test_the_builder_holds_no_mask_of_tokens_by_keys(rules: Visibility) -> None:
    """8192 new tokens after 8192: a dense mask has 134 million entries, the lists a few thousand."""
    table = torch.arange(1024, dtype=torch.int32)[None]
    device = torch.device("cpu")
    with _LargestTensor() as largest:
        packing = pack(
            [Span(0, 0, 8192, 16384)], rules, tile_sizes(8192), block_table=table, block_size=16,
            device=device,
        )  # fmt: skip
    assert largest.numel <= 8 * 16384
    assert packing.lists.full.numel() <= 64 * 128


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any op in the block gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


# --- The compiled form ------------------------------------------------------------------------------------


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Graphs of the compiled form, which serves on a CPU here too: there torch's own ops run them."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward if DEVICE == "cpu" else compiler_backend("inductor", None)(graph, inputs)

    monkeypatch.setattr(flex_attention, "compiles", lambda device_type: True)
    monkeypatch.setattr(forms, "COMPILER", collect)
    return graphs


COMPILED = [
    "plain", "window", "soft_cap", "alibi", "sinks", "window_cap_and_sinks", "not_causal_window",
    "fp8_per_head_scales", "group_of_three", "hnd_layers_interleaved", "strided_tensors", "head_size_80",
]  # fmt: skip


on_cpus = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the compiled form runs in every other test")


@on_cpus
@pytest.mark.parametrize("feature", COMPILED)
def test_the_compiled_form_equals_float64(feature: str, compiled_graphs: list[torch.fx.GraphModule]) -> None:
    run(case(feature))
    assert len(compiled_graphs) == 1


@on_cpus
@pytest.mark.parametrize("name", kind_cases())
def test_the_compiled_form_equals_float64_for_each_kind(
    name: str, compiled_graphs: list[torch.fx.GraphModule]
) -> None:
    run(kind_cases()[name])


@on_cpus
@pytest.mark.parametrize("batch", BATCHES)
def test_the_compiled_form_equals_float64_for_each_batch(
    batch: str, compiled_graphs: list[torch.fx.GraphModule]
) -> None:
    run(case("window_cap_and_sinks", batch))


def random_case(draw: random.Random, longest: int) -> AttentionCase:
    queries = [draw.randint(1, longest) for _ in range(draw.randint(1, 12))]
    contexts = [draw.choice([0, 3, 130, 260, 515]) for _ in queries]
    return AttentionCase(query_lens=tuple(queries), context_lens=tuple(contexts), head_size=32)


def test_batches_of_any_size_run_the_same_code(compiled_graphs: list[torch.fx.GraphModule]) -> None:
    draw = random.Random(0)
    for longest, graphs in ((1, 1), (16, 1), (150, 2), (1, 2), (150, 2)):
        for _ in range(6):
            run(random_case(draw, longest))
        assert len(compiled_graphs) == graphs, "one for short queries, one for long ones"


def test_layers_of_other_features_are_compiled_apart(compiled_graphs: list[torch.fx.GraphModule]) -> None:
    for feature in ("plain", "window", "not_causal", "soft_cap", "alibi", "scale", "plain", "alibi"):
        run(case(feature))
    assert len(compiled_graphs) == 4, "windows and causality are data; cap, alibi and scale are code"


def test_nothing_of_a_batch_is_a_constant_of_the_code(compiled_graphs: list[torch.fx.GraphModule]) -> None:
    run(case("alibi"))
    code = compiled_graphs[0].print_readable(print_output=False)
    (call,) = [line for line in code.splitlines() if "higher_order.flex_attention(" in line]
    assert "0.125" in call, "the scale is a constant"
    shapes = next(line for line in code.splitlines() if "def forward" in line)
    assert "f32[s" in shapes
    assert not [n for n in (" 128*16", "i32[128]", "i32[256]") if n in shapes]


@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 128, 192, 248, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("longest", [1, 500])
def test_programs_divide_the_tiles_and_fit_shared_memory(
    longest: int, dtype: torch.dtype, head_size: int
) -> None:
    sizes = tile_sizes(longest)
    params = AttentionParams(
        num_heads=4, num_kv_heads=2, head_size=head_size, dtype=dtype, kv_cache_dtype="auto", block_size=16,
        device_type="cuda", scale=1.0,
    )  # fmt: skip
    options = forms.kernel_options(forms.FormKey.of(params, sizes, has_alibi=False))
    assert sizes.queries % options["BLOCK_M"] == 0
    assert sizes.keys % options["BLOCK_N"] == 0
    row = (1 << (head_size - 1).bit_length()) * dtype.itemsize
    used = row * (options["BLOCK_M"] + 2 * options["num_stages"] * options["BLOCK_N"])
    assert used <= 163 * 1024, "an A100's"


# --- What is refused, and what is not seen ----------------------------------------------------------------


def attend(**changes: Any) -> Tensor:
    batch = make_batch(case("no_lse"), DEVICE)
    names = (
        "query", "key", "value", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table",
    )  # fmt: skip
    arguments: dict[str, Any] = dict(zip(names, op_positional(batch), strict=True))
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    forward_op(NAME)(**arguments, **op_kwargs(batch))
    return batch.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": lambda s: s + 1}, r"query_start_loc\[0\] is 1; expected 0"),
        ({"query_start_loc": lambda s: s * 9}, r"query_start_loc\[\d\] is \d+; .*at most 24"),
        ({"query_start_loc": lambda s: s.flip(0) - s[-1] + 0 * s}, r"query_start_loc\[\d\] is -\d+"),
        ({"seq_lens": lambda n: n + 1000}, r"seq_lens\[0\] is 1041; expected 0 to 64"),
        ({"seq_lens": lambda n: n - 1000}, r"seq_lens\[0\] is -959; expected 0 to 64"),
    ],
    ids=["not from 0", "past the tokens", "decreasing", "longer than the table", "negative"],
)
def test_lengths_that_cannot_be_are_refused_with_their_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_an_encoders_row_has_as_many_keys_as_tokens() -> None:
    batch = make_batch(kind_cases()["encoder_causal"], DEVICE)
    batch.seq_lens[0] += 1
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 6; expected 5, the row's tokens, or 0"):
        forward_op(NAME)(*op_positional(batch), **op_kwargs(batch))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("head_size", 20, r"head_size=20 \(allowed: multiples of 8 from 32 to 256\)"),
        ("head_size", 512, r"head_size=512"),
        ("dtype", torch.float64, r"dtype=float64"),
        ("device_type", "xpu", r"device_type=xpu"),
    ],
)
def test_what_is_not_claimed_is_refused(field: str, value: Any, reason: str) -> None:
    base = {"device_type": "cpu", "head_size": 64, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32}
    reasons = backend_reasons(NAME, AttentionSelectorConfig.dense(**{**base, field: value}))
    assert any(re.search(reason, str(r)) for r in reasons), reasons


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("batch", ["mixed", "decode", "padded", "graph_padding_requests"])
def test_slots_that_hold_no_key_do_not_matter(batch: str, poison: float) -> None:
    require(NAME)
    b = make_batch(case("plain", batch), DEVICE)
    b.kv_cache.copy_(torch.where(b.kv_cache.isnan(), poison, b.kv_cache))
    forward_op(NAME)(*op_positional(b), **op_kwargs(b))
    assert_attention_within_rule(b)


def test_no_cuda_graph_holds_it() -> None:
    builder = flex_attention.FlexAttentionMetadataBuilder
    assert builder.cudagraph_support is AttentionCGSupport.NEVER


def test_a_plan_made_beforehand_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ranges, which no builder sees, too: their layout is made once and kept in the plan."""
    b = make_batch(kind_cases()["ranges_under_a_window"], DEVICE)
    c = b.case
    params = AttentionParams(
        num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_size=c.head_size, dtype=c.dtype,
        kv_cache_dtype="auto", block_size=c.block_size, device_type=DEVICE, scale=c.softmax_scale,
        sliding_window=c.sliding_window,
    )  # fmt: skip
    builder = flex_attention.FlexAttentionMetadataBuilder(params, spec_of(params), None, b.query.device)
    common = CommonAttentionMetadata.from_tensors(
        b.query_start_loc, b.seq_lens, b.block_table, num_tokens=len(b.query), block_size=c.block_size
    )
    plan, packs = builder.build(0, common), []
    original = flex_attention.pack
    monkeypatch.setattr(flex_attention, "pack", lambda *a, **k: packs.append(k) or original(*a, **k))
    with set_forward_context(ForwardContext(plans={(0, NAME): plan})):
        for ranges, made in ((None, 0), (b.bidirectional_ranges, 1), (b.bidirectional_ranges, 1)):
            kwargs = op_kwargs(b) | {"bidirectional_ranges": ranges}
            forward_op(NAME)(*op_positional(b), **kwargs, group=0)
            assert len(packs) == made
    assert_attention_within_rule(b)


def test_the_class_says_which_form_runs() -> None:
    text = flex_attention.FlexAttentionBackend.__doc__ or ""
    assert "compiled" in text
    assert "math" in text
    assert set(FEATURES) > set(COMPILED)
    assert attnbackend.resolve_backend(NAME) is flex_attention.FlexAttentionBackend
