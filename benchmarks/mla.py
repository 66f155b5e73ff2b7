"""Decode of latent attention on one GPU: the project's backends against direct calls of the same libraries.

    python -m benchmarks.mla
    python -m benchmarks.mla --only 'B64 L4096' --sides TRITON_MLA,flashinfer_fa3
    python -m benchmarks.mla --configs

Rows of 512 + 64 in bfloat16, blocks of 64 (FLASH_ATTN_MLA: of 32). All sides of a point get the same
tensors in the same process and take turns. Each is judged before it is timed: its output starts full of
NaN, three requests of it are held to float64 by the relative rule. Figures are microseconds a call on the
GPU's clock: medians over rounds of CUDA-graph replays. What a backend takes of its library's direct call
is measured apart, in pairs. TFLOP/s counts 2 (2 L + R) for each query, head and key; TB/s each row of the
cache once. --configs times the project's kernels in other tiles instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.testing import assert_within_rule
from benchmarks.attention import (
    CALLS,
    REPLAYS,
    _captured,
    _ceilings,
    _environment,
    _event_us,
    _graph_medians,
)
from benchmarks.mla_sides import DIRECT_OF, PLANS, RANK, ROPE, SIDES, TILES, Inputs, Unserved

Graph = tuple[torch.cuda.CUDAGraph, int]
_ERRORS = (Unserved, AssertionError, RuntimeError, ValueError, TypeError, ImportError, AttributeError)


@dataclass(frozen=True)
class Point:
    """Requests of so many tokens each, whose lengths are all `length`, or spread down to an eighth of it."""

    requests: int
    length: int
    heads: int = 128
    tokens: int = 1
    mixed: bool = False

    @property
    def name(self) -> str:
        more = f" H{self.heads}" if self.heads != 128 else ""
        more += f" T{self.tokens}" if self.tokens != 1 else ""
        return f"B{self.requests} L{self.length}{more}{' mixed' if self.mixed else ''}"

    @property
    def lengths(self) -> list[int]:
        if not self.mixed:
            return [self.length] * self.requests
        return [self.length // 8 + (i * 7919) % (self.length * 7 // 8) for i in range(self.requests)]


GRID = (
    Point(64, 4096), Point(128, 8192), Point(16, 4096), Point(1, 4096), Point(1, 32768),
    Point(64, 4096, mixed=True), Point(64, 4096, heads=16), Point(16, 4096, tokens=4),
)  # fmt: skip


def main() -> None:
    options = _options()
    sides = TILES if options.configs else {k: v for k, v in SIDES.items() if k in options.sides.split(",")}
    ceilings = _ceilings()
    print(f"{torch.cuda.get_device_name()}: {ceilings}", flush=True)
    results = []
    for point in (p for p in GRID if re.search(options.only, p.name)):
        with set_forward_context(ForwardContext(plans=PLANS)):
            result = _measure(point, sides, options.rounds)
        results.append(result)
        _print(result, ceilings)
        if options.json:
            record = {"environment": _environment(), "ceilings": ceilings, "points": results}
            Path(options.json).write_text(json.dumps(record, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="points whose name this pattern is found in")
    usual = ",".join(name for name in SIDES if name != "flashinfer_fa2")
    parser.add_argument("--sides", default=usual, help=f"of: {','.join(SIDES)}")
    parser.add_argument("--configs", action="store_true", help="the project's kernels in other tiles")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="", help="file for the figures, written after every point")
    return parser.parse_args()


def make_inputs(point: Point) -> Inputs:
    """Random tensors, blocks in random order."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    pages = [-(-n // 64) for n in point.lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros(point.requests, max(pages), dtype=torch.int32)
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    shape = (sum(pages) + 1, 64, RANK + ROPE)
    cache = torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16)
    total = point.requests * point.tokens
    query = torch.randn(total, point.heads, RANK + ROPE, generator=rng, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(point.requests + 1, dtype=torch.int32) * point.tokens
    lens = torch.tensor(point.lengths, dtype=torch.int32)
    return Inputs.of(query, cache, starts, lens, table.cuda())


def _measure(point: Point, sides: dict[str, Any], rounds: int) -> dict[str, Any]:
    inputs = make_inputs(point)
    output = torch.empty(*inputs.query.shape[:2], RANK, dtype=torch.bfloat16, device="cuda")
    judged = _judged_requests(point, inputs)
    runs, refused = {}, {}
    for name, make in sides.items():
        try:
            run = make(inputs, output)
            output.fill_(torch.nan)
            run()
            for rows, exact, plain in judged:
                assert_within_rule(output[rows], exact, plain)
        except _ERRORS as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            runs[name] = run
    graphs = {name: _captured(run, CALLS) for name, run in runs.items()}
    work = {
        "flops": 2.0 * point.tokens * point.heads * sum(point.lengths) * (2 * RANK + ROPE),
        "bytes": 2.0 * sum(point.lengths) * (RANK + ROPE),
    }
    result = {"point": point.name, **work, "us": _graph_medians(graphs, rounds), "refused": refused}
    result["of_direct"] = _paired_ratios(graphs, 2 * rounds)
    del runs, graphs, inputs, output
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _paired_ratios(graphs: dict[str, Graph], rounds: int) -> dict[str, dict[str, float]]:
    """A backend's time in that of the library called directly: of runs one behind the other, median and
    spread. Who goes first changes each time: what ran before moves a GPU at its power limit by 5%."""
    found = {}
    for name, direct in DIRECT_OF.items():
        if name not in graphs or direct not in graphs:
            continue
        ratios = []
        for i in range(rounds):
            us = {side: _graph_us(graphs[side]) for side in ((name, direct) if i % 2 else (direct, name))}
            ratios.append(us[name] / us[direct])
        found[name] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return found


def _graph_us(graph: Graph) -> float:
    replayed, calls = graph
    return _event_us(replayed.replay, REPLAYS) / calls


def _judged_requests(point: Point, inputs: Inputs) -> list[tuple[slice, Tensor, Tensor]]:
    """Of the first, the middle and the last request: its tokens, float64 results, and plain bfloat16 ones."""
    found = []
    for row in sorted({0, point.requests // 2, point.requests - 1}):
        rows = slice(row * point.tokens, (row + 1) * point.tokens)
        exact, plain = (inputs.attend(row, rows, dtype) for dtype in (torch.float64, torch.bfloat16))
        found.append((rows, exact, plain))
    return found


def _print(result: dict[str, Any], ceilings: dict[str, float]) -> None:
    print(f"\n{result['point']}")
    best = min(result["us"].values(), default=1.0)
    for name, us in sorted(result["us"].items(), key=lambda item: item[1]):
        flops, rate = result["flops"] / us / 1e6, result["bytes"] / us / 1e6
        paired = result["of_direct"].get(name)
        print(
            f"  {name:28}{us:9.1f} us {flops:6.0f} TFLOP/s ({flops / ceilings['matmul_TFLOPs']:4.0%}) "
            f"{rate:5.2f} TB/s ({rate / ceilings['copy_TBps']:4.0%}) {best / us:5.2f}x the best"
            + (f"  {paired['median']:.3f} of {DIRECT_OF[name]}" if paired else "")
        )
    for name, why in result["refused"].items():
        print(f"  {name:28}not measured: {why}")
    print(end="", flush=True)


if __name__ == "__main__":
    main()
