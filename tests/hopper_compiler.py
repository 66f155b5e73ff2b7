"""Triton compiles for Hopper without a GPU, in a process of its own: tests of kernels interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_for_hopper"]

_DRIVER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Hopper())
"""


def run_for_hopper(code: str, cache: Path) -> list[str]:
    """Lines that the code prints, where Triton sees a Hopper GPU; what is compiled lies under `cache`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [sys.executable, "-c", _DRIVER + code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()
