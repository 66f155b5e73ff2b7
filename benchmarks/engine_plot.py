"""The picture of a result file of `benchmarks.engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw"]

_COLOURS = {"engine": "#1b6ca8", "transformers": "#c9c9c9"}
_STAGES = (
    ("prepare_us", "batch preparation", "#1b6ca8"),
    ("plan_us", "plans and contexts", "#66a3d2"),
    ("rest_us", "scheduling, sampling, outputs", "#c9c9c9"),
)


def draw(result: dict[str, Any], file: Path) -> None:
    """Writes a PNG: tokens a second, overhead of ops, host time of a step.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    _draw_throughput(left, result["throughput"])
    _draw_overhead(middle, result["op_overhead"])
    _draw_host_time(right, result["host_time"])
    environment = result["environment"]
    figure.suptitle(
        f"{result['model']} float32 on {environment['cpu']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}"
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _draw_throughput(axes: Any, comparisons: list[dict[str, Any]]) -> None:
    for offset, side in ((-0.2, "engine"), (0.2, "transformers")):
        places = [i + offset for i in range(len(comparisons))]
        spreads = [c[side] for c in comparisons]
        medians = [s["median"] for s in spreads]
        reach = [
            [s["median"] - s["min"] for s in spreads],
            [s["max"] - s["median"] for s in spreads],
        ]
        axes.bar(places, medians, 0.4, yerr=reach, capsize=3, label=side, color=_COLOURS[side])
    for i, comparison in enumerate(comparisons):
        highest = max(comparison["engine"]["max"], comparison["transformers"]["max"])
        ratio = f"{comparison['ratio']['median']:.2f}x\n"
        axes.annotate(ratio, (i, highest), ha="center", va="bottom")
    labels = [f"batch {c['batch']}\n{c['mode']}" for c in comparisons]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("generated tokens/s, median and range")
    axes.set_title("Greedy generation")
    axes.margins(y=0.12)
    axes.legend()


def _draw_overhead(axes: Any, overheads: list[dict[str, Any]]) -> None:
    shown = [o for o in overheads if o["inference_mode"]]
    places = range(len(shown))
    direct = [o["direct_us"]["median"] for o in shown]
    extra = [max(0.0, o["overhead_us"]["median"]) for o in shown]
    axes.barh(places, direct, label="the implementation itself", color="#c9c9c9")
    axes.barh(places, extra, left=direct, label="added by the op", color=_COLOURS["engine"])
    for i, overhead in enumerate(shown):
        axes.text(direct[i] + extra[i], i, f" +{overhead['overhead_us']['median']:.1f}", va="center")
    labels = [o["op"] + (", planned" if o["planned"] else "") for o in shown]
    axes.set_yticks(places, labels)
    axes.set_xlabel("microseconds a call, one token, inference mode")
    axes.set_title("Cost of an op call")
    axes.margins(x=0.15)
    axes.legend()


def _draw_host_time(axes: Any, times: list[dict[str, Any]]) -> None:
    bottom = [0.0] * len(times)
    for key, label, colour in _STAGES:
        heights = [_stage(t, key) for t in times]
        axes.bar(range(len(times)), heights, 0.5, bottom=bottom, label=label, color=colour)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(times)), [f"{t['requests']} requests" for t in times])
    axes.set_ylabel("microseconds a decode step, medians")
    axes.set_title("A step outside the model")
    axes.legend()


def _stage(times: dict[str, Any], key: str) -> float:
    if key != "rest_us":
        return float(times[key]["median"])
    rest: float = times["outside_model_us"]["median"] - times["metadata_us"]["median"]
    return max(0.0, rest)
