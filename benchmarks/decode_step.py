"""`python -m benchmarks.decode_step`: decode steps of a Llama-8B-shaped random model on a GPU.

Bfloat16, hidden 4096, 32 layers, 32/8 heads of 128, ffn 14336, vocabulary 128256; prompts of 1,024 tokens.
Prints and writes, for each number of requests: the median time of a whole engine step (batch preparation,
plans, replay, sampling, results on the host), what the host does in it but wait, the time of its graph alone,
what lies between two graphs on the device's time line (sampling, copies, plans, idling), and what the graphs
cost to capture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from benchmarks.environment import describe_environment
from benchmarks.graph_gaps import graph_gaps

_SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
_PROMPT, _STEPS, _WARM_UPS = 1024, 48, 8


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
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decode_step.json"))
    options = parser.parse_args(arguments)
    model = random_llama(options.layers)
    result: dict[str, Any] = {"environment": describe_environment(), "backends": {}}
    for backend in options.backend or [None]:
        found = measure_backend(model, backend, options.batch or [1, 16, 64, 256], options)
        result["backends"][backend or "automatic"] = found
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.output}")


def random_llama(layers: int) -> Any:
    """The model with random weights, made on the GPU."""
    import transformers

    config = transformers.LlamaConfig(**{**_SHAPE, "num_hidden_layers": layers}, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def measure_backend(model: Any, backend: str | None, batches: list[int], options: Any) -> dict[str, Any]:
    started = time.perf_counter()
    engine = Engine(
        model, backend=backend, max_num_seqs=max(batches), max_num_batched_tokens=8192, max_model_len=2048,
        num_blocks=max(batches) * 72 + 1, compile=options.compile, cudagraph_mode=options.mode,
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
        found["capture_gib"] = round(report.num_bytes / 2**30, 3)
        if options.captures:
            print(report, flush=True)
    print(json.dumps(found), flush=True)
    found["steps"] = {}
    for batch in batches:
        found["steps"][batch] = measure_batch(engine, batch, options.profile)
        print(found["backend"], batch, json.dumps(found["steps"][batch]), flush=True)
    return found


def _backends(engine: Engine) -> str:
    groups = engine.runner.groups  # type: ignore[attr-defined]
    return ", ".join(sorted({group.backend.get_name() for group in groups}))


def measure_batch(engine: Engine, batch: int, profile: bool = False) -> dict[str, float]:
    """Milliseconds of a pure decode step, and tokens/s of the prefill before it."""
    generator = torch.Generator().manual_seed(batch)
    for _ in range(batch):
        prompt = torch.randint(0, 128256, (_PROMPT,), generator=generator).tolist()
        engine.add_request(
            prompt, SamplingParams(max_tokens=_STEPS + _WARM_UPS + batch // 8 + 2, ignore_eos=True)
        )
    torch.cuda.synchronize()
    started = time.perf_counter()
    while len(engine.step()) < batch:
        pass
    prefill = batch * _PROMPT / (time.perf_counter() - started)
    with graph_gaps() as gaps:
        times, waits = _time_steps(engine, batch)
    host = [step - wait for step, wait in zip(times, waits, strict=True)]
    result = {
        "step_ms": round(1e3 * median(times), 3),
        "host_us": round(1e6 * median(host)),
        "prefill_tokens_per_s": round(prefill),
    }
    replay = _replay_ms(engine, batch)
    if replay is not None:
        between = gaps.microseconds()
        result["between_graphs_us"] = round(between)
        result["between_graphs_share"] = round(between / (between + 1e3 * replay), 4)
    if profile:
        print_kernels(engine)
    for request in list(engine._progress):
        engine.abort(request)
    return {**result, **({} if replay is None else {"graph_ms": replay})}


def _time_steps(engine: Engine, batch: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and those among them that the host only waited for the device."""
    from attnbackend.runtime.started_step import StartedStep

    times, waits, wait = [], [0.0], StartedStep.wait

    def timed(step: StartedStep) -> None:
        started = time.perf_counter()
        wait(step)
        waits[-1] += time.perf_counter() - started

    StartedStep.wait = timed  # type: ignore[method-assign]
    try:
        for _ in range(_WARM_UPS + _STEPS):
            started = time.perf_counter()
            assert len(engine.step()) == batch
            times.append(time.perf_counter() - started)
            waits.append(0.0)
    finally:
        StartedStep.wait = wait  # type: ignore[method-assign]
    return times[_WARM_UPS:], waits[_WARM_UPS:-1]


def print_kernels(engine: Engine) -> None:
    """The kernels of one step by total time, in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:25]:
        print(f"{row.self_device_time_total:9.1f} us {row.count:5d} x {row.key[:110]}")


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
