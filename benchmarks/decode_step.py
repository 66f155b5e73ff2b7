"""`python -m benchmarks.decode_step`: decode steps of a Llama-8B-shaped random model on a GPU.

Bfloat16, hidden 4096, 32 layers, 32/8 heads of 128, ffn 14336, vocabulary 128256; prompts of 1,024 tokens.
Prints and writes, for each number of requests: the median time of a whole engine step (batch preparation,
plans, replay, sampling, results on the host), where the host's time goes in it (`benchmarks.host_stages`),
the time of its graph alone, what lies between two graphs on the device's time line (sampling, copies, plans,
idling), and what the graphs cost to capture. With ``--prefill``, tokens a second of prompts as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from attnbackend.cudagraph.capture_report import CaptureCost
from benchmarks.environment import describe_environment
from benchmarks.graph_gaps import graph_gaps
from benchmarks.host_stages import host_stages
from benchmarks.prefill import PrefillSettings
from benchmarks.prefill import measure as measure_prefill
from benchmarks.random_llama import random_llama

_PROMPT, _STEPS, _WARM_UPS = 1024, 40, 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.decode_step", description=__doc__)
    parser.add_argument("--backend", action="append", help="may be repeated; default: the automatic choice")
    parser.add_argument("--batch", type=int, action="append", help="requests; default 1, 16, 64, 256")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--mode", help="CUDA-graph mode; default: as much as is possible")
    parser.add_argument(
        "--ahead", action=argparse.BooleanOptionalAction, default=True, help="see async_scheduling"
    )
    parser.add_argument("--captures", action="store_true", help="print what each graph took to capture")
    parser.add_argument(
        "--profile", action="store_true", help="print kernels and calls of CUDA in a step of the last batch"
    )
    parser.add_argument(
        "--prefill", type=int, action="append", metavar="TOKENS", default=[],
        help="also what `benchmarks.prefill` measures, with so many tokens a step; may be repeated",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decode_step.json"))
    options = parser.parse_args(arguments)
    model = random_llama(options.layers)
    result: dict[str, Any] = {"environment": describe_environment(), "backends": {}}
    for backend in options.backend or [None]:
        found = measure_backend(model, backend, options.batch or [1, 16, 64, 256], options)
        found["prefill_8x8192_tokens_per_s"] = {}
        for tokens in options.prefill:
            spread = measure_prefill(model, backend, PrefillSettings(max_num_batched_tokens=tokens))
            found["prefill_8x8192_tokens_per_s"][f"{tokens} a step"] = asdict(spread)
            print(f"prefill, {tokens} tokens a step: {spread} tokens/s", flush=True)
        result["backends"][backend or "automatic"] = found
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.output}")


def measure_backend(model: Any, backend: str | None, batches: list[int], options: Any) -> dict[str, Any]:
    started = time.perf_counter()
    engine = Engine(
        model, backend=backend, max_num_seqs=max(batches), max_num_batched_tokens=8192, max_model_len=2048,
        num_blocks=max(batches) * 80 + 1, compile=options.compile, cudagraph_mode=options.mode,
        async_scheduling=options.ahead,
    )  # fmt: skip
    ready = time.perf_counter() - started
    found: dict[str, Any] = {"seconds_to_ready": round(ready, 1), "backend": _backends(engine)}
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    if graphs is not None:
        report = graphs.steps.report
        found["mode"] = graphs.dispatcher.mode.name
        found["graphs"] = len(report.costs)
        found["capture_seconds"] = round(report.seconds, 2)
        found["warm_up_seconds"] = round(report.warm_up_seconds, 2)
        found["capture_gib"] = round(report.num_bytes / 2**30, 3)
        found["captures"] = _captures_by_kind(report.costs)
        if options.captures:
            print(report, flush=True)
    print(json.dumps(found), flush=True)
    found["steps"] = {}
    for batch in batches:
        found["steps"][batch] = measure_batch(engine, batch, options.profile and batch == batches[-1])
        print(found["backend"], batch, json.dumps(found["steps"][batch]), flush=True)
    return found


def _captures_by_kind(costs: Sequence[CaptureCost]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for cost in costs:
        kind = f"{cost.key.mode.name} {'decode' if cost.key.descriptor.uniform else 'mixed'}"
        sums = found.setdefault(kind, {"graphs": 0, "seconds": 0.0, "warm_up_seconds": 0.0, "pool_mib": 0.0})
        sums["graphs"] += 1
        sums["seconds"] = round(sums["seconds"] + cost.seconds, 3)
        sums["warm_up_seconds"] = round(sums["warm_up_seconds"] + cost.warm_up_seconds, 3)
        sums["pool_mib"] = round(sums["pool_mib"] + cost.num_bytes / 2**20, 1)
    return found


def _backends(engine: Engine) -> str:
    groups = engine.runner.groups  # type: ignore[attr-defined]
    return ", ".join(sorted({group.backend.get_name() for group in groups}))


def measure_batch(engine: Engine, batch: int, profile: bool = False) -> dict[str, Any]:
    """Milliseconds of a pure decode step, where they go, and tokens/s of the prefill before it."""
    result: dict[str, Any] = {"prefill_tokens_per_s": round(_prefill(engine, batch))}
    for _ in range(_WARM_UPS):
        engine.step()
    result["step_ms"] = round(1e3 * median(_seconds(engine, batch) for _ in range(_STEPS)), 3)
    for name, in_parts in (("host_us", False), ("host_us_in_parts", True)):
        with host_stages(engine, in_parts) as stages:
            for _ in range(_STEPS):
                stages.step()
        result[name] = stages.microseconds()
    with graph_gaps() as gaps:
        for _ in range(_STEPS):
            engine.step()
    replay = _replay_ms(engine, batch)
    if replay is not None:
        between = gaps.microseconds()
        result["graph_ms"] = replay
        result["between_graphs_us"] = round(between)
        result["between_graphs_share"] = round(between / (between + 1e3 * replay), 4)
    if profile:
        print_kernels(engine)
    for request in list(engine._progress):
        engine.abort(request)
    return result


def _prefill(engine: Engine, batch: int) -> float:
    """Tokens a second, until each request has its first token."""
    generator = torch.Generator().manual_seed(batch)
    params = SamplingParams(max_tokens=_WARM_UPS + 5 * _STEPS + batch // 8, ignore_eos=True)
    for _ in range(batch):
        engine.add_request(torch.randint(0, 128256, (_PROMPT,), generator=generator).tolist(), params)
    torch.cuda.synchronize()
    started = time.perf_counter()
    while len(engine.step()) < batch:
        pass
    return batch * _PROMPT / (time.perf_counter() - started)


def _seconds(engine: Engine, batch: int) -> float:
    started = time.perf_counter()
    assert len(engine.step()) == batch
    return time.perf_counter() - started


def print_kernels(engine: Engine) -> None:
    """Kernels, copies and calls of CUDA in one step by total time, in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.step()
        torch.cuda.synchronize()
    for time_of in ("self_device_time_total", "self_cpu_time_total"):
        rows = sorted(profile.key_averages(), key=lambda row: -getattr(row, time_of))
        for row in rows[:25]:
            if getattr(row, time_of):
                print(f"{getattr(row, time_of):9.1f} us {row.count:5d} x {row.key[:110]}")


def _replay_ms(engine: Engine, batch: int) -> float | None:
    """The graph of the last step alone, over the buffers as they are."""
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    if graphs is None:
        return None
    found = [key for key in graphs.steps.num_replays if key.descriptor == (batch, batch, True)]
    if not found:
        return None
    graph = graphs.steps._captured[found[-1]].graph
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / 20, 3)


if __name__ == "__main__":
    main()
