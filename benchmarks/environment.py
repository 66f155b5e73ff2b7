"""Where figures were measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import attnbackend

__all__ = ["describe_environment"]

_REPOSITORY = Path(__file__).resolve().parent.parent


def describe_environment() -> dict[str, Any]:
    """Versions, processor, threads, date and commit; None for what cannot be found out."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "attnbackend": attnbackend.__version__,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_is_clean": _git("status", "--porcelain") == "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or None
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    # Virtual machines often hide the model's name; family and number still identify it.
    parts = (fields.get("model name"), "family", fields.get("cpu family"), fields.get("model"))
    return " ".join(filter(None, parts)) if "model name" in fields else None
