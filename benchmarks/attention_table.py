"""Tables of result files of `benchmarks.attention`, as the page about them has them.

python -m benchmarks.attention_table main benchmarks/results/attention_h200.json
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TABLES", "below_table", "float8_table", "grid_table", "main_table", "short_table"]

Result = Mapping[str, Any]
PAIR, ALONE = "FLASH_ATTN+TRITON_ATTN", "TRITON_ATTN"
IN_FLOAT8, _FLOAT8_PEERS = f"{PAIR} in float8", ("fa3_direct", "fa3_from_query")
_MAIN = (
    PAIR, "FLASH_ATTN", ALONE, "FLASHINFER", "fa3_direct", "flashinfer_direct", "vllm_triton", "cudnn_sdpa",
)  # fmt: skip
_TITLES = {
    "fa3_direct": "FA3",
    "flashinfer_direct": "FlashInfer",
    "vllm_triton": "vLLM's Triton",
    "cudnn_sdpa": "cuDNN",
}
ENOUGH = 0.97
"""The least speed over the fastest peer that is as fast."""
_MANY_KEYS = 32768
"""Of all requests together, from which on decode is a matter of bandwidth."""
_NAME = re.compile(r"(?P<work>.+) (?P<heads>\S+) page (?P<page>\d+) cache (?P<cache>\S+)")
_CACHES = {"auto": "bfloat16", "fp8_e4m3": "float8"}


def _parts(result: Result) -> dict[str, str]:
    found = _NAME.fullmatch(result["point"])
    assert found, f"{result['point']!r} is no name of a point"
    parts = found.groupdict()
    return parts | {"work": parts["work"].replace("_", " "), "cache": _CACHES[parts["cache"]]}


def _speed(result: Result, side: str = PAIR) -> float:
    speed: float = result["speed_of_best_peer"][side]
    return speed


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, *rows)]


def main_table(results: Sequence[Result]) -> list[str]:
    """Microseconds of every side at each point, and the speed of the automatic choice."""
    rows = []
    for result in results:
        us = result["graph_us"]
        times = [f"{us[side]:.1f}" if side in us else "-" for side in _MAIN]
        rows.append([_parts(result)["work"], *times, f"{_speed(result):.2f}"])
    titles = [_TITLES.get(side, side.replace("+", " +")) for side in _MAIN]
    return _table(["work", *titles, "speed over the best peer"], rows)


def short_table(results: Sequence[Result]) -> list[str]:
    """Of the automatic choice: microseconds, speed over the best peer, and over `FLASH_ATTN`."""
    kinds: dict[str, dict[str, str]] = {}
    for result in results:
        parts, us = _parts(result), result["graph_us"]
        cell = f"{us[PAIR]:.1f} ({_speed(result):.2f}, {us['FLASH_ATTN'] / us[PAIR]:.2f})"
        kinds.setdefault(parts["heads"], {})[parts["work"].removeprefix("prefill ")] = cell
    works = list(dict.fromkeys(work for cells in kinds.values() for work in cells))
    rows = ([heads, *(cells[work] for work in works)] for heads, cells in kinds.items())
    return _table(["heads", *works], rows)


def grid_table(results: Sequence[Result]) -> list[str]:
    """Of each kind of heads, page and cache: geometric mean and least of the automatic choice's speeds over
    the best peer, and the least of `TRITON_ATTN` alone, at decode of many keys and at prompts."""
    kinds: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        parts = _parts(result)
        kinds.setdefault((parts["heads"], parts["page"], parts["cache"]), []).append(result)
    rows = [[*kind, *_summary(own)] for kind, own in kinds.items()]
    columns = ["points", "mean", "least", "where", f"{ALONE}: decode, least", "prompts, least"]
    return _table(["heads", "page", "cache", *columns], rows)


def _summary(results: Sequence[Result]) -> list[str]:
    worst = min(results, key=_speed)
    mean = statistics.geometric_mean(map(_speed, results))
    decodes = [_speed(r, ALONE) for r in results if _keys_of_decode(r) >= _MANY_KEYS]
    prompts = [r["graph_us"]["fa3_direct"] / r["graph_us"][ALONE] for r in results if "prefill" in r["point"]]
    figures = (f"{min(values):.2f}" if values else "-" for values in (decodes, prompts))
    return [str(len(results)), f"{mean:.3f}", f"{_speed(worst):.3f}", _parts(worst)["work"], *figures]


def _keys_of_decode(result: Result) -> int:
    found = re.match(r"decode B(\d+) L(\d+) ", result["point"])
    return int(found[1]) * int(found[2]) if found else 0


def float8_table(results: Sequence[Result], more: Sequence[Result] = ()) -> list[str]:
    """Prompts over float8: microseconds of the automatic choice, also where float8 is permitted, and of
    FlashAttention 3 from a query rounded beforehand and from ours; and both choices' speeds over either."""
    rows = []
    for result in (*results, *more):
        parts, us = _parts(result), result["graph_us"]
        times, peers = ([us[name] for name in names] for names in ((PAIR, IN_FLOAT8), _FLOAT8_PEERS))
        speeds = [f"{peer / own:.3f}" for own in times for peer in peers]
        rows.append(
            [parts["work"], parts["heads"], parts["page"], *(f"{x:.1f}" for x in (*times, *peers)), *speeds]
        )
    columns = ["automatic", "permitted", "FA3, rounded before", "FA3, same query"]
    speed = [f"{own}/{peer}" for own in columns[:2] for peer in ("before", "same")]
    return _table(["work", "heads", "page", *columns, *speed], rows)


def below_table(results: Sequence[Result], again: Sequence[Result] = ()) -> list[str]:
    """The points where the automatic choice has less than `ENOUGH` of the best peer's speed, and its speed
    there in another run."""
    others = {result["point"]: f"{_speed(result):.3f}" for result in again}
    rows = []
    for result in sorted(results, key=_speed):
        if (speed := _speed(result)) < ENOUGH:
            parts, us, peer = _parts(result), result["graph_us"], result["best_peer"]
            where = (parts[name] for name in ("work", "heads", "page", "cache"))
            times = f"{us[PAIR]:.1f}", f"{us[peer]:.1f} ({_TITLES[peer]})", f"{speed:.3f}"
            rows.append([*where, *times, others.get(result["point"], "-")])
    return _table(["work", "heads", "page", "cache", "automatic", "best peer", "speed", "in 25 rounds"], rows)


TABLES: dict[str, Callable[..., list[str]]] = {
    "main": main_table, "short": short_table, "grid": grid_table, "below": below_table,
    "float8": float8_table,
}  # fmt: skip


def main() -> None:
    name, *files = sys.argv[1:]
    header, *rows = TABLES[name](*(json.loads(Path(file).read_text())["points"] for file in files))
    print(header, "|" + "---|" * (header.count("|") - 1), *rows, sep="\n")


if __name__ == "__main__":
    main()
