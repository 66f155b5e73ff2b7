"""Latent attention compiles for a Hopper GPU where products are in float64 and rows are stored narrow.

Triton 3.6 lays a product out for the width its values had in memory, and failed where it saw through the
conversion. It needs no GPU to compile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hopper_compiler import run_for_hopper

pytest.importorskip("triton")

COMPILE = """
import triton.language as tl
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
    lines = run_for_hopper(COMPILE, tmp_path)
    assert len(lines) == 5
    assert len(list(tmp_path.glob("*/*.cubin"))) == 5
