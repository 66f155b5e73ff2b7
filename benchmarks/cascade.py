"""`python -m benchmarks.cascade`: decode batches over a shared prefix, whole and in two parts.

Both sides are graphs of one call of `TRITON_ATTN` for each of some layers, whose caches together are
larger than what the device keeps at hand; they are replayed in turns on the same buffers, and their
results are compared before. The table says from which prefix and batch on a cascade pays: the
thresholds of `attnbackend.backends.cascade`. Needs a CUDA device, or --device cpu with
TRITON_INTERPRET=1 for a test of the benchmark itself, where nothing is a graph and times mean nothing.

Shape legend: T tokens, R requests, W block-table width, B cache blocks, S block size, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbackend import CommonAttentionMetadata, ForwardContext, resolve_backend, set_forward_context
from attnbackend.backends.cascade import CascadeThresholds
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from benchmarks.environment import describe_environment

_BACKEND, _BLOCK_SIZE = "TRITON_ATTN", 16
_COLD_BYTES = 1 << 28
"""Of the caches that a round walks through: several times an H200's L2."""


@dataclass(frozen=True)
class Shape:
    """One batch of single tokens.

    Attributes:
        requests: how many.
        prefix: tokens that all share.
        suffix: tokens of each behind them, the new one included.
    """

    requests: int
    prefix: int
    suffix: int


@dataclass(frozen=True)
class Heads:
    query: int = 32
    kv: int = 8
    size: int = 128


@dataclass(frozen=True)
class Timing:
    """Medians over rounds, in microseconds a layer.

    Attributes:
        build_us: of the plan in parts, once a step; host and device together.
        difference: the largest between the outputs, in units of the largest output.
    """

    shape: Shape
    whole_us: float
    parts_us: float
    build_us: float
    difference: float

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields.pop("shape") | fields | {"speedup": self.whole_us / self.parts_us}


