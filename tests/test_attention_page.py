"""The page about attention on an H200 says what its result files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention_table import TABLES, below_table, float8_table, grid_table

_REPOSITORY = Path(__file__).resolve().parent.parent
_PAGE = (_REPOSITORY / "docs" / "attention-h200.md").read_text()


@pytest.mark.parametrize(
    ("table", "files"),
    [
        ("main", ["h200"]), ("short", ["short_h200"]), ("grid", ["grid_h200"]),
        ("below", ["grid_h200", "repeat_h200"]), ("float8", ["float8_25_h200", "float8_7_h200"]),
    ],
)  # fmt: skip
def test_page_has_the_table_of_its_files(table: str, files: list[str]) -> None:
    folder = _REPOSITORY / "benchmarks" / "results"
    results = (json.loads((folder / f"attention_{file}.json").read_text())["points"] for file in files)
    header, *rows = TABLES[table](*results)
    assert "\n".join([header, "|" + "---|" * (header.count("|") - 1), *rows]) + "\n\n" in _PAGE


def _result(point: str, pair: float, alone: float, fa3: float, cudnn: float) -> dict[str, Any]:
    us = {"FLASH_ATTN+TRITON_ATTN": pair, "TRITON_ATTN": alone, "fa3_direct": fa3, "cudnn_sdpa": cudnn}
    best = min(("fa3_direct", "cudnn_sdpa"), key=us.__getitem__)
    speeds = {side: us[best] / us[side] for side in ("FLASH_ATTN+TRITON_ATTN", "TRITON_ATTN")}
    return {"point": point, "graph_us": us, "best_peer": best, "speed_of_best_peer": speeds}


_RESULTS = [
    _result("decode B1 L32768 32/8x128 page 16 cache auto", 10.0, 8.0, 20.0, 30.0),
    _result("decode B1 L512 32/8x128 page 16 cache auto", 10.0, 40.0, 20.0, 30.0),
    _result("prefill 16x512 32/8x128 page 16 cache auto", 10.0, 12.0, 9.0, 5.0),
    _result("prefill 16x512 32/8x128 page 64 cache fp8_e4m3", 100.0, 50.0, 97.0, 99.0),
]


def test_grid_is_summed_up_by_kind() -> None:
    assert grid_table(_RESULTS)[1:] == [
        "| 32/8x128 | 16 | bfloat16 | 3 | 1.260 | 0.500 | prefill 16x512 | 2.50 | 0.75 |",
        "| 32/8x128 | 64 | float8 | 1 | 0.970 | 0.970 | prefill 16x512 | - | 1.94 |",
    ]


def test_slower_points_are_listed_with_the_peer_that_is_faster() -> None:
    row = "| prefill 16x512 | 32/8x128 | 16 | bfloat16 | 10.0 | 5.0 (cuDNN) | 0.500 |"
    assert below_table(_RESULTS)[1:] == [f"{row} - |"]
    again = _result(str(_RESULTS[2]["point"]), 10.0, 1.0, 8.0, 9.0)
    assert below_table(_RESULTS, [again])[1:] == [f"{row} 0.800 |"]


def test_float8_is_compared_from_either_query() -> None:
    result = _result("prefill 1x32768 16/16x64 page 16 cache fp8_e4m3", 100.0, 1.0, 90.0, 1.0)
    result["graph_us"] |= {"fa3_from_query": 95.0, "FLASH_ATTN+TRITON_ATTN in float8": 50.0}
    times, speeds = "100.0 | 50.0 | 90.0 | 95.0", "0.900 | 0.950 | 1.800 | 1.900"
    assert float8_table([], [result])[1:] == [f"| prefill 1x32768 | 16/16x64 | 16 | {times} | {speeds} |"]
