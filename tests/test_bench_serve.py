"""`attnbackend bench serve`: traces, times under a clock of the test's own, the report, the command."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from runtime_toys import ToyRunner, toy_engine
from torch import Tensor

from attnbackend.bench import (
    Lengths,
    RequestTimes,
    ServeReport,
    ServeRun,
    read_trace,
    run_trace,
    synthetic_trace,
)
from attnbackend.bench.report import Latency
from attnbackend.bench.traces import TraceRequest
from attnbackend.runtime import PreparedBatch


class FakeClock:
    """Moves when told to: a step takes a second."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


class SlowRunner(ToyRunner):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def execute(self, batch: PreparedBatch) -> Tensor:
        self.clock.time += 1
        return super().execute(batch)


def test_times_of_tokens_are_those_of_the_steps_that_made_them() -> None:
    clock = FakeClock()
    engine = toy_engine(SlowRunner(clock), max_num_seqs=1)
    trace = [TraceRequest(0.0, [1, 2], 3), TraceRequest(0.5, [3], 2), TraceRequest(20.0, [4], 1)]
    finished: list[int] = []
    run = run_trace(engine, trace, clock=clock, on_finished=finished.append)
    assert [times.outputs for times in run.requests] == [
        [(1.0, 1), (2.0, 1), (3.0, 1)],
        [(4.0, 1), (5.0, 1)],
        [(21.0, 1)],
    ]
    assert [times.first_token_s for times in run.requests] == [1.0, 3.5, 1.0]
    assert [times.latency_s for times in run.requests] == [3.0, 4.5, 1.0]
    assert [times.prompt_tokens for times in run.requests] == [2, 1, 1]
    assert (run.seconds, run.steps, finished) == (21.0, {"none": 6}, [1, 2, 3])


def test_a_request_that_cannot_be_served_is_named_before_anything_runs() -> None:
    clock = FakeClock()
    engine = toy_engine(SlowRunner(clock))
    trace = [TraceRequest(0.0, [1], 3), TraceRequest(0.0, [99], 3)]
    with pytest.raises(ValueError, match="request 2 of 2: prompt token id 99"):
        run_trace(engine, trace, clock=clock)
    assert clock.time == 0
    assert not engine.has_unfinished()


def test_tokens_that_come_together_share_the_time_before_them() -> None:
    times = RequestTimes(0.0, 4, [(1.0, 2), (4.0, 3), (5.0, 1)], "length")
    assert times.gaps_s() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert times.num_tokens == 6
    assert RequestTimes(0.0).gaps_s() == []


def test_the_report_counts_what_a_person_would() -> None:
    done = [
        RequestTimes(0.0, 10, [(0.1 * (i + 1), 1), (0.1 * (i + 1) + 0.02, 1)], "length") for i in range(100)
    ]
    run = ServeRun([*done, RequestTimes(0.0, 5, [], "error")], 20.0, {"decode": 60, "none": 40})
    report = ServeReport.of(run)
    assert (report.requests, report.failed) == (100, 1)
    assert (report.prompt_tokens, report.generated_tokens) == (1005, 200)
    assert (report.requests_per_s, report.tokens_per_s) == (5.0, 10.0)
    assert report.time_to_first_token is not None
    assert report.time_to_first_token.median == pytest.approx(5050)
    assert report.time_to_first_token.p99 == pytest.approx(9901)
    assert report.inter_token_latency == Latency(*[pytest.approx(20)] * 3)
    assert report.graph_hit_rates == {"decode": 0.6, "none": 0.4}
    assert "100 requests in 20.00 s, 1 failed: 5.00 requests/s, 10.0 tokens/s" in str(report)
    assert "steps from graphs    decode 60%, none 40%" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["inter_token_latency"]["median"] == pytest.approx(20)


def test_a_run_without_tokens_has_a_report() -> None:
    report = ServeReport.of(ServeRun([RequestTimes(0.0, 5, [], "error")]))
    assert (report.tokens_per_s, report.graph_hit_rates, report.inter_token_latency) == (0.0, {}, None)
    assert "inter-token latency  unknown" in str(report)


