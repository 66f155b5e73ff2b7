"""A step of decodes makes its inputs the next step's, on a CPU and in a kernel.

Shape suffixes: R rows, W width of the block table.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from attnbackend.layers.paged import BatchTensors
from attnbackend.runtime.advance_decodes import advance_decodes
from attnbackend.runtime.step_graphs import StepInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, WIDTH, PADDING = 4, 5, 3


def run(kind: str, ids_R: Tensor, inputs: StepInputs) -> None:
    if kind == "runtime":
        advance_decodes(ids_R, inputs, BLOCK)
        return
    pytest.importorskip("triton")
    from attnbackend.kernels.triton.advance_decodes import advance_decodes_on_gpu

    slots_R, _, lens_R, table_RW = inputs.batch
    advance_decodes_on_gpu(ids_R, inputs.input_ids, inputs.positions, slots_R, lens_R, table_RW, BLOCK)


@pytest.mark.parametrize("kind", ["runtime", "kernel"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_real_rows_move_on_by_one_token_and_padding_stays(kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    count = rows + PADDING
    # The last position of the table too, behind which there is no block.
    positions_R = torch.randint(0, BLOCK * WIDTH, (count,), generator=generator)
    positions_R[0] = BLOCK * WIDTH - 1
    table_RW = torch.randint(1, 99, (count, WIDTH), generator=generator, dtype=torch.int32)
    lens_R = (positions_R + 1).int()
    lens_R[rows:] = 0
    ids_R = torch.randint(0, 1000, (count,), generator=generator)
    slots_R = torch.full((count,), -1)
    before_R = torch.zeros(count, dtype=torch.int64)
    starts_R = torch.arange(count + 1, dtype=torch.int32)
    tensors = [ids_R, before_R, positions_R, slots_R, starts_R, lens_R, table_RW]
    ids, inputs, positions, slots, starts, lens, table = (x.clone().to(DEVICE) for x in tensors)
    run(kind, ids, StepInputs(inputs, positions, starts[:0], BatchTensors(slots, starts, lens, table)))
    for row in range(count):
        is_real = row < rows
        place = int(positions_R[row]) + is_real
        assert int(inputs[row]) == (int(ids_R[row]) if is_real else 0)
        assert (int(positions[row]), int(lens[row])) == (place, place + 1 if is_real else 0)
        if not is_real:
            assert int(slots[row]) == -1
        elif place < BLOCK * WIDTH:
            assert int(slots[row]) == int(table_RW[row, place // BLOCK]) * BLOCK + place % BLOCK
    assert torch.equal(table.cpu(), table_RW)
    assert torch.equal(starts.cpu(), starts_R)
