"""The picture of a run: requests over time, and how latencies are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attnbackend.bench.load import ServeRun
from attnbackend.bench.report import ServeReport

__all__ = ["draw"]

_BLUE, _GREY = "#1b6ca8", "#9a9a9a"


def draw(run: ServeRun, file: Path, title: str) -> None:
    """Writes the picture in the format that the file's name says.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a format that matplotlib does not know.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    try:
        _draw_tokens(axes[0], run)
        _draw_spread(axes[1], [t.first_token_s for t in run.requests], "time to first token")
        _draw_spread(axes[2], [gap for t in run.requests for gap in t.gaps_s()], "inter-token latency")
        _draw_steps(axes[3], ServeReport.of(run))
        figure.suptitle(title)
        figure.savefig(file, dpi=120)
    finally:
        plt.close(figure)


def _draw_tokens(axes: Any, run: ServeRun) -> None:
    """Tokens a second, and requests that are under way."""
    times = np.array([at for request in run.requests for at, _ in request.outputs])
    counts = np.array([count for request in run.requests for _, count in request.outputs])
    edges = np.linspace(0, max(run.seconds, 1e-9), 61)
    rate = np.histogram(times, edges, weights=counts)[0] / np.diff(edges)
    axes.stairs(rate, edges, color=_BLUE, label="tokens/s")
    arrivals = np.sort([request.arrival_s for request in run.requests])
    ends = np.sort([request.outputs[-1][0] for request in run.requests if request.outputs])
    under_way = np.searchsorted(arrivals, edges, "right") - np.searchsorted(ends, edges, "right")
    twin = axes.twinx()
    twin.plot(edges, under_way, color=_GREY, label="requests under way")
    twin.set_ylabel("requests under way", color=_GREY)
    axes.set_xlabel("seconds")
    axes.set_ylabel("generated tokens/s", color=_BLUE)


def _draw_spread(axes: Any, seconds: list[float | None] | list[float], what: str) -> None:
    ms = np.sort([1e3 * s for s in seconds if s is not None])
    axes.plot(ms, np.arange(1, len(ms) + 1) / max(1, len(ms)), color=_BLUE)
    for share in (0.5, 0.99):
        axes.axhline(share, color=_GREY, linewidth=0.6)
    axes.set_xlabel(f"{what}, ms")
    axes.set_ylabel("share at most as long")
    axes.set_ylim(0, 1.02)


def _draw_steps(axes: Any, report: ServeReport) -> None:
    rates = report.graph_hit_rates
    bars = axes.bar(list(rates), list(rates.values()), color=_BLUE)
    axes.bar_label(bars, [str(report.steps[kind]) for kind in rates])
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("share of the steps, by graph")
