"""Quantised queries and outputs around kernels that know neither.

Shape legend: T tokens, H query heads, D head size, G groups a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fold_query_scale", "is_quantized", "quantize_output"]


def is_quantized(output_scale: Tensor | None, output_block_scale: Tensor | None) -> bool:
    """Whether the output is wanted in a quantised form."""
    return output_scale is not None or output_block_scale is not None


def fold_query_scale(q_scale: Tensor | None, k_scale: Tensor | None) -> Tensor | None:
    """One scale of the logits for both: real logit = stored query . stored key * q_scale * k_scale."""
    if q_scale is None or k_scale is None:
        return q_scale if k_scale is None else k_scale
    return q_scale * k_scale


def quantize_output(
    exact_THD: Tensor, output: Tensor, output_scale: Tensor | None, output_block_scale: Tensor | None
) -> None:
    """Writes attention's result in a float8 format: real = stored * scale.

    Args:
        exact_THD: the result, [T, H, D].
        output: [T, H, D], float8, or uint8 for the bytes of float8_e4m3fn; written.
        output_scale: float32 [1], given.
        output_block_scale: float32 [T, G], written: each of a token's G groups of H * D / G elements gets
            its largest magnitude over the format's.
    """
    stored = output.view(torch.float8_e4m3fn) if output.dtype is torch.uint8 else output
    limit = torch.finfo(stored.dtype).max
    if output_scale is not None:
        scaled = exact_THD.float() / output_scale
    else:
        assert output_block_scale is not None, "one of the two scales was checked to be there"
        groups = exact_THD.float().reshape(len(exact_THD), output_block_scale.shape[1], -1)
        scale = groups.abs().amax(-1) / limit
        output_block_scale.copy_(scale)
        scaled = (groups / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)).view(exact_THD.shape)
    stored.copy_(scaled.clamp(-limit, limit).to(stored.dtype))
