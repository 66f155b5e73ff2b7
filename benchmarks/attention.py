"""Attention on one GPU: the project's backends through their ops against direct calls of the same libraries.

    python -m benchmarks.attention --points quick
    python -m benchmarks.attention --only 'decode.*32/8x128' --sides FLASH_ATTN,fa3_direct
    python -m benchmarks.attention --points spread --budget 140 --json attention.json  # until all are done

All sides of a point get the same tensors in the same process and take turns. Each is judged before it is
timed: its output starts full of NaN and must be close to plain attention of the last request. Figures are
microseconds a call: medians over rounds of CUDA-graph replays (on the GPU's clock, up to ten calls a graph
and five replays a round), and of eager loops (on the host's, until the GPU is done).

Points that the file of --json has already are not measured again. Of a run that ends early it has all points
until then.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbackend import resolve_backend, select_backend
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION
from benchmarks.attention_grid import GRID, QUICK, SHORT, SPREAD, WIDE, Inputs, Point, make_inputs
from benchmarks.attention_plot import draw
from benchmarks.attention_sides import DIRECT, OURS, PLANS, Run, Unserved, contenders, selector_config
from benchmarks.attention_torch import cudnn_sdpa, torch_varlen
from benchmarks.environment import describe_environment
from benchmarks.timing import per_call_us, take_turns

CALLS, REPLAYS, EAGER_CALLS = 10, 5, 30
"""Most calls in one graph, replays of it a round, and calls of an eager loop."""
GRAPH_US, LOOP_US = 1.5e3, 5e3
"""What one of them may take: slow calls are repeated less."""
SETTLE_US = 3e4
"""What slow calls run before they are timed: a GPU at its power limit takes as long to find its clock."""
POINTS = {"all": GRID, "quick": QUICK, "spread": SPREAD, "wide": WIDE, "short": SHORT}
PEERS = {**DIRECT, "cudnn_sdpa": cudnn_sdpa, "torch_varlen": torch_varlen}
SIDES = {**OURS, **PEERS}
_PAIRS = {"FLASH_ATTN": "fa3_direct", "FLASHINFER": "flashinfer_direct", "TRITON_ATTN": "vllm_triton"}


def main() -> None:
    options = _options()
    started = time.perf_counter()
    record = _earlier(options.json)
    measured = {result["point"] for result in record["points"]}
    points = [p for p in POINTS[options.points] if re.search(options.only, p.name) and p.name not in measured]
    record["ceilings"] = ceilings = _ceilings()
    print(f"{torch.cuda.get_device_name()}: {ceilings}", flush=True)
    for done, point in enumerate(points):
        if options.budget and time.perf_counter() - started > options.budget:
            print(f"\n{options.budget} s are over: {len(points) - done} points are left")
            break
        with torch.no_grad(), set_forward_context(ForwardContext(plans=PLANS)):
            result = _measure(point, _sides(options.sides, point), options, ceilings)
        record["points"].append(result)
        _print(result)
        if options.json:
            Path(options.json).write_text(json.dumps(record, indent=1))
    _print_summary(record["points"])
    if options.plot:
        draw(record, Path(options.plot))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = ", ".join(f"{name} ({len(points)})" for name, points in POINTS.items())
    parser.add_argument("--points", choices=POINTS, default="all", help=f"of: {sizes}")
    parser.add_argument("--only", default="", help="points whose name this pattern is found in")
    parser.add_argument("--sides", default=",".join(SIDES), help="contenders, or of: %(default)s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-eager", action="store_true", help="graphs only")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which no point is begun")
    parser.add_argument("--json", default="", help="file for the figures, written after every point")
    parser.add_argument("--plot", default="", help="PNG of the speeds over the fastest peer's")
    return parser.parse_args()


def _sides(names: str, point: Point) -> dict[str, Any]:
    return {name: SIDES[name] for name in (contenders(point) if names == "contenders" else names.split(","))}


def _earlier(file: str) -> dict[str, Any]:
    """The record to go on with: that of an earlier run, if there is one."""
    if file and Path(file).exists():
        record: dict[str, Any] = json.loads(Path(file).read_text())
        return record
    return {"environment": _environment(), "ceilings": {}, "points": []}


def _environment() -> dict[str, Any]:
    from importlib import metadata

    found: dict[str, Any] = {**describe_environment(), "gpu": torch.cuda.get_device_name()}
    for package in ("triton", "vllm", "flashinfer-python", "flash-attn"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _ceilings() -> dict[str, float]:
    """What is reached here: TB/s of a copy's reads and writes, TFLOP/s of a bfloat16 product; and what an op
    of attention's schema that does nothing takes of the host."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = _event_us(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = _event_us(lambda: torch.mm(a, a))
    return {
        "copy_TBps": 2 * source.numel() / copied / 1e6,
        "matmul_TFLOPs": 2 * 8192**3 / product / 1e6,
        "empty_op_us": _empty_op_us(a),
    }


