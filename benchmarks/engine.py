"""`python -m benchmarks.engine`: the engine against transformers' `generate`, and its own overheads.

All in one process on the CPU; prints a summary and writes a JSON file and a plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment
from benchmarks.host_time import StepTimes, measure_steps
from benchmarks.op_overhead import OpOverhead, measure_ops
from benchmarks.subjects import Subject, load_subject, tiny_subject
from benchmarks.throughput import Comparison, ThroughputSettings, compare

_RESULTS = Path(__file__).resolve().parent / "results"
_STEP_REQUESTS = (1, 8, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib: pip install matplotlib, or give --no-plot")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    subject = tiny_subject() if options.quick else load_subject(options.model)
    result = _measure(subject, options)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{options.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {file}")
    if options.plot:
        from benchmarks.engine_plot import draw

        draw(result, file.with_suffix(".png"))
        print(f"written: {file.with_suffix('.png')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.engine", description=__doc__)
    add = parser.add_argument
    add("--model", help="folder or GGUF file; default: the packaged model")
    add("--quick", action="store_true", help="a tiny random model, few tokens, nothing compiled")
    add("--batch", type=_positive, action="append", help="requests at a time; default: 1 and 8")
    add("--new-tokens", type=_positive, default=64, help="tokens a request (default %(default)s)")
    add("--rounds", type=_positive, default=7, help="timed runs a side (default %(default)s)")
    add("--threads", type=_positive, help="torch's threads; default: torch's own choice")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--freeze", action="store_true", help="compile transformers' side with Inductor's freezing")
    add("--plot", action=argparse.BooleanOptionalAction, default=True)
    add("--output", type=Path, default=_RESULTS, help="folder (default %(default)s)")
    add("--name", default="engine", help="name of the files (default %(default)s)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _settings(options: argparse.Namespace) -> ThroughputSettings:
    if options.quick:
        return ThroughputSettings(new_tokens=4, rounds=2, warmups=1, compile=False)
    return ThroughputSettings(
        batches=tuple(options.batch or (1, 8)),
        new_tokens=options.new_tokens,
        rounds=options.rounds,
        compile=options.compile,
        freeze=options.freeze,
    )


def _measure(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    settings = _settings(options)
    environment = describe_environment()
    print(f"{subject.name} float32, {environment['cpu']}, {environment['threads']} threads")
    rounds, calls, steps = (3, 20, 3) if options.quick else (15, 500, 30)
    overheads = measure_ops(rounds=rounds, calls=calls)
    _print_overheads(overheads)
    times = measure_steps(subject, _STEP_REQUESTS, steps=steps, compile=settings.compile)
    _print_times(times)
    comparisons = compare(subject, settings)
    _print_comparisons(comparisons)
    return {
        "environment": environment,
        "model": subject.name,
        "prompt_lengths": [len(prompt) for prompt in subject.prompts],
        "settings": asdict(settings) | {"quick": options.quick},
        "throughput": [c.as_dict() for c in comparisons],
        "op_overhead": [o.as_dict() for o in overheads],
        "host_time": [t.as_dict() for t in times],
    }


def _print_overheads(overheads: Sequence[OpOverhead]) -> None:
    print("\nmicroseconds a call on one token: op, direct call, overhead; median (min .. max)")
    for o in overheads:
        mode = "inference mode" if o.inference_mode else "normal mode"
        how = mode + (", planned" if o.planned else "")
        print(f"  {o.op:20} {how:24} {o.op_us!s:>24} {o.direct_us!s:>24} {o.overhead_us!s:>24}")


def _print_times(times: Sequence[StepTimes]) -> None:
    print("\nmicroseconds a decode step: all, outside the model, preparing the batch, plans")
    for t in times:
        parts = (t.step_us, t.outside_model_us, t.prepare_us, t.plan_us)
        print(f"  {t.requests:3} requests " + " ".join(f"{part!s:>30}" for part in parts))


def _print_comparisons(comparisons: Sequence[Comparison]) -> None:
    print("\ngenerated tokens/s: engine, transformers, ratio; leading tokens equal")
    for c in comparisons:
        parts = (c.engine, c.transformers, c.ratio)
        spreads = " ".join(f"{part!s:>26}" for part in parts)
        print(f"  batch {c.batch:2} {c.mode:9}{spreads}  {c.leading_tokens_equal}")


if __name__ == "__main__":
    main()
