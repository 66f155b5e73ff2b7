"""TRITON_ATTN in CUDA graphs: a graph captured on one batch gives, on others, what eager gives.

The plan of a step only chooses a kernel, so its choice is tested without a GPU as well.

Legend: T tokens, R rows, H query heads, Hk kv heads, D head size, B blocks, S block size, W table
width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from op_cases import DEVICE, forward_op, require, update_op

from attnbackend import AttentionCGSupport, CommonAttentionMetadata, resolve_backend
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import resolve_kv_cache_dtype, spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.testing import assert_within_rule, plain_torch_attention, reference_attention

BACKEND = "TRITON_ATTN"
HEADS, KV_HEADS, SIZE, PAGE = 8, 2, 64, 16
NAN, GARBAGE_BLOCK = float("nan"), 2**30
RESULTS = ("output", "lse", "kv_cache")


# --- persistent buffers and what a step writes in them -----------------------------------


@dataclass(frozen=True)
class Graph:
    """What a graph is captured for: its largest batch, and the bound of its query lengths."""

    rows: int
    tokens: int
    max_query_len: int
    width: int = 64
    """Pages of the longest sequence: 1024 keys, enough for decode to split them."""


@dataclass(frozen=True)
class Step:
    """One batch; a context of -1 with one query token is a padding request of seq_len 0."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seed: int = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))


@dataclass(frozen=True)
class Features:
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    sliding_window: int | None = None
    logits_soft_cap: float = 0.0
    extras: bool = False
    """Sinks, alibi slopes and scales of the cache for each head."""
    attention_chunk_size: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    """Bidirectional ranges of every row."""


