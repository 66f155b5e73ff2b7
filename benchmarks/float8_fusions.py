"""`python -m benchmarks.float8_fusions`: attention beside conversions to float8, on a GPU.

A decode step of one layer of Llama-8B's shape over a paged cache, whose output is wanted in float8, with one
scale or with one for each head of a token (`FuseOutputQuantization`), or whose query is (`QuantizeQueries`).
Each is compiled by Inductor without and with the pass; the kernels of a CUDA graph of it are listed, and the
sides' replays take turns.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnbackend
from attnbackend import CommonAttentionMetadata, ForwardContext, resolve_backend, set_forward_context
from attnbackend.fx_passes import FuseOutputQuantization, GraphPass, QuantizeQueries, SelectBackend
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import spec_of
from attnbackend.layers import BatchTensors, BoundLayer
from attnbackend.layers.paged import write_and_attend
from benchmarks.llama_stack import LLAMA_8B, TINY, LlamaShape, decode_step

_CONTEXT, _ROUNDS, _REPLAYS = 1024, 15, 20
_FLOAT8 = torch.float8_e4m3fn


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: BoundLayer, batch: BatchTensors) -> Tensor:
    return write_and_attend(q, k, v, layer, batch, scale=q.shape[-1] ** -0.5).flatten(1)


def one_scale(
    q: Tensor, k: Tensor, v: Tensor, layer: BoundLayer, scale: Tensor, batch: BatchTensors
) -> Tensor:
    return _to_float8(_attend(q, k, v, layer, batch).float() / scale)


def a_scale_a_head(
    q: Tensor, k: Tensor, v: Tensor, layer: BoundLayer, scale: Tensor, batch: BatchTensors
) -> tuple[Tensor, Tensor]:
    groups = _attend(q, k, v, layer, batch).unflatten(-1, (-1, q.shape[-1])).float()
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / torch.finfo(_FLOAT8).max
    return _to_float8(groups / scales).flatten(1), scales.squeeze(-1)


def float8_cache(
    q: Tensor, k: Tensor, v: Tensor, layer: BoundLayer, scale: Tensor, batch: BatchTensors
) -> Tensor:
    """The query comes of a product with angles, as from a rotation."""
    return _attend(q * scale.to(q.dtype) * 100, k, v, layer, batch)


def _to_float8(x: Tensor) -> Tensor:
    limits = torch.finfo(_FLOAT8)
    return x.clamp(limits.min, limits.max).to(_FLOAT8)


class Case(NamedTuple):
    step: Callable[..., Any]
    backend: str
    fusion: Callable[[], GraphPass]
    kv_cache_dtype: str = "auto"


CASES = {
    "output, one scale": Case(one_scale, "TRITON_ATTN", FuseOutputQuantization),
    "output, a scale for each head": Case(a_scale_a_head, "TRITON_ATTN", FuseOutputQuantization),
    "query": Case(float8_cache, "FLASH_ATTN", QuantizeQueries, "fp8_e4m3"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.float8_fusions", description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="may be repeated; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--device", default="cuda", help="cpu: runs once, in a tiny shape, without figures")
    parser.add_argument("--output", type=Path, help="default: print only")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    for name in options.case or CASES:
        case = CASES[name]
        if options.device == "cpu" and case.backend == "FLASH_ATTN":
            case = case._replace(backend="TORCH_SDPA")
        with attnbackend.set_config(flash_attn_fp8=True), torch.no_grad():
            sides = {
                "apart": _compiled(case, options.device, []),
                "fused": _compiled(case, options.device, [case.fusion()]),
            }
            for batch in options.batch:
                found = _measure(sides, case, batch, options.device)
                result[f"{name}, batch {batch}"] = {"backend": case.backend, **found}
                print(f"{name}, batch {batch}: {json.dumps(found, indent=1)}", flush=True)
    if options.output:
        from benchmarks.environment import describe_environment

        whole = {"environment": describe_environment(), "context": _CONTEXT, "us": result}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"written: {options.output}")


def _compiled(case: Case, device: str, passes: list[GraphPass]) -> Any:
    compiler = "inductor" if device == "cuda" else "aot_eager"
    return attnbackend.compile(
        case.step, passes=[SelectBackend(case.backend), *passes], compiler=compiler, dynamic=True
    )


def _measure(sides: dict[str, Any], case: Case, batch: int, device: str) -> dict[str, Any]:
    shape = LLAMA_8B if device == "cuda" else TINY
    *tensors, context = _inputs(shape, case, batch, device)
    with set_forward_context(context):
        results = {name: side(*tensors) for name, side in sides.items()}
        found: dict[str, Any] = {"differ": _differ(*results.values())}
        if device == "cuda":
            replays = {name: _graph_of(lambda side=side: side(*tensors)) for name, side in sides.items()}
            found["kernels"] = {name: _kernels(replay) for name, replay in replays.items()}
            found |= _timed(replays)
    found["passes"] = str(sides["fused"].attnbackend_compiler.reports[-1])
    return found


def _inputs(shape: LlamaShape, case: Case, batch: int, device: str) -> tuple[Any, ...]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    context = _CONTEXT if device == "cuda" else 40
    *_, tensors = decode_step(shape, batch, context, device=device, dtype=dtype)
    q, k, v = (
        torch.randn(batch, heads, shape.head_size, device=device, dtype=dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    blocks = batch * (context // 16 + 1) + 1
    cache = torch.randn(blocks, 2, 16, shape.kv_heads, shape.head_size, device=device, dtype=dtype)
    cache = cache.to(_FLOAT8) if case.kv_cache_dtype != "auto" else cache
    layer = BoundLayer(cache, case.kv_cache_dtype, group=0)
    plans = ForwardContext({(0, case.backend): _plan(shape, case, q, tensors)})
    return q, k, v, layer, torch.tensor([0.01], device=device), tensors, plans


def _plan(shape: LlamaShape, case: Case, query: Tensor, batch: BatchTensors) -> Any:
    params = AttentionParams(
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_size=shape.head_size, dtype=query.dtype,
        kv_cache_dtype=case.kv_cache_dtype, block_size=16, device_type=query.device.type,
        scale=shape.head_size**-0.5,
    )  # fmt: skip
    builder = resolve_backend(case.backend).get_builder_cls()(params, spec_of(params), None, query.device)
    common = CommonAttentionMetadata.from_tensors(
        batch.query_start_loc, batch.seq_lens, batch.block_table, num_tokens=len(query), block_size=16
    )
    return builder.build(0, common.replace(max_query_len=1))


def _differ(apart: Any, fused: Any) -> list[float]:
    """The largest difference of each result, as a share of the largest value."""
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (apart, fused)), strict=True)
    return [round(float((a.float() - b.float()).abs().max() / a.float().abs().max()), 5) for a, b in pairs]


def _graph_of(run: Callable[[], Any]) -> Callable[[], None]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _kernels(replay: Callable[[], None]) -> list[str]:
    """What one replay runs, with its microseconds, in order."""
    replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [f"{event.name[:100]}: {event.self_device_time_total:.1f}" for event in events]


def _timed(replays: dict[str, Callable[[], None]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(_ROUNDS):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            begin.record()
            for _ in range(_REPLAYS):
                replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / _REPLAYS)
    return {name: round(median(found), 2) for name, found in times.items()}


if __name__ == "__main__":
    main()
