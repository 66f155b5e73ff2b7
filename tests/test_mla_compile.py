"""Latent attention compiles for a Hopper GPU where products are in float64 and rows are stored narrow.

Triton 3.6 lays a product out for the width its values had in memory, and failed where it saw through the
conversion. It needs no GPU to compile; a process of its own, because tests of kernels interpret them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import torch, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Hopper())
from attnbackend.kernels.triton.config import padded_size
from attnbackend.kernels.triton.mla_config import mla_tile
from attnbackend.kernels.triton.mla_decode import mla_decode_kernel

tile = mla_tile(torch.float32, 8, 4, torch.device("cpu"))
floats, ints = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
for stored in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32):
    rows, strides = torch.zeros(64, dtype=stored), [64] * 16
    mla_decode_kernel.warmup(
        floats, floats, rows, rows, None, floats, None, ints, ints, ints, None, None, floats, 0.1, *strides,
        8, 4, 0, 2, H=4, S=48, L=8, R=8, L_PAD=padded_size(8), R_PAD=padded_size(8), DOT=tl.float32,
        PRECISE=True, Q_FMT="native", L_FMT="native", R_FMT="native", OUT_FMT="native", M=tile.block_m,
        N=tile.block_n, MIN_KEYS=256, num_warps=tile.num_warps, num_stages=tile.num_stages, grid=(1, 1),
    )
    print(stored)
"""


def test_float32_queries_over_narrower_rows(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == 5
    assert len(list(tmp_path.glob("*/*.cubin"))) == 5
