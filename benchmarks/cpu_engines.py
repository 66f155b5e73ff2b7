"""The engine on CPUs against vLLM's and transformers' `generate`, each in a process of its own, taking turns.

    python -m benchmarks.cpu_engines MODEL_FOLDER --peer VENV --threads 1 --json FILE

Every round runs each side once on the same random prompts. Prefill is the steps up to the last request's
first token, decode the median of all later ones. Rates are tokens per second, by the wall and, which other
processes disturb less, of processor time; medians of rounds. Ratios are taken within rounds.

Cells that FILE has already are left out, and with ``--seconds`` none is begun after so long: call it again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.timing import Spread

_WORKER = Path(__file__).with_name("cpu_engine_worker.py")
_VLLM = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip

_PAUSE_S = 0.3
"""Before a turn: idle threads of the side before, as of vLLM's OpenMP, may spin for another 0.2 s."""
_CLOCKS = ("", " (processor)")


class Side:
    """A worker process."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        python = sys.executable
        if name == "vllm":
            python = str(options.peer / "bin" / "python")
            environment |= _VLLM | {"LD_PRELOAD": str(options.peer / "lib" / "libiomp5.so"), "PYTHONPATH": ""}
        self.name, self._log = name, options.log
        self._process = subprocess.Popen(
            [python, str(_WORKER), name, str(options.model), options.dtype, options.mode], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=options.log, env=environment,
        )  # fmt: skip
        self.load_s = self._answer()["load_s"]

    def run(self, batch: int, context: int, new_tokens: int) -> list[tuple[float, float]]:
        """Seconds of each step, by the wall and of the processor."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch, context, new_tokens]) + "\n")
        self._process.stdin.flush()
        steps: list[tuple[float, float]] = self._answer()["steps"]
        return steps

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
        raise RuntimeError(f"the {self.name} side ended; see {self._log.name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    options = _parser().parse_args(arguments)
    start = time.perf_counter()
    cells = _known(options.json)
    grid = [
        {"batch": b, "context": c} for b in options.batch or (1, 8) for c in options.context or (128, 2048)
    ]
    what = {
        "model": options.model.name,
        "dtype": options.dtype,
        "mode": options.mode,
        "threads": options.threads,
    }
    missing = [
        what | cell for cell in grid if not any((what | cell).items() <= known.items() for known in cells)
    ]
    if not missing:
        return print("measured before: all of it")
    with open(options.log_file, "a") as options.log:
        names = ["attnbackend", *(["vllm"] if options.peer else []), *(options.also or [])]
        sides = [Side(name, options) for name in names]
        print("tokens/s, median of rounds (min .. max); ratio of attnbackend to the side, within rounds")
        try:
            for cell in missing:
                if time.perf_counter() - start < options.seconds:
                    cells.append(_measure(sides, cell, options))
                    _write(cells, options.json)
        finally:
            for side in sides:
                side.close()


def _known(file: Path | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["cells"] if file and file.exists() else []
    return found


def _write(cells: list[dict[str, Any]], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
        print(f"written: {file}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cpu_engines", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("model", type=Path, help="folder of a transformers model")
    add("--peer", type=Path, help="virtual environment with vllm-cpu; default: without vLLM")
    add("--peer-version", default="vllm-cpu 0.32.0", help="for the record (default %(default)s)")
    add("--also", action="append", choices=["transformers"], help="another side")
    add("--dtype", default="float32")
    add("--mode", choices=["compiled", "eager"], default="compiled")
    add("--threads", type=int, default=1)
    add("--batch", type=int, action="append", help="default: 1 and 8")
    add("--context", type=int, action="append", help="default: 128 and 2048")
    add("--new-tokens", type=int, default=33)
    add("--rounds", type=int, default=5, help="of a cell, at most (default %(default)s)")
    add("--cell-seconds", type=float, default=float("inf"), help="no round of a cell is begun after so long")
    add("--seconds", type=float, default=float("inf"), help="no cell is begun after so long")
    add("--json", type=Path, help="file for the figures, and of those that there are")
    add("--log-file", default=os.devnull, help="where the sides' stderr goes")
    return parser


def _measure(sides: list[Side], cell: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    for side in sides:
        side.run(cell["batch"], min(cell["context"], 256), 3)  # compiles, and warms the caches
    start, rounds = time.perf_counter(), []
    while len(rounds) < options.rounds and (not rounds or time.perf_counter() - start < options.cell_seconds):
        rounds.append(_round(sides, cell["batch"], cell["context"], options.new_tokens, len(rounds)))
    result = cell | {"rounds": len(rounds)} | _summary(rounds)
    _print(result)
    return result | {"peer": options.peer_version, "environment": describe_environment()}


def _round(
    sides: list[Side], batch: int, context: int, new_tokens: int, n: int
) -> dict[str, dict[str, float]]:
    """Tokens a second of each side; every second round goes the other way."""
    rates: dict[str, dict[str, float]] = {}
    for side in sides[:: -1 if n % 2 else 1]:
        time.sleep(_PAUSE_S)
        steps = side.run(batch, context, new_tokens)
        prefill, decode = steps[: 1 - new_tokens], steps[1 - new_tokens :]
        rates[side.name] = {}
        for clock, name in enumerate(_CLOCKS):
            rates[side.name] |= {
                f"prefill{name}": batch * context / sum(step[clock] for step in prefill),
                f"decode{name}": batch / statistics.median(step[clock] for step in decode),
            }
    return rates


def _summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    for phase in (f"{phase}{clock}" for phase in ("prefill", "decode") for clock in _CLOCKS):
        for name in rounds[0]:
            rates = [r[name][phase] for r in rounds]
            ratios = [r["attnbackend"][phase] / r[name][phase] for r in rounds]
            cell[f"{phase} {name}"] = asdict(Spread.of(rates)) | {"ratio": statistics.median(ratios)}
    return cell


def _print(cell: dict[str, Any]) -> None:
    print(f"  batch {cell['batch']}, context {cell['context']}")
    for what, found in cell.items():
        if isinstance(found, dict):
            spread = Spread(found["min"], found["median"], found["max"])
            print(f"    {what:34} {spread!s:32} ratio {found['ratio']:.3f}", flush=True)


if __name__ == "__main__":
    main()
