"""`python -m benchmarks.vllm_engine`: vLLM's engine with the model and requests of `benchmarks.decode_step`.

Random weights of the Llama-8B shape in bfloat16; prompts of 1,024 tokens for the decode steps, 8 of 8,192 for
the tokens a second of prompts; greedy; vLLM's own choices but for the backend and the sizes of its graphs,
which are those of the batches. Prints and writes the rounds of the prompts, and the median time between two
steps that each gave every request a token. With ``--folder``, vLLM finds what it compiled for the same folder
before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.environment import describe_environment
from benchmarks.prefill import PrefillSettings
from benchmarks.random_llama import SHAPE
from benchmarks.timing import Spread

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.vllm_engine", description=__doc__)
    parser.add_argument("--backend", help="default: vLLM's choice")
    parser.add_argument("--batch", type=int, action="append", help="requests; default 1, 16, 64, 256")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    for name in ("prompts", "tokens", "rounds"):
        default = getattr(PrefillSettings(), name)
        parser.add_argument(f"--prefill-{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="for the model's config; default: a new one")
    parser.add_argument("--gpu-memory", type=float, default=0.8, help="share of the memory")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/vllm_engine.json"))
    options = parser.parse_args(arguments)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for found in measure(options):  # Written after each part: to be ready takes it minutes.
        result = {"environment": describe_environment(), **found}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.output}")


def measure(options: Any) -> Iterator[dict[str, Any]]:
    """What is known so far, after the prompts and after each number of requests."""
    import vllm

    batches = options.batch or [1, 16, 64, 256]
    started = time.perf_counter()
    engine = _engine(vllm, batches, options)
    config = engine.vllm_config
    found: dict[str, Any] = {
        "vllm": vllm.__version__, "backend": options.backend, "steps": {}, "steps_timed": {},
        "seconds_to_ready": round(time.perf_counter() - started, 1),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    rates = [_prefill(vllm, engine, options) for _ in range(options.prefill_rounds + 1)][1:]
    found["prefill_tokens_per_s"] = asdict(Spread.of(rates))
    print(f"prefill: {Spread.of(rates)} tokens/s", flush=True)
    yield found
    for batch in batches:
        _serve(vllm, engine, batch, 16, 8)
        _, times = _serve(vllm, engine, batch, options.prompt, options.new_tokens)
        found["steps"][batch] = round(1e3 * median(later - sooner for sooner, later in pairwise(times)), 3)
        found["steps_timed"][batch] = len(times) - 1
        print(f"{batch} requests: {found['steps'][batch]} ms a step, of {len(times) - 1}", flush=True)
        yield found


def _engine(vllm: Any, batches: list[int], options: Any) -> Any:
    longest = max(options.prompt + options.new_tokens, options.prefill_tokens + 1)
    chosen = {} if options.backend is None else {"attention_config": {"backend": options.backend}}
    fixed = options.folder
    with tempfile.TemporaryDirectory() if fixed is None else nullcontext(str(fixed)) as folder:
        config = {**SHAPE, "num_hidden_layers": options.layers, "model_type": "llama", "dtype": "bfloat16"}
        config |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = vllm.LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0,
            max_model_len=longest, max_num_seqs=max(batches), enable_prefix_caching=False,
            gpu_memory_utilization=options.gpu_memory, enable_flashinfer_autotune=False,
            compilation_config={"cudagraph_capture_sizes": sorted(batches)}, **chosen,
        )  # fmt: skip
    return llm.llm_engine


def _serve(vllm: Any, engine: Any, requests: int, length: int, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds, and when each step ended that gave every request a token."""
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    params.output_kind = vllm.sampling_params.RequestOutputKind.DELTA
    generator, times = torch.Generator().manual_seed(requests + new_tokens), []
    prompts = torch.randint(0, SHAPE["vocab_size"], (requests, length), generator=generator).tolist()
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        if len(engine.step()) == requests:
            times.append(time.perf_counter())
    return time.perf_counter() - started, times


def _prefill(vllm: Any, engine: Any, options: Any) -> float:
    """Tokens a second."""
    seconds, _ = _serve(vllm, engine, options.prefill_prompts, options.prefill_tokens, 1)
    return float(options.prefill_prompts * options.prefill_tokens / seconds)


if __name__ == "__main__":
    main()
