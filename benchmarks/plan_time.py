"""`python -m benchmarks.plan_time`: host time of a step's plan for decode batches, on a GPU.

Medians of 200 builds into the buffers that a CUDA graph reads, for 256 requests of 1,024 tokens. torch is
told to fail where a build waits for the device, but for FlashInfer, whose own ``plan`` is measured beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attnbackend import resolve_backend
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from benchmarks.attention_grid import Point, make_inputs
from benchmarks.attention_sides import Unserved, flashinfer_plan
from benchmarks.environment import describe_environment

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASH_ATTN+TRITON_ATTN", "FLASHINFER")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser("python -m benchmarks.plan_time", description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rows = options.requests
    point = Point(work="decode", query_lens=(1,) * rows, seq_lens=(1024,) * rows)
    found = {name: _median_us(_builder(name, point), may_wait=name == "FLASHINFER") for name in BACKENDS}
    try:
        found["FlashInfer's plan"] = _median_us(flashinfer_plan(point, make_inputs(point)), may_wait=True)
    except Unserved as error:
        print(f"FlashInfer's plan: {error}")
    for name, us in found.items():
        print(f"{name:24}{us:8.1f} us for {rows} requests")
    if options.output:
        record = {"environment": describe_environment(), "requests": rows, "microseconds": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def _builder(name: str, point: Point) -> Callable[[], object]:
    inputs = make_inputs(point)
    limits = BatchLimits(len(point.seq_lens), len(point.seq_lens), max(point.seq_lens))
    builder = resolve_backend(name).get_builder_cls()(
        point.params, spec_of(point.params), limits, inputs.query.device
    )
    builder.build_for_cudagraph_capture(inputs.common)
    return lambda: builder.build(0, inputs.common)


def _median_us(build: Callable[[], object], may_wait: bool = False) -> float:
    times = []
    for _ in range(220):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
        started = time.perf_counter()
        build()
        times.append(time.perf_counter() - started)
        torch.cuda.set_sync_debug_mode("default")
    return 1e6 * statistics.median(times[20:])


if __name__ == "__main__":
    main()
