"""The benchmark program runs and writes what it promises; no figure is judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

_REPOSITORY = Path(__file__).resolve().parent.parent


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *arguments],
        cwd=_REPOSITORY, capture_output=True, text=True, timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("results")
    done = _run("--quick", "--no-plot", "--output", str(folder), "--name", "quick", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert [file.name for file in folder.iterdir()] == ["quick.json"]
    return json.loads((folder / "quick.json").read_text()), done.stdout


def _spreads(value: object) -> Iterator[dict[str, float]]:
    if isinstance(value, dict):
        if value.keys() == {"min", "median", "max"}:
            yield value
        for inner in value.values():
            yield from _spreads(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _spreads(inner)


def test_result_says_where_it_was_measured(quick_run: tuple[dict[str, Any], str]) -> None:
    environment = quick_run[0]["environment"]
    wanted = {"date", "attnbackend", "git_commit", "python", "torch", "transformers", "cpu", "cpus"}
    assert wanted <= environment.keys()
    assert environment["threads"] == 1


def test_result_has_both_batch_sizes_and_the_sides_agree(
    quick_run: tuple[dict[str, Any], str],
) -> None:
    result = quick_run[0]
    found = [(entry["batch"], entry["mode"]) for entry in result["throughput"]]
    assert found == [(1, "eager"), (8, "eager")]
    for entry in result["throughput"]:
        wanted = [result["settings"]["new_tokens"]] * entry["batch"]
        assert entry["leading_tokens_equal"] == wanted
        assert {"engine", "transformers", "ratio"} <= entry.keys()


def test_result_has_every_op_in_both_modes(quick_run: tuple[dict[str, Any], str]) -> None:
    entries = quick_run[0]["op_overhead"]
    for inference_mode in (True, False):
        ops = {entry["op"] for entry in entries if entry["inference_mode"] is inference_mode}
        assert {"attention", "torch_sdpa_forward", "kv_cache_update"} <= ops
    assert all({"op_us", "direct_us", "overhead_us"} <= entry.keys() for entry in entries)


def test_result_has_the_host_time_of_small_and_large_steps(
    quick_run: tuple[dict[str, Any], str],
) -> None:
    entries = quick_run[0]["host_time"]
    assert [entry["requests"] for entry in entries] == [1, 8, 64]
    for entry in entries:
        assert 0 < entry["prepare_us"]["median"] < entry["outside_model_us"]["median"]
        assert entry["outside_model_us"]["median"] < entry["step_us"]["median"]


def test_every_spread_is_finite_and_ordered(quick_run: tuple[dict[str, Any], str]) -> None:
    spreads = list(_spreads(quick_run[0]))
    assert len(spreads) > 30
    for spread in spreads:
        assert all(map(math.isfinite, spread.values()))
        assert spread["min"] <= spread["median"] <= spread["max"]


def test_summary_shows_all_three_parts(quick_run: tuple[dict[str, Any], str]) -> None:
    for heading in ("microseconds a call", "microseconds a decode step", "generated tokens/s"):
        assert heading in quick_run[1]


def test_plot_is_drawn_from_a_result(
    quick_run: tuple[dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(_REPOSITORY))
    from benchmarks.engine_plot import draw

    draw(quick_run[0], tmp_path / "engine.png")
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--rounds", "--batch", "--new-tokens", "--threads"])
def test_a_count_below_one_is_refused(option: str) -> None:
    done = _run(option, "0")
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr


def test_cascade_writes_a_row_for_each_shape(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "cascade.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.cascade", "--device", "cpu", "--requests", "2", "3", "--prefix",
            "32", "--suffix", "5", "--heads", "4", "2", "32", "--rounds", "1", "--output", str(file),
        ],
        cwd=_REPOSITORY, capture_output=True, text=True, timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["timings"]
    assert [(row["requests"], row["prefix"], row["suffix"]) for row in rows] == [(2, 32, 5), (3, 32, 5)]
    assert all(row["whole_us"] > 0 and row["parts_us"] > 0 and row["build_us"] > 0 for row in rows)


def test_cpu_attention_measures_every_point_of_the_quick_grid(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.cpu_attention", "--quick", "--only", "b1", "--seconds", "0.01",
            "--threads", "1", "--json", str(file),
        ],
        cwd=_REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_text())["runs"]
    names = [point["name"] for point in run["points"]]
    assert names == [
        "decode b1 ctx128 block 16 float32", "decode b1 ctx128 block 16 bfloat16",
        "latent decode b1 ctx128 heads 16 float32", "latent decode b1 ctx128 heads 16 bfloat16",
    ]  # fmt: skip
    assert all(point["own_ms"]["median"] > 0 and "ratio" not in point for point in run["points"])


def test_engines_on_cpus_take_turns(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "engines.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.cpu_engines", str(tmp_path / "model"), "--also", "transformers",
            "--mode", "eager", "--batch", "2", "--context", "5", "--new-tokens", "4", "--rounds", "2",
            "--json", str(file), "--log-file", str(tmp_path / "log"),
        ],
        cwd=_REPOSITORY, capture_output=True, text=True, timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    (cell,) = json.loads(file.read_text())["cells"]
    names = {"prefill attnbackend", "decode attnbackend", "prefill transformers", "decode transformers"}
    assert names < cell.keys()
    assert all(cell[name]["median"] > 0 for name in names)
