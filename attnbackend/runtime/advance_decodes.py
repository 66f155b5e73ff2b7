"""A step of decodes makes its batch the next one, so that the host need not.

Shape suffixes: R rows of the batch, each with one token, W width of the block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.runtime.step_graphs import StepInputs

__all__ = ["advance_decodes"]


def advance_decodes(ids_R: Tensor, inputs: StepInputs, block_size: int) -> None:
    """Make a step's inputs, on its device, those of the next step of the same decodes.

    Slots are right where the block table has the block already. Rows of padding, of seq_len 0, stay.

    Args:
        ids_R: int64 [R], the tokens that the step chose.
        inputs: of R tokens and rows; written, but for the block table.
        block_size: tokens a cache block.
    """
    slots_R, _, seq_lens_R, table_RW = inputs.batch
    if ids_R.is_cuda:
        from attnbackend.kernels.triton.advance_decodes import advance_decodes_on_gpu

        advance_decodes_on_gpu(
            ids_R, inputs.input_ids, inputs.positions, slots_R, seq_lens_R, table_RW, block_size
        )
        return
    is_real_R = seq_lens_R > 0
    inputs.positions.add_(is_real_R)
    seq_lens_R.add_(is_real_R)
    columns_R = (inputs.positions // block_size).clamp_(max=table_RW.shape[1] - 1)
    first_R = table_RW.gather(1, columns_R[:, None])[:, 0].long() * block_size
    slots_R.copy_(torch.where(is_real_R, first_R + inputs.positions % block_size, slots_R))
    inputs.input_ids.copy_(torch.where(is_real_R, ids_R, inputs.input_ids))
