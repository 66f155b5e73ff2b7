"""`python -m benchmarks.host_steps`: what the host does between two decode steps, the model left out.

A stand-in takes the model's place: its graph does nothing when it is replayed, and its logits are numbers
made beforehand, with their greedy choice. What remains is scheduling, the input batch, the checks of a
replay, sampling where it is not greedy, and outputs. It runs on a CPU, over a small vocabulary. With
``--wait``, each step follows a pause, as behind a device that is busy: little of what it needs is in a near
cache then.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbackend import AttentionSelectorConfig, SamplingParams
from attnbackend.registry import register_backend, registry_scope
from attnbackend.runtime import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.served_model import AttentionLayer, BatchTensors, BoundLayer
from attnbackend.runtime.step_graphs import GraphOptions
from attnbackend.testing.conformance.honest import HonestBackend
from benchmarks.environment import describe_environment
from benchmarks.timing import Spread

_PROMPT, _WARM_UPS, _VOCAB, _END = 60, 20, 32, 0


class NoModel:
    """A model that computes nothing: one layer of attention for the plans, and logits made beforehand."""

    vocab_size, max_model_len = _VOCAB, 2048
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, max_num_seqs: int) -> None:
        self.logits = torch.randn(max_num_seqs, _VOCAB, generator=torch.Generator().manual_seed(0))
        self.logits[:, _END] = -torch.inf

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        config = AttentionSelectorConfig.dense(
            device_type="cpu", head_size=32, num_heads=1, num_kv_heads=1, dtype=self.dtype
        )  # fmt: skip
        return {"layer": AttentionLayer(config, 1.0)}

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        pass

    def compile(self, backend: str | None, *, in_pieces: bool = False) -> None:
        pass

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        return self.logits[: len(logits_indices)]


class _NoGraph:
    num_bytes, warm_up_seconds = 0, 0.0

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def replay(self) -> None:
        pass


class _NoGraphs:
    def capture(self, work: Callable[[], Tensor], **options: bool) -> _NoGraph:
        return _NoGraph(work())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.host_steps", description=__doc__)
    parser.add_argument("--requests", type=int, action="append", help="may be repeated; default 1, 16, 64")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wait", type=float, default=0.0, help="milliseconds before each step")
    parser.add_argument("--profile", action="store_true", help="print the functions that take longest")
    parser.add_argument("--output", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"environment": describe_environment(), "host_us_a_step": {}}
    for kind, params in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_k": 20, "seed": 1})):
        for requests in options.requests or [1, 16, 64]:
            spread = measure(requests, options.steps, params, options.profile, 1e-3 * options.wait)
            print(f"{requests:3} requests, {kind:7}: {spread} us a step", flush=True)
            result["host_us_a_step"][f"{kind} {requests}"] = asdict(spread)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    requests: int, steps: int, params: dict[str, Any], profile: bool = False, wait: float = 0.0
) -> Spread:  # fmt: skip
    """Microseconds of `step`, in steady decode of so many requests, each after a wait of so many seconds."""
    with registry_scope():
        engine = _engine(requests)
        for i in range(requests):
            engine.add_request(
                [1 + i % 9] * (_PROMPT + i % 16),
                SamplingParams(max_tokens=steps + _WARM_UPS + 9, **params),
            )
        for _ in range(_WARM_UPS):
            engine.step()
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        times = [_timed(engine, requests, wait) for _ in range(steps)]
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return Spread.of(times)


def _engine(requests: int) -> EngineCore:
    name = register_backend("HONEST")(HonestBackend).get_name()
    runner = build_runner(
        NoModel(requests), backend=name, max_num_seqs=requests, compile=False, num_blocks=requests * 64 + 1,
        graphs=GraphOptions(library=lambda device: _NoGraphs()),
    )  # fmt: skip
    return EngineCore(runner, max_num_seqs=requests, eos_token_ids=[_END])


def _timed(engine: EngineCore, requests: int, wait: float) -> float:
    until = time.perf_counter() + wait
    while (started := time.perf_counter()) < until:  # As torch waits for an event.
        pass
    outputs = engine.step()
    elapsed = time.perf_counter() - started
    assert len(outputs) == requests, f"{len(outputs)} of {requests} requests got a token"
    return elapsed * 1e6


if __name__ == "__main__":
    main()
