"""``attnbackend bench serve``: requests as users send them, and what they wait for."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbackend.cli import EXIT_NOT_POSSIBLE
from attnbackend.cli.choices import backend_choice, kv_cache_dtype_choice
from attnbackend.cli.errors import UserError, user_errors
from attnbackend.cli.options import (
    BackendName,
    BlockSize,
    Device,
    Dtype,
    ModelPath,
    NumSpeculativeTokens,
    Quiet,
)
from attnbackend.cli.stages import Stages

if TYPE_CHECKING:
    from attnbackend.bench import ServeReport, ServeRun, TraceRequest
    from attnbackend.runtime import Engine

__all__ = ["bench"]

bench = typer.Typer(help="Measure an engine.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure an engine."""


_Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="JSONL",
        help="Requests of a file: max_tokens, one of prompt, prompt_token_ids and prompt_len, and "
        "arrival_s. Default: random ones, as the next options say.",
    ),
]
_Requests = Annotated[int | None, typer.Option(min=1, help="Random requests. Default: 64.")]
_Rate = Annotated[float | None, typer.Option(help="Requests a second, Poisson. Default: all come at once.")]
_PromptLen = Annotated[str | None, typer.Option(metavar="N|LOW-HIGH", help="Tokens a prompt. Default: 128.")]
_OutputLen = Annotated[str | None, typer.Option(metavar="N|LOW-HIGH", help="Tokens an output. Default: 32.")]
_Seed = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")]
_MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Most requests running at a time.")]
_MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Most tokens a step.")]
_MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a request. Default: what the trace needs.")
]
_NumBlocks = Annotated[int | None, typer.Option(min=2, help="Blocks of the KV cache.")]
_KVCacheDtype = Annotated[str, typer.Option(metavar="DTYPE", help="Such as fp8.")]
_CompileModel = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the model. Default: on a GPU."),
]
_CudagraphMode = Annotated[str | None, typer.Option(metavar="MODE", help="Default: as much as is possible.")]
_Ahead = Annotated[
    bool | None,
    typer.Option("--ahead/--no-ahead", help="Start steps ahead of their tokens. Default: on a GPU."),
]
_Speculative = Annotated[str | None, typer.Option(metavar="METHOD", help="Such as ngram.")]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw it, such as serve.png; needs matplotlib.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@bench.command()
def serve(
    model: ModelPath = None,
    trace: _Trace = None,
    requests: _Requests = None,
    rate: _Rate = None,
    prompt_len: _PromptLen = None,
    output_len: _OutputLen = None,
    seed: _Seed = 0,
    backend: BackendName = None,
    max_num_seqs: _MaxNumSeqs = 64,
    max_num_batched_tokens: _MaxNumBatchedTokens = 2048,
    max_model_len: _MaxModelLen = None,
    num_blocks: _NumBlocks = None,
    block_size: BlockSize = 16,
    kv_cache_dtype: _KVCacheDtype = "auto",
    compile_model: _CompileModel = None,
    cudagraph_mode: _CudagraphMode = None,
    ahead: _Ahead = None,
    speculative: _Speculative = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    dtype: Dtype = "auto",
    device: Device = None,
    plot: _Plot = None,
    as_json: _AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Serve a trace of requests and report rates, latencies and the use of graphs.

    Every request generates all its tokens: the end-of-sequence token does not end it.
    """
    with user_errors(), Stages(quiet) as stages:
        from attnbackend.runtime.speculation import drafts_of

        _check_plot(plot)
        random_ones = {
            "--requests": requests, "--rate": rate, "--prompt-len": prompt_len, "--output-len": output_len,
        }  # fmt: skip
        _check_trace(trace, random_ones)
        engine_options: dict[str, Any] = {
            "backend": backend_choice(backend), "block_size": block_size, "num_blocks": num_blocks,
            "kv_cache_dtype": kv_cache_dtype_choice(kv_cache_dtype), "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "cudagraph_mode": cudagraph_mode,
            "async_scheduling": ahead, "speculative": speculative,
            "num_speculative_tokens": num_speculative_tokens,
        }  # fmt: skip
        drafts_of(speculative, num_speculative_tokens)
        stages("importing torch")
        from attnbackend.integrations.loading import load_model

        loaded = load_model(model, dtype=dtype, device=device, on_stage=stages)
        vocab_size = loaded.model.config.get_text_config().vocab_size
        sent = _trace(trace, random_ones, vocab_size, seed)
        engine_options |= {
            "max_model_len": max_model_len or _longest(sent, loaded.tokenizer),
            "compile": loaded.model.device.type != "cpu" if compile_model is None else compile_model,
        }
        run, engine = _run(loaded, engine_options, sent, stages)
        _report(run, engine, loaded.name, plot, as_json)


def _check_plot(plot: Path | None) -> None:
    """Before minutes of work are lost."""
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; install with `pip install matplotlib`")
    if not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist")


def _check_trace(trace: Path | None, random_ones: dict[str, Any]) -> None:
    given = [name for name, value in random_ones.items() if value is not None]
    if trace is not None and given:
        raise UserError(f"--trace says which requests come, so {', '.join(given)} would have no effect")


def _trace(file: Path | None, random_ones: dict[str, Any], vocab_size: int, seed: int) -> list[TraceRequest]:
    from attnbackend.bench import Lengths, read_trace, synthetic_trace

    if file is not None:
        return read_trace(file, vocab_size=vocab_size, seed=seed)
    rate = random_ones["--rate"]
    return synthetic_trace(
        random_ones["--requests"] or 64,
        Lengths.parse(random_ones["--prompt-len"] or "128", "--prompt-len"),
        Lengths.parse(random_ones["--output-len"] or "32", "--output-len"),
        rate=math.inf if rate is None else rate, vocab_size=vocab_size, seed=seed,
    )  # fmt: skip


def _longest(trace: list[TraceRequest], tokenizer: Any) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(
        request.max_tokens
        + len(tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt)
        for request in trace
    )


def _run(
    loaded: Any, engine_options: dict[str, Any], trace: list[TraceRequest], stages: Stages
) -> tuple[ServeRun, Engine]:
    from attnbackend.bench import run_trace
    from attnbackend.runtime import Engine, SamplingParams

    stages("preparing the engine")
    engine = Engine(loaded.model, loaded.tokenizer, **engine_options)
    stages("warming up")
    engine.generate([trace[0].prompt], SamplingParams(max_tokens=min(2, trace[0].max_tokens)))
    stages(f"serving {len(trace)} requests")
    return run_trace(engine, trace), engine


def _report(run: ServeRun, engine: Engine, name: str, plot: Path | None, as_json: bool) -> None:
    from attnbackend.bench import ServeReport

    report = ServeReport.of(run)
    if plot is not None:
        from attnbackend.bench.plot import draw

        draw(run, plot, f"{name}: {report.requests} requests, {report.tokens_per_s:.1f} tokens/s")
    stats = None if engine.proposer is None else engine.proposer.stats
    if as_json:
        typer.echo(json.dumps(_as_json(report, name, stats)))
    else:
        typer.echo(str(report))
        if stats is not None:
            typer.echo(f"speculation          {stats}")
    if report.failed:
        raise typer.Exit(EXIT_NOT_POSSIBLE)


def _as_json(report: ServeReport, name: str, stats: Any) -> dict[str, Any]:
    speculation = None if stats is None else vars(stats) | {"acceptance_rate": stats.acceptance_rate}
    return {"model": name, **report.as_dict(), "speculation": speculation}
