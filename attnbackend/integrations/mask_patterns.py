"""What a mask function of transformers lets through, in the terms that the ops have.

Shape legend: B sequences, N query tokens a sequence, L keys a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LocalMask", "fit_bidirectional", "fit_ranges", "local_mask", "visible_keys"]

MaskFunction = Callable[..., Any]


class LocalMask(NamedTuple):
    """How far a plain mask reaches."""

    causal: bool
    sliding_window: int | None
    """Keys a query sees, itself included; to both sides where the mask is not causal."""
    attention_chunk_size: int | None

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self._asdict().items() if value is not None]
        return ", ".join(given)


def local_mask(
    mask_function: MaskFunction, local_size: int | None, *, causal: bool, device: Any
) -> LocalMask:
    """Tells a window from chunks, and an inclusive bound from an exclusive one, by asking at a few places.

    Args:
        mask_function: of (batch, head, query position, key position), all tensors.
        local_size: what transformers calls the mask's reach; None for none.
        causal: whether the mask is.
        device: where its tensors are; a model without storage is asked on the CPU.

    Raises:
        ValueError: neither a window nor chunks.
    """
    if local_size is None:
        return LocalMask(causal, None, None)
    asked = (1, local_size - 1, local_size, local_size + 1)
    has_values = torch.device(device).type != "meta"
    query = torch.tensor([3 * local_size], device=device if has_values else "cpu")
    reach = [d for d in asked if bool(mask_function(query * 0, query * 0, query, query - d))]
    if local_size > 1 and 1 not in reach:
        return LocalMask(causal, None, local_size)
    for window in (local_size, local_size + 1):
        if reach == [d for d in asked if d < window]:
            return LocalMask(causal, window, None)
    raise ValueError(
        f"a mask of reach {local_size} is neither a window nor chunks: it sees distances {reach}"
    )


def visible_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int,
    mask_function: MaskFunction, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The whole pattern, bool [B, N, L], without padding."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, None, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, use_vmap=kwargs.get("use_vmap", False),
        device=kwargs.get("device", "cpu"),
    )  # fmt: skip
    assert mask is not None
    return mask[:, 0].bool()


def fit_ranges(
    visible_BNL: Tensor, q_offset: int, kv_offset: int, windows: Sequence[int | None]
) -> Tensor | tuple[int, int]:
    """The ranges within which queries see ahead, beside causal attention with one of ``windows``.

    Args:
        visible_BNL: bool [B, N, L].
        q_offset: position of the first query.
        kv_offset: position of the first key.
        windows: to be tried in turn.

    Returns:
        int64 [B, L], the number of each key's range and -1 outside of any; or, where there are no such
        ranges, a sequence and a query in it that sees something else.
    """
    p_N1, j_L = _positions(visible_BNL, q_offset, kv_offset)
    ids_BN = _ranges_ahead(visible_BNL, p_N1[:, 0], j_L)
    ids_BL = torch.full_like(visible_BNL[:, 0], -1, dtype=torch.long)
    first = q_offset - kv_offset
    ids_BL[:, first : first + ids_BN.shape[1]] = ids_BN
    together_BNL = (ids_BN.unsqueeze(2) == ids_BL.unsqueeze(1)) & (ids_BN.unsqueeze(2) >= 0)
    for window in windows:
        causal_NL = (j_L <= p_N1) if window is None else (j_L <= p_N1) & (j_L > p_N1 - window)
        misfits = ((causal_NL | together_BNL) != visible_BNL).any(2).nonzero()
        if not len(misfits):
            return ids_BL
    return int(misfits[0, 0]), int(misfits[0, 1])


def fit_bidirectional(
    visible_BNL: Tensor, q_offset: int, kv_offset: int, windows: Sequence[int | None]
) -> bool:
    """Whether every query sees every key, or those of a two-sided window."""
    p_N1, j_L = _positions(visible_BNL, q_offset, kv_offset)
    fitting = (
        torch.ones_like(j_L - p_N1, dtype=torch.bool) if window is None else (j_L - p_N1).abs() < window
        for window in windows
    )  # fmt: skip
    return any(bool((visible_BNL == pattern_NL).all()) for pattern_NL in fitting)


def _positions(visible_BNL: Tensor, q_offset: int, kv_offset: int) -> tuple[Tensor, Tensor]:
    _, queries, keys = visible_BNL.shape
    device = visible_BNL.device
    p_N1 = torch.arange(queries, device=device).unsqueeze(1) + q_offset
    return p_N1, torch.arange(keys, device=device) + kv_offset


def _ranges_ahead(visible_BNL: Tensor, p_N: Tensor, j_L: Tensor) -> Tensor:
    """Numbers of the queries' ranges, int64 [B, N]: a range is those with one last key, and it."""
    last_BN = torch.where(visible_BNL, j_L, -1).amax(2).maximum(p_N)
    before_BN = torch.nn.functional.pad(last_BN, (1, 0), value=-1)[:, :-1]
    in_range_BN = (last_BN > p_N) | (before_BN == last_BN)
    begins_BN = in_range_BN & (before_BN != last_BN)
    return torch.where(in_range_BN, begins_BN.cumsum(1) - 1, -1)
