"""The picture of a result file of `benchmarks.attention`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(result: dict[str, Any], file: Path) -> None:
    """Writes a PNG: at each point, the speed of the project's backends over that of the fastest peer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = [p for p in result["points"] if p.get("speed_of_best_peer")]
    names = list(dict.fromkeys(name for p in points for name in p["speed_of_best_peer"]))
    figure, axes = plt.subplots(figsize=(11, 1.5 + 0.28 * len(points)), layout="constrained")
    for name in names:
        found = [(p["speed_of_best_peer"].get(name), i) for i, p in enumerate(points)]
        speeds, places = zip(*((speed, i) for speed, i in found if speed is not None), strict=True)
        axes.plot(speeds, places, "o", label=name, markersize=5, alpha=0.8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(points)), [f"{p['point']} ({p['best_peer']})" for p in points], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("speed over the fastest peer's (in brackets), CUDA-graph replays; 1 is as fast")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    environment = result["environment"]
    axes.set_title(f"{environment['gpu']}, torch {environment['torch']}, triton {environment['triton']}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