def test_synthetic_traces_follow_their_numbers_and_repeat() -> None:
    numbers: dict[str, Any] = {"rate": 4.0, "vocab_size": 30, "seed": 3}
    trace = synthetic_trace(2000, Lengths(2, 9), Lengths(5, 5), **numbers)
    assert trace == synthetic_trace(2000, Lengths(2, 9), Lengths(5, 5), **numbers)
    assert {len(request.prompt) for request in trace} == set(range(2, 10))
    assert {request.max_tokens for request in trace} == {5}
    assert all(0 <= token < 30 for request in trace for token in request.prompt)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.1)
    # Of a Poisson process the standard deviation is the mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.25, rel=0.15)
    at_once = synthetic_trace(3, Lengths(1, 1), Lengths(1, 1), rate=math.inf, vocab_size=9)
    assert [request.arrival_s for request in at_once] == [0.0] * 3


@pytest.mark.parametrize("text", ["0", "a", "5-", "-5", "9-3", "1.5", "", "0-4"])
def test_lengths_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--prompt-len .* such as 128, nor a range"):
        Lengths.parse(text, "--prompt-len")
    assert Lengths.parse("16-256", "x") == (16, 256)
    assert Lengths.parse("7", "x") == (7, 7)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 requests a second"):
        synthetic_trace(1, Lengths(1, 1), Lengths(1, 1), rate=rate, vocab_size=9)


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_traces_are_read_in_order_of_arrival_in_either_spelling(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"timestamp": 2500, "input_length": 6, "output_length": 2, "hash_ids": [1]},
        {"arrival_s": 0.5, "prompt": "hello", "max_tokens": 3},
        "",
        {"prompt_token_ids": [1, 2], "max_tokens": 4},
    )
    first, second, third = read_trace(file, vocab_size=8)
    assert first == TraceRequest(0.0, [1, 2], 4)
    assert second == TraceRequest(0.5, "hello", 3)
    assert (third.arrival_s, len(third.prompt), third.max_tokens) == (2.5, 6, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ([1], r"line 2: \[1\] is no object"),
        ({"prompt": "a", "max_tokens": 1, "speed": 3}, r"unknown fields \['speed'\]; allowed"),
        ({"prompt": "a"}, "must have max_tokens and one of"),
        ({"prompt": "a", "prompt_len": 3, "max_tokens": 1}, "must have max_tokens and one of"),
        ({"max_tokens": 3}, "must have max_tokens and one of"),
        ({"prompt_len": 0, "max_tokens": 1}, "prompt_len=0 must be a whole number, at least 1"),
        ({"prompt_len": 1, "max_tokens": 1.5}, "max_tokens=1.5 must be"),
        ({"prompt_len": 1, "max_tokens": 1, "arrival_s": -1}, "arrival_s=-1 must be a number, at least 0"),
    ],
    ids=str,
)
def test_lines_that_are_no_requests_are_named(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path, {"prompt": "a", "max_tokens": 1}, line)
    with pytest.raises(ValueError, match=message):
        read_trace(file, vocab_size=8)
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(write(tmp_path, ""), vocab_size=8)


def serve(*arguments: object) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from attnbackend.cli.app import app

    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


SMALL = ("--requests", 6, "--prompt-len", "2-9", "--output-len", 4, "--max-num-seqs", 3, "--device", "cpu")


def test_the_command_reports_what_it_served_and_draws_it(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "serve.png"
    found = serve("--model", model_folder, *SMALL, "--rate", 200, "--json", "--quiet", "--plot", picture)
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert (result["requests"], result["failed"], result["generated_tokens"]) == (6, 0, 24)
    assert result["tokens_per_s"] == pytest.approx(24 / result["seconds"])
    assert result["graph_hit_rates"] == {"none": 1.0}
    assert result["time_to_first_token"]["median"] > 0
    assert result["speculation"] is None
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_command_serves_a_trace_with_speculation(model_folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "the capital", "max_tokens": 9}, {"prompt_len": 5, "max_tokens": 3})
    found = serve("--model", model_folder, "--trace", file, "--speculative", "ngram", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "2 requests in" in found.stdout
    assert "speculation          " in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-len", "x"), "--prompt-len 'x' is neither"),
        (("--trace", "nowhere.jsonl", "--requests", 3), "so --requests would have no effect"),
        (("--plot", "/nowhere/a.png"), "the folder /nowhere does not exist"),
        (("--speculative", "magic"), "speculative='magic' is unknown"),
        (("--num-speculative-tokens", 2), "needs a method"),
    ],
    ids=str,
)
def test_wrong_requests_end_with_one_line(model_folder: Path, arguments: Any, message: str) -> None:
    found = serve("--model", model_folder, *arguments, "--quiet")
    assert found.exit_code == 2
    assert message in found.stderr
    assert "Traceback" not in found.output
