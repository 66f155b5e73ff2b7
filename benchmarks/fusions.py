"""`python -m benchmarks.fusions`: what each fusion of graph passes is worth in a decode step, on a GPU.

Bfloat16 layers of Llama-8B's shape, of Qwen3-8B's (norms of heads before the rotation) and of
DeepSeek-V2-Lite's (latent attention; dense layers), random weights, a vocabulary of 1,024 so that layers
count; 1,024 tokens of context; 1, 16 and 64 requests. Each side is an engine of its own; what is timed is the
replay of its CUDA graph of a decode step, sides taking turns. Prints and writes medians, and how much less
time a step takes than without the fusion.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from attnbackend.fx_passes import FuseLatentRopeCacheWrite, FuseRopeCacheWrite, GraphPass
from attnbackend.integrations.transformers import TransformersModel

_COMMON: dict[str, Any] = {
    "vocab_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_DENSE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**_DENSE, "intermediate_size": 14336},
    "Qwen3": {**_DENSE, "intermediate_size": 12288},
    "DeepseekV2": {
        "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "first_k_dense_replace": 1000, "n_routed_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}  # fmt: skip
_CONTEXT, _ROUNDS, _REPLAYS = 1024, 15, 10

Sides = dict[str, tuple[bool, Sequence[GraphPass]]]
_ROPE = (FuseRopeCacheWrite(), FuseLatentRopeCacheWrite())
_SIDES: Sides = {
    "nothing": (False, ()),
    "merged linears": (True, ()),
    "merged linears, rope + cache write": (True, _ROPE),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.fusions", description=__doc__)
    parser.add_argument("--model", choices=_MODELS, action="append", help="may be repeated; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--backend", help="default: the automatic choice")
    parser.add_argument("--side", choices=_SIDES, action="append", help="may be repeated; default: all")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of each side")
    parser.add_argument("--output", type=Path, help="default: print only")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    for name in options.model or _MODELS:
        engines = {
            side: _engine(name, *what, options)
            for side, what in _SIDES.items()
            if side in (options.side or _SIDES)
        }
        for batch in options.batch:
            result[f"{name}, batch {batch}"] = found = _measure(engines, batch, options)
            print(f"{name}, batch {batch}: {json.dumps(found)}", flush=True)
            if options.output:
                _write(options, result)
        del engines


def _write(options: Any, result: dict[str, Any]) -> None:
    """After every point: a run that is cut off keeps what it found."""
    from benchmarks.environment import describe_environment

    whole = {"environment": describe_environment(), "layers": options.layers, "us_per_layer": result}
    options.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"written: {options.output}", flush=True)


def _engine(name: str, merges: bool, passes: Sequence[GraphPass], options: Any) -> Engine:
    import transformers

    began = time.perf_counter()
    config = getattr(transformers, f"{name}Config")(
        **_COMMON, **_MODELS[name], num_hidden_layers=options.layers, dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    served = TransformersModel(
        model.eval().requires_grad_(False), passes=passes, merges_linears=merges
    )  # fmt: skip
    most = max(options.batch)
    engine = Engine(
        served, backend=options.backend, max_num_seqs=most, max_num_batched_tokens=8192, max_model_len=2048,
        num_blocks=most * 72 + 1, compile=True, cudagraph_capture_sizes=options.batch,
    )  # fmt: skip
    changes = [str(report).splitlines()[0] for report in served.compiler.reports]
    took = f"{time.perf_counter() - began:.0f} s until captured"
    print(f"{name}: merges_linears={merges}: {took}: {'; '.join(sorted(set(changes)))}", flush=True)
    return engine


def _measure(engines: dict[str, Engine], batch: int, options: Any) -> dict[str, float]:
    """Microseconds a layer (the step's by the number of layers), and gains in percent of the step."""
    replays = {side: _replay_of(engine, batch) for side, engine in engines.items()}
    times: dict[str, list[float]] = {side: [] for side in replays}
    for _ in range(_ROUNDS):
        for side, replay in replays.items():
            times[side].append(_timed(replay))
    medians = {side: 1e3 * median(found) / options.layers for side, found in times.items()}
    sides, found = list(medians), {side: round(us, 2) for side, us in medians.items()}
    for before, after in pairwise(sides):
        gain = median(1 - a / b for a, b in zip(times[after], times[before], strict=True))
        found[f"% less by {after.split(', ')[-1]}"] = round(100 * gain, 2)
    if options.profile:
        for side, replay in replays.items():
            _print_kernels(f"{side}, batch {batch}", replay)
    for engine in engines.values():
        for request in list(engine._progress):
            engine.abort(request)
    return found


def _replay_of(engine: Engine, batch: int) -> Callable[[], None]:
    """The graph of a step of ``batch`` requests in the middle of their answers."""
    generator = torch.Generator().manual_seed(batch)
    for _ in range(batch):
        prompt = torch.randint(0, 1024, (_CONTEXT,), generator=generator).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
    if not any(len(engine.step()) == batch for _ in range(2 * batch + 20)):
        raise RuntimeError(f"{batch} requests never made a step together; waiting or preempted")
    for _ in range(3):
        engine.step()
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    key = [key for key in graphs.steps.num_replays if key.descriptor == (batch, batch, True)][-1]
    return graphs.steps._captured[key].graph.replay


def _print_kernels(title: str, replay: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    print(f"kernels of {title}:")
    for row in sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total):
        print(f"{row.self_device_time_total:9.1f} us {row.count:5d} x {row.key[:110]}", flush=True)


def _timed(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / _REPLAYS


if __name__ == "__main__":
    main()