@dataclass
class Buffers:
    """The tensors that a graph reads and writes, at one address for good."""

    graph: Graph
    features: Features
    device: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    contents: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The cache as the step finds it: contexts written, all else NaN."""

    def __post_init__(self) -> None:
        g, dtype = self.graph, self.features.dtype
        cache_dtype = resolve_kv_cache_dtype(self.features.kv_cache_dtype, dtype)
        cache = (1 + g.rows * g.width, 2, PAGE, KV_HEADS, SIZE)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "query": ((g.tokens, HEADS, SIZE), dtype),
            "key": ((g.tokens, KV_HEADS, SIZE), dtype),
            "value": ((g.tokens, KV_HEADS, SIZE), dtype),
            "kv_cache": (cache, cache_dtype),
            "output": ((g.tokens, HEADS, SIZE), dtype),
            "query_start_loc": ((g.rows + 1,), torch.int32),
            "seq_lens": ((g.rows,), torch.int32),
            "block_table": ((g.rows, g.width), torch.int32),
            "slot_mapping": ((g.tokens,), torch.int64),
            "lse": ((g.tokens, HEADS), torch.float32),
        }
        self.tensors = {
            name: torch.zeros(shape, dtype=kind, device=self.device) for name, (shape, kind) in shapes.items()
        }
        if self.features.extras:
            heads, kv_heads = torch.arange(HEADS), torch.arange(KV_HEADS)
            self.options = {
                "sinks": (0.5 * heads - 1).to(self.device),
                "alibi_slopes": torch.exp2(-2.0 - heads).to(self.device),
                "k_scale": (0.25 + 0.25 * kv_heads).to(self.device),
                "v_scale": (0.5 - 0.25 * kv_heads).to(self.device),
            }

        if self.features.ranges:
            ranges = torch.tensor(self.features.ranges, dtype=torch.int32, device=self.device)
            self.options["bidirectional_ranges"] = ranges.repeat(g.rows, 1, 1)

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def fill(self, step: Step) -> None:
        """Another step's inputs; what it does not bring is NaN, padding or garbage."""
        rng = torch.Generator().manual_seed(step.seed)
        used = sum(step.query_lens)
        for name in ("query", "key", "value"):
            new = torch.randn(self.tensors[name].shape, generator=rng)
            new[used:] = NAN
            self.tensors[name].copy_(new)
        padding = [0] * (self.graph.rows - len(step.query_lens))
        lens = torch.tensor([0, *step.query_lens, *padding])
        self.query_start_loc.copy_(lens.cumsum(0))
        self.seq_lens.copy_(torch.tensor([*step.seq_lens, *padding]))
        pages = 1 + torch.randperm(self.graph.rows * self.graph.width, generator=rng)
        table = pages.view(self.graph.rows, self.graph.width)
        self._fill_cache(step, table, rng)
        self.slot_mapping.copy_(self._slots(step, table))
        # No kernel may follow the entries past a sequence's end.
        for row, length in enumerate([*step.seq_lens, *padding]):
            table[row, -(-length // PAGE) :] = GARBAGE_BLOCK if row < len(step.seq_lens) else 0
        self.block_table.copy_(table)

    def _fill_cache(self, step: Step, table: torch.Tensor, rng: torch.Generator) -> None:
        cache = torch.full(self.kv_cache.shape, NAN)
        for row, context in enumerate(step.context_lens):
            for i in range(-(-max(context, 0) // PAGE)):
                count = min(PAGE, context - i * PAGE)
                new = torch.randn(2, count, KV_HEADS, SIZE, generator=rng)
                cache[table[row, i], :, :count] = new
        self.contents = cache.to(self.kv_cache.dtype).to(self.device)

    def _slots(self, step: Step, table: torch.Tensor) -> torch.Tensor:
        slots = torch.full((self.graph.tokens,), -1)
        token = 0
        for row, (query, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            for position in range(context, context + query):
                if position >= 0:
                    slots[token] = table[row, position // PAGE] * PAGE + position % PAGE
                token += 1
        return slots

    def poison(self) -> None:
        """The cache as the step finds it, and NaN in all that an op must write."""
        self.kv_cache.copy_(self.contents)
        self.output.fill_(NAN)
        self.lse.fill_(NAN)

    def params(self) -> AttentionParams:
        f = self.features
        return AttentionParams(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=f.dtype,
            kv_cache_dtype=f.kv_cache_dtype, block_size=PAGE, device_type=self.device,
            scale=SIZE**-0.5, sliding_window=f.sliding_window, logits_soft_cap=f.logits_soft_cap,
            attention_chunk_size=f.attention_chunk_size,
        )  # fmt: skip

    def common(self) -> CommonAttentionMetadata:
        """The metadata of every step of this graph: bounds, no length of any one batch."""
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc, seq_lens=self.seq_lens,
            block_table=self.block_table, slot_mapping=self.slot_mapping,
            num_reqs=self.graph.rows, num_actual_tokens=self.graph.tokens,
            max_query_len=self.graph.max_query_len, max_seq_len=self.graph.width * PAGE,
        )  # fmt: skip

    def call(self, group: int) -> None:
        """One layer of the step: write the cache, then attend."""
        f, options = self.features, self.options
        scales = {k: v for k, v in options.items() if k.endswith("_scale")}
        update_op(BACKEND)(
            self.key, self.value, self.kv_cache, self.slot_mapping,
            kv_cache_dtype=f.kv_cache_dtype, group=group, **scales,
        )  # fmt: skip
        forward_op(BACKEND)(
            self.query, self.key, self.value, self.kv_cache, self.output, self.query_start_loc,
            self.seq_lens, self.block_table, scale=SIZE**-0.5, lse=self.lse,
            sliding_window=f.sliding_window, logits_soft_cap=f.logits_soft_cap,
            kv_cache_dtype=f.kv_cache_dtype, attention_chunk_size=f.attention_chunk_size, group=group,
            **options,
        )  # fmt: skip

    def results(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.tensors[name].clone() for name in RESULTS)


def builder_of(buffers: Buffers) -> Any:
    params = buffers.params()
    limits = BatchLimits(buffers.graph.rows, buffers.graph.tokens, buffers.graph.width * PAGE)
    cls = resolve_backend(BACKEND).get_builder_cls()
    return cls(params, spec_of(params), limits, torch.device(buffers.device))


@contextmanager
def planned(plan: Any) -> Iterator[None]:
    with set_forward_context(ForwardContext({(0, BACKEND): plan})):
        yield


FEATURES = {
    "bfloat16": Features(torch.bfloat16),
    "float16, float8 cache and all else": Features(torch.float16, "fp8_e4m3", 300, 20.0, True),
    "chunks": Features(torch.bfloat16, attention_chunk_size=300),
    "ranges over a window": Features(torch.float16, sliding_window=9, ranges=((0, 34), (500, 1001))),
}


# --- which kernel a plan chooses ---------------------------------------------------------


def kernels_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from attnbackend.kernels import triton

    called: list[str] = []
    for name in ("paged_attention", "paged_decode_attention"):
        kernel = getattr(triton, name)

        def spy(*args: Any, _kernel: Any = kernel, _name: str = name, **kwargs: Any) -> None:
            called.append(_name)
            _kernel(*args, **kwargs)

        monkeypatch.setattr(triton, name, spy)
    return called


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_eager_steps_are_right(features: Features) -> None:
    require(BACKEND)
    for graph, step in ((Graph(3, 3, 1), Step((1, 1), (20, 900))), (Graph(2, 9, 8), Step((8, 1), (497, 33)))):
        buffers = Buffers(graph, features, DEVICE)
        buffers.fill(step)
        buffers.poison()
        with planned(builder_of(buffers).build(0, buffers.common())):
            buffers.call(0)
        judge(buffers, step)


@pytest.mark.parametrize(
    ("graph", "step", "kernel"),
    [
        (Graph(3, 3, 1, 4), Step((1, 1), (20, 33)), "paged_decode_attention"),
        (Graph(3, 3, 2, 4), Step((1, 1), (20, 33)), "paged_attention"),
        (Graph(2, 5, 1, 4), Step((1, 1), (20, 33)), "paged_attention"),
        (Graph(2, 5, 4, 4), Step((4, 1), (20, 33)), "paged_attention"),
    ],
    ids=["decode", "one token a row, bound 2", "more padded tokens than rows", "mixed"],
)
def test_a_plan_chooses_a_kernel_that_writes_every_token(
    graph: Graph, step: Step, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(BACKEND)
    buffers = Buffers(graph, Features(torch.float32), DEVICE)
    buffers.fill(step)
    buffers.poison()
    called = kernels_called(monkeypatch)
    with planned(builder_of(buffers).build(0, buffers.common())):
        buffers.call(0)
    assert called == [kernel]
    judge(buffers, step)


def test_the_plan_of_a_capture_is_that_of_its_bound() -> None:
    buffers = Buffers(Graph(3, 3, 1, 4), Features(torch.float32), DEVICE)
    builder = builder_of(buffers)
    common = buffers.common()
    assert builder.build_for_cudagraph_capture(common).is_decode
    assert not builder.build_for_cudagraph_capture(common.replace(max_query_len=2)).is_decode


def judge(buffers: Buffers, step: Step) -> None:
    """Output and LSE against float64, over the batch that the buffers hold."""
    table = buffers.block_table.clone()
    table[table == GARBAGE_BLOCK] = 0
    tensors = buffers.query, buffers.kv_cache, buffers.query_start_loc, buffers.seq_lens, table
    options = {k: v.cpu() for k, v in buffers.options.items()} | {
        "scale": SIZE**-0.5,
        "sliding_window": buffers.features.sliding_window,
        "logits_soft_cap": buffers.features.logits_soft_cap,
        "attention_chunk_size": buffers.features.attention_chunk_size,
    }
    both = [
        attend(*(x.cpu() for x in tensors), **options)
        for attend in (reference_attention, plain_torch_attention)
    ]
    for what, exact, plain in zip(("output", "lse"), *both, strict=True):
        assert_within_rule(buffers.tensors[what].cpu(), exact, plain, what=what)
    used = sum(step.query_lens)
    assert bool((buffers.output[used:] == 0).all())
    assert bool((buffers.lse[used:] == -torch.inf).all())


# --- replays -----------------------------------------------------------------------------

GRAPHS = {
    "decode": Graph(8, 8, 1),
    "uniform batches of 4": Graph(8, 32, 4),
    "mixed": Graph(8, 96, 96),
}
CAPTURED = {
    "decode": Step((1,) * 8, (50,) * 8, seed=9),
    "uniform batches of 4": Step((4,) * 8, (50,) * 8, seed=9),
    "mixed": Step((1,) * 7 + (89,), (50,) * 7 + (0,), seed=9),
}
ONE_TOKEN_ROWS = {
    "the largest batch": Step((1,) * 8, (0, 15, 16, 300, 1000, 999, 7, 512), 1),
    "padding requests": Step((1,) * 8, (1023, 40, 3, -1, -1, -1, -1, -1), 2),
    "padded rows and tokens": Step((1, 1, 1), (600, 0, 17), 3),
    "empty rows between": Step((0, 1, 0, 1, 1, 0), (0, 900, 0, 5, 31, 0), 4),
    "nothing but padding": Step((1,) * 8, (-1,) * 8, 5),
}
REPLAYED = {
    "decode": ONE_TOKEN_ROWS,
    "uniform batches of 4": {
        "the largest batch": Step((4,) * 8, (0, 15, 16, 300, 1000, 999, 7, 512), 1),
        "fewer requests": Step((4,) * 3, (1020, 40, 3), 2),
        "rows shorter than the bound": Step((4, 1, 3, 0, 2), (600, 900, 17, 0, 0), 3),
    },
    "mixed": {
        "the largest prefill": Step((96,), (0,), 1),
        "prefill and decode": Step((1, 30, 1, 60, 4), (1000, 0, 33, 500, 0), 2),
        "short rows": Step((5, 0, 1, 17, 1), (40, 0, 9, 20, 0), 3),
        **{f"decode: {name}": step for name, step in ONE_TOKEN_ROWS.items()},
    },
}


def capture(buffers: Buffers, group: int) -> torch.cuda.CUDAGraph:
    """A graph of one call, warmed up before, on whatever the buffers hold."""
    require(BACKEND)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        buffers.call(group)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.call(group)
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("group", [0, -1], ids=["planned", "ad hoc"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_replays_equal_eager_bit_for_bit(kind: str, group: int, features: Features) -> None:
    buffers = Buffers(GRAPHS[kind], features, DEVICE)
    buffers.fill(CAPTURED[kind])
    buffers.poison()
    builder = builder_of(buffers)
    plan = builder.build_for_cudagraph_capture(buffers.common())
    with planned(plan) if group == 0 else nullcontext():
        graph = capture(buffers, group)
    for name, step in REPLAYED[kind].items():
        buffers.fill(step)
        with planned(builder.build(0, buffers.common())) if group == 0 else nullcontext():
            buffers.poison()
            buffers.call(group)
        eager = buffers.results()
        buffers.poison()
        graph.replay()
        for what, right, found in zip(RESULTS, eager, buffers.results(), strict=True):
            assert torch.equal(as_bytes(found), as_bytes(right)), f"{name}: {what}"
        judge(buffers, step)


@pytest.mark.gpu
def test_a_graph_of_one_token_replays_without_a_plan() -> None:
    """With no plan one token is a decode batch, whatever else changes."""
    buffers = Buffers(Graph(1, 1, 1), FEATURES["bfloat16"], DEVICE)
    buffers.fill(Step((1,), (5,)))
    buffers.poison()
    graph = capture(buffers, -1)
    for step in (Step((1,), (1000,), 1), Step((0,), (0,), 2), Step((1,), (-1,), 3)):
        buffers.fill(step)
        buffers.poison()
        graph.replay()
        judge(buffers, step)


def test_the_claim_is_the_level_that_replays_prove() -> None:
    builder = resolve_backend(BACKEND).get_builder_cls()
    assert builder.cudagraph_support is AttentionCGSupport.ALWAYS


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
