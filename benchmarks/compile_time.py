"""`python -m benchmarks.compile_time`: seconds until a decoder stack of 2, 8 and 32 layers has run once.

Each figure comes from a process of its own: cold, with empty compile caches; warm, with those that the cold
one left on disk. "layer by layer" is `attnbackend.compile_layers`, where equal layers share a compilation;
"whole" is `attnbackend.compile` of all layers as one graph, "whole in pieces" cuts that graph at attention
and compiles equal pieces once. Then the compiled model moves to another backend (`fx_passes.retarget`).
"cpu_s" is the processor time of compiling, which a busy machine changes less. Prints a table, and writes it
where asked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_WAYS = ("layer by layer", "whole", "whole in pieces")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--way", choices=_WAYS, action="append", help="may be repeated; default: all")
    parser.add_argument("--cold", action="store_true", help="no warm start after each cold one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--other-backend", default="TORCH_SDPA", help="where compiled models are moved to")
    parser.add_argument("--output", type=Path, help="default: print only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_measure(**json.loads(options.one))))
        return
    rows = []
    for way in options.way or _WAYS:
        for layers in options.layers:
            rows += _cold_and_warm(way, layers, options)
    if options.output:
        from benchmarks.environment import describe_environment

        result = {"environment": describe_environment(), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {options.output}")


def _cold_and_warm(way: str, layers: int, options: Any) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for start in ("cold",) if options.cold else ("cold", "warm"):
            row = {
                "way": way,
                "layers": layers,
                "start": start,
                **_in_a_process(way, layers, options, folder),
            }
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            rows.append(row)
    return rows


def _in_a_process(way: str, layers: int, options: Any, folder: str) -> dict[str, float]:
    asked = {"way": way, "layers": layers, "device": options.device, "other": options.other_backend}
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", json.dumps(asked)]
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(way: str, layers: int, device: str, other: str) -> dict[str, float]:
    import attnbackend
    from attnbackend.fx_passes import retarget
    from benchmarks.llama_stack import LLAMA_8B, TINY, LlamaStack, decode_step

    is_gpu = device != "cpu"
    shape, dtype = (LLAMA_8B, torch.bfloat16) if is_gpu else (TINY, torch.float32)
    stack = LlamaStack(shape, layers, device=device, dtype=dtype, num_blocks=64)
    step = decode_step(shape, 4, 100, device=device, dtype=dtype)
    started = time.perf_counter()
    run: Any = stack
    if way != "layer by layer":
        in_pieces = way == "whole in pieces"
        run = handle = attnbackend.compile(stack, fullgraph=True, dynamic=True, in_pieces=in_pieces)
    else:
        handle = attnbackend.compile_layers(list(stack.layers), fullgraph=True, dynamic=True)
    cpu_before = _cpu_seconds()
    compiled = _timed(lambda: run(*step), started)
    cpu = round(_cpu_seconds() - cpu_before, 4)
    moved = _timed(lambda: retarget(handle, other), time.perf_counter())
    run(*step)
    again = _timed(lambda: run(*step), time.perf_counter())
    return {"compile_s": compiled, "cpu_s": cpu, "retarget_s": moved, "step_s": again}


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it started."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def _timed(work: Any, started: float) -> float:
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 4)


if __name__ == "__main__":
    main()