def _empty_op_us(x: Tensor, calls: int = 1000) -> float:
    library = torch.library.Library("attnbackend_benchmark", "FRAGMENT")
    library.define(f"empty{ATTENTION.schema}")
    library.impl("empty", lambda *args, **kwargs: None, "CompositeExplicitAutograd")
    op = torch.ops.attnbackend_benchmark.empty.default
    return statistics.median(
        per_call_us({"op": lambda: op(*[x] * 8, scale=1.0)}, rounds=5, calls=calls)["op"]
    )


def _event_us(run: Callable[[], object], times: int = 10) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times * 1e3


def _measure(
    point: Point, sides: Mapping[str, Any], options: argparse.Namespace, ceilings: dict[str, float]
) -> dict[str, Any]:  # fmt: skip
    inputs = make_inputs(point)
    output = torch.empty_like(inputs.query)
    rows, expected = _expected(point, inputs)
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for name, make in sides.items():
        try:
            run = make(point, inputs, output)
            _judge(run, output, rows, expected, point)
        except (Unserved, AssertionError, RuntimeError, ValueError, TypeError, ImportError) as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            runs[name] = run
    times = {name: _event_us(run, 2) for name, run in runs.items()}
    graphs = {name: _captured(run, int(GRAPH_US / times[name])) for name, run in runs.items()}
    result: dict[str, Any] = {"point": point.name, "automatic": _automatic(point), "refused": refused}
    result["graph_us"] = _graph_medians(graphs, options.rounds)
    if not options.no_eager:
        result["eager_us"] = _eager_medians(runs, times, options.rounds)
    result |= _ratios(result["graph_us"], point, ceilings)
    del runs, graphs, inputs, output
    gc.collect()
    gc.freeze()  # What libraries keep needs no looking at after each point.
    torch.cuda.empty_cache()
    return result


def _automatic(point: Point) -> str:
    """The backend that is chosen where nobody names one."""
    return select_backend(selector_config(point)).name


def _expected(point: Point, inputs: Inputs) -> tuple[slice, Tensor]:
    """Plain attention of the last request, and where its tokens are."""
    batch, last = inputs.common, len(point.seq_lens) - 1
    assert batch.query_start_loc_cpu is not None
    rows = slice(int(batch.query_start_loc_cpu[last]), int(batch.query_start_loc_cpu[last + 1]))
    resolve_backend("TORCH_SDPA")
    op = backend_op("TORCH_SDPA", ATTENTION)
    assert op is not None
    output = torch.empty_like(inputs.query[rows])
    starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device="cuda")
    op(
        inputs.query[rows], None, None, inputs.kv_cache, output, starts, batch.seq_lens[last:],
        batch.block_table[last:], scale=point.params.scale, kv_cache_dtype=point.kv_cache_dtype,
    )  # fmt: skip
    return rows, output


def _judge(run: Run, output: Tensor, rows: slice, expected: Tensor, point: Point) -> None:
    """Raises AssertionError where the output is not all written, or wrong; tests judge how exact it is."""
    output.fill_(float("nan"))
    result = run()
    if result is not None:
        output.copy_(result.reshape(output.shape))
    torch.cuda.synchronize()
    assert bool(output.isfinite().all()), "the output was left NaN in places"
    allowed = (0.02 if point.kv_cache_dtype == "auto" else 0.1) * float(expected.abs().max())
    error = float((output[rows].float() - expected.float()).abs().max())
    assert error <= allowed, f"the output is off by {error:.3g}, where {allowed:.3g} is rounding"


