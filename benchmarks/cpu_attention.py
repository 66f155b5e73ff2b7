"""Attention on CPUs: the project's kernel against vLLM's, on the same tensors in one process.

    python -m benchmarks.cpu_attention --peer VENV/lib/python3.11/site-packages/vllm --threads 1 --threads 2

Each side keeps its own cache layout. Outputs are compared before anything is timed. Sides take turns; a
round's time is the mean of a few calls, a ratio is taken within a round, and medians of rounds are shown:
of wall time, and of the processor's time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnbackend.registry import resolve_backend
from benchmarks.cpu_attention_grid import GRID, QUICK, Inputs, Point, make_inputs
from benchmarks.environment import describe_environment
from benchmarks.timing import Spread
from benchmarks.vllm_cpu import find_library, peer_side

Call = Callable[[], None]
_ROUND_S = 0.004
"""A round's calls take about so long, or are one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    options = _parser().parse_args(arguments)
    if options.peer is not None:
        torch.ops.load_library(str(find_library(options.peer)))
    for name in ("CPU_ATTN", "CPU_MLA"):
        resolve_backend(name)  # defines its ops
    points = [p for p in (QUICK if options.quick else GRID) if re.search(options.only, p.name)]
    with torch.inference_mode():
        runs = [_run(points, threads, options) for threads in options.threads or [torch.get_num_threads()]]
    if options.json is not None:
        environment = describe_environment() | {"peer": str(options.peer_version)}
        options.json.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1) + "\n")
        print(f"written: {options.json}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cpu_attention", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--peer", type=Path, help="folder vllm/ of an installed vllm-cpu of this torch; default: none")
    add("--peer-version", default="vllm-cpu 0.32.0", help="for the record (default %(default)s)")
    add("--quick", action="store_true", help=f"{len(QUICK)} points instead of {len(GRID)}")
    add("--only", default="", help="points whose name this pattern is found in")
    add("--threads", type=int, action="append", help="may be repeated; default: torch's own number")
    add("--seconds", type=float, default=3.0, help="a point, both sides together (default %(default)s)")
    add("--json", type=Path, help="file for the figures")
    return parser


def _run(points: Sequence[Point], threads: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(threads)
    print(f"\n{threads} thread(s): ms a call, median (min .. max)")
    results = [_measure(point, options) for point in points]
    ratios = [r["ratio"]["median"] for r in results if "ratio" in r]
    summary: dict[str, Any] = {"threads": threads, "points": results}
    if ratios:
        worst = max((r for r in results if "ratio" in r), key=lambda r: r["ratio"]["median"])
        processor = [r["processor_ratio"]["median"] for r in results if "ratio" in r]
        summary |= {"geometric_mean": statistics.geometric_mean(ratios), "worst": worst["name"]}
        summary["processor_geometric_mean"] = statistics.geometric_mean(processor)
        print(
            f"own time / vllm's: geometric mean {summary['geometric_mean']:.3f} (of processor time "
            f"{summary['processor_geometric_mean']:.3f}), worst {max(ratios):.3f} ({worst['name']})"
        )
    return summary


def _measure(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    inputs = make_inputs(point, torch.Generator().manual_seed(0))
    sides = _sides(inputs, options.peer is not None)
    calls, rounds = _amount(sides, options.seconds)
    wall, processor = _timed(sides, calls, rounds)
    result = {"name": point.name, "calls": calls, "rounds": rounds}
    result |= {f"{name}_ms": asdict(Spread.of(each)) for name, each in wall.items()}
    line = f"  {point.name:42}" + "".join(f" {name} {Spread.of(each)!s:28}" for name, each in wall.items())
    if "vllm" in sides:
        result |= {"ratio": asdict(_ratio(wall)), "processor_ratio": asdict(_ratio(processor))}
        line += f" ratio {_ratio(wall).median:.3f}, of processor time {_ratio(processor).median:.3f}"
    print(line, flush=True)
    return result


def _ratio(times: dict[str, list[float]]) -> Spread:
    return Spread.of([a / b for a, b in zip(times["own"], times["vllm"], strict=True)])


def _timed(
    sides: dict[str, Call], calls: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds a call of each side, round by round: by the wall, by the process's processor time."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            side, start, start_cpu = sides[name], time.perf_counter(), time.process_time()
            for _ in range(calls):
                side()
            processor[name].append((time.process_time() - start_cpu) / calls * 1e3)
            wall[name].append((time.perf_counter() - start) / calls * 1e3)
        order.reverse()
    return wall, processor


def _amount(sides: dict[str, Call], seconds: float) -> tuple[int, int]:
    """Calls a round and rounds, so that all sides take about ``seconds`` together."""
    start = time.perf_counter()
    for side in sides.values():
        side()
    each = (time.perf_counter() - start) / len(sides)
    calls = max(1, round(_ROUND_S / each))
    return calls, max(5, round(seconds / (each * calls * len(sides))))


def _sides(inputs: Inputs, with_peer: bool) -> dict[str, Call]:
    """Calls that were run once and agree."""
    outputs = {
        name: torch.full(inputs.output_shape, float("nan"), dtype=inputs.query.dtype)
        for name in ("own", "vllm")
    }
    sides = {"own": _own_side(inputs, outputs["own"])}
    if with_peer:
        sides["vllm"] = peer_side(inputs, outputs["vllm"])
    for side in sides.values():
        side()
    if with_peer:
        tolerance = 64 * torch.finfo(inputs.query.dtype).eps
        torch.testing.assert_close(outputs["own"], outputs["vllm"], rtol=tolerance, atol=tolerance)
    return sides


def _own_side(inputs: Inputs, output: torch.Tensor) -> Call:
    """A call of the op alone: as compiled code makes it, the op and its tensors are at hand."""
    query, kv_cache, scale, rank = inputs.query, inputs.kv_cache, inputs.scale, inputs.kv_lora_rank
    starts, seq_lens, table = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
    if rank is None:
        forward = torch.ops.attnbackend.cpu_attn_forward.default
        return lambda: forward(query, None, None, kv_cache, output, starts, seq_lens, table, scale=scale)
    latent, rope = query[..., :rank], query[..., rank:]
    forward = torch.ops.attnbackend.cpu_mla_forward_mqa.default
    return lambda: forward(latent, rope, kv_cache, output, starts, seq_lens, table, scale=scale)


if __name__ == "__main__":
    main()