class Batch:
    """The tensors of a call. The prefix lies in one set of blocks, each suffix in blocks of its own."""

    def __init__(self, shape: Shape, heads: Heads, dtype: torch.dtype, device: str) -> None:
        self.shape, self.heads, self.dtype, self.device = shape, heads, dtype, device
        rng = torch.Generator(device).manual_seed(0)
        shared, own = shape.prefix // _BLOCK_SIZE, -(-shape.suffix // _BLOCK_SIZE)
        num_blocks = 1 + shared + own * shape.requests
        # In random order, as a pool gives blocks out after a while.
        ids = 1 + torch.randperm(num_blocks - 1, generator=rng, device=device).int()
        own_RW = ids[shared:].view(shape.requests, own)
        self.block_table = torch.cat([ids[:shared].expand(shape.requests, -1), own_RW], 1).contiguous()
        cache = num_blocks, 2, _BLOCK_SIZE, heads.kv, heads.size
        first = torch.randn(cache, generator=rng, dtype=dtype, device=device)
        layers = min(32, -(-_COLD_BYTES // first.nbytes)) if device == "cuda" else 1
        self.kv_caches = [first, *(first.clone() for _ in range(layers - 1))]
        query = shape.requests, heads.query, heads.size
        self.query = torch.randn(query, generator=rng, dtype=dtype, device=device)
        self.output = torch.empty_like(self.query)
        self.query_start_loc = torch.arange(shape.requests + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.full_like(self.query_start_loc[1:], shape.prefix + shape.suffix)

    def metadata(self) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc, seq_lens=self.seq_lens, block_table=self.block_table,
            num_reqs=self.shape.requests, num_actual_tokens=self.shape.requests, max_query_len=1,
            max_seq_len=self.shape.prefix + self.shape.suffix,
        )  # fmt: skip

    def builder(self) -> Any:
        params = AttentionParams(
            num_heads=self.heads.query, num_kv_heads=self.heads.kv, head_size=self.heads.size,
            dtype=self.dtype, kv_cache_dtype="auto", block_size=_BLOCK_SIZE, device_type=self.device,
            scale=self.heads.size**-0.5,
        )  # fmt: skip
        rows, width = self.block_table.shape
        limits = BatchLimits(rows, rows, width * _BLOCK_SIZE)
        builder = resolve_backend(_BACKEND).get_builder_cls()
        return builder(params, spec_of(params), limits, torch.device(self.device))

    def call(self, plan: Any) -> None:
        """One layer after the other."""
        new = self.query[:, : self.heads.kv]
        with set_forward_context(ForwardContext({(0, _BACKEND): plan})):
            for kv_cache in self.kv_caches:
                torch.ops.attnbackend.triton_attn_forward(
                    self.query, new, new, kv_cache, self.output, self.query_start_loc, self.seq_lens,
                    self.block_table, scale=self.heads.size**-0.5, group=0,
                )  # fmt: skip


def _graph_of(call: Callable[[], None], device: str) -> Callable[[], object]:
    if device == "cpu":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _microseconds(run: Callable[[], object], calls: int, device: str) -> float:
    """Of one run among `calls` in a row, on the device's clock."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls * 1e3


def measure(shape: Shape, heads: Heads, dtype: torch.dtype, device: str, rounds: int, calls: int) -> Timing:
    """Both sides of one shape; the sides take turns."""
    batch = Batch(shape, heads, dtype, device)
    builder, common = batch.builder(), batch.metadata()
    builder.cascade_thresholds = CascadeThresholds(min_prefix_len=0, min_num_reqs=0)
    whole = builder.build(0, common)

    def build() -> Any:
        return builder.build(shape.prefix, common)

    parts = build()
    assert parts.cascade is not None
    build_us = statistics.median(_microseconds(build, calls, device) for _ in range(rounds))
    sides = [_graph_of(partial(batch.call, plan), device) for plan in (whole, parts)]
    difference = _difference(batch, sides)
    layers, taken = len(batch.kv_caches), [[_microseconds(run, calls, device) for run in sides]
                                           for _ in range(rounds)]  # fmt: skip
    whole_us, parts_us = (statistics.median(side) / layers for side in zip(*taken, strict=True))
    return Timing(shape, whole_us, parts_us, build_us, difference)


def _difference(batch: Batch, sides: Sequence[Callable[[], object]]) -> float:
    """RuntimeError where the sides do not agree: a kernel that writes nothing is fast too."""
    outputs: list[Tensor] = []
    for run in sides:
        batch.output.fill_(torch.nan)
        run()
        outputs.append(batch.output.float())
    difference = ((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()).item()
    if not difference <= 0.02:
        raise RuntimeError(f"{batch.shape}: whole and in parts differ by {difference}; allowed: up to 0.02")
    return difference


def _shapes(options: argparse.Namespace) -> list[Shape]:
    triples = [(r, p, s) for r in options.requests for p in options.prefix for s in options.suffix]
    return [Shape(*triple) for triple in triples]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a line a shape and writes JSON; see ``--help``."""
    options = _parser().parse_args(arguments)
    dtype, heads = getattr(torch, options.dtype), Heads(*options.heads)
    timings = []
    for shape in _shapes(options):
        timing = measure(shape, heads, dtype, options.device, options.rounds, options.calls)
        timings.append(timing.as_dict())
        print(
            f"{shape}: whole {timing.whole_us:.1f} us, in parts {timing.parts_us:.1f} us "
            f"({timing.whole_us / timing.parts_us:.2f}x), plan {timing.build_us:.1f} us"
        )
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    result = {
        "environment": describe_environment() | {"gpu": gpu},
        "heads": asdict(heads), "dtype": options.dtype, "block_size": _BLOCK_SIZE, "timings": timings,
    }  # fmt: skip
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.cascade", description=__doc__)
    add = parser.add_argument
    add("--requests", type=int, nargs="+", default=[8, 64, 256])
    add("--prefix", type=int, nargs="+", default=[1024, 8192, 32768], help="multiples of 16")
    add("--suffix", type=int, nargs="+", default=[128, 1024])
    add("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("QUERY", "KV", "SIZE"))
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--rounds", type=int, default=9, help="rounds of both sides (default %(default)s)")
    add("--calls", type=int, default=20, help="calls timed at once (default %(default)s)")
    add("--output", type=Path, default=Path("cascade.json"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