def _captured(run: Run, calls: int = CALLS) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some calls, and how many they are."""
    calls = max(1, min(CALLS, calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph, calls


def _graph_medians(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int) -> dict[str, float]:
    """Microseconds a call; sides take turns, in another order each round.

    A GPU at its power limit is slower behind a side that draws more: in one order that favours some by 5%.
    """
    found: dict[str, list[float]] = {name: [] for name in graphs}
    order, chance = list(graphs), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            graph, calls = graphs[name]
            if calls == 1:
                _settle(graph)
            found[name].append(_event_us(graph.replay, REPLAYS if calls > 1 else 2) / calls)
    return {name: statistics.median(values) for name, values in found.items()}


def _settle(graph: torch.cuda.CUDAGraph) -> None:
    for _ in range(min(10, int(SETTLE_US / _event_us(graph.replay, 1)))):
        graph.replay()


def _eager_medians(runs: Mapping[str, Run], times: Mapping[str, float], rounds: int) -> dict[str, float]:
    counts = {name: max(1, min(EAGER_CALLS, int(LOOP_US / us))) for name, us in times.items()}

    def looped(run: Run, calls: int) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(calls):
                run()
            torch.cuda.synchronize()

        return loop

    loops = {name: looped(run, counts[name]) for name, run in runs.items()}
    take_turns(loops, 1)
    seconds = take_turns(loops, rounds)
    return {name: statistics.median(values) / counts[name] * 1e6 for name, values in seconds.items()}


def _ratios(graph_us: dict[str, float], point: Point, ceilings: dict[str, float]) -> dict[str, Any]:
    pairs = {a: b for a, b in _PAIRS.items() if a in graph_us and b in graph_us}
    found: dict[str, Any] = {"over_direct": {a: graph_us[a] / graph_us[b] for a, b in pairs.items()}}
    peers = {name: us for name, us in graph_us.items() if name in PEERS}
    if peers:
        best = min(peers, key=peers.__getitem__)
        found["best_peer"] = best
        found["speed_of_best_peer"] = {
            name: peers[best] / us for name, us in graph_us.items() if name in OURS
        }
    share = {}
    for name, us in graph_us.items():
        if point.is_decode:
            share[name] = point.cache_bytes / us / 1e6 / ceilings["copy_TBps"]
        else:
            share[name] = point.flops / us / 1e6 / ceilings["matmul_TFLOPs"]
    found["share_of_ceiling"] = share
    return found


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['point']}")
    for name, us in sorted(result["graph_us"].items(), key=lambda item: item[1]):
        eager = result.get("eager_us", {}).get(name)
        ratio, fast = result["over_direct"].get(name), result.get("speed_of_best_peer", {})
        print(
            f"  {name:24}{us:10.1f} us  {result['share_of_ceiling'][name]:6.1%}"
            + (f"  eager {eager:9.1f} us" if eager is not None else "")
            + (f"  {ratio:.3f} of {_PAIRS[name]}" if ratio is not None else "")
            + (f"  {fast[name]:.2f}x of the best peer" if name in fast else "")
        )
    for name, why in result["refused"].items():
        print(f"  {name:24}not measured: {why}")
    print(end="", flush=True)


def _print_summary(results: list[dict[str, Any]]) -> None:
    print("\ngeometric means of graph time over the direct call's")
    for name in _PAIRS:
        ratios = [(r["over_direct"][name], r["point"]) for r in results if name in r["over_direct"]]
        if ratios:
            mean, (worst, where) = statistics.geometric_mean(ratio for ratio, _ in ratios), max(ratios)
            count = f"{len(ratios)} points, worst {worst:.3f}: {where}"
            print(f"  {name:24}{mean:.4f} over {_PAIRS[name]} ({count})")
            extra = [
                r["eager_us"][name] - r["eager_us"][_PAIRS[name]]
                for r in results
                if name in r["over_direct"] and "eager_us" in r
            ]
            if extra:
                print(f"  {'':24}{statistics.median(extra):+.1f} us eager, at most {max(extra):+.1f}")
    print("speed over the fastest peer of each point: geometric mean, and the least")
    for name in (*OURS, "automatic"):
        speeds = [
            (speed, r["point"])
            for r in results
            if (speed := r.get("speed_of_best_peer", {}).get(r.get(name, name))) is not None
        ]
        if speeds:
            mean, (least, where) = statistics.geometric_mean(speed for speed, _ in speeds), min(speeds)
            print(f"  {name:24}{mean:.3f}x ({len(speeds)} points, least {least:.3f}x: {where})")


if __name__ == "__main__":
    main()
