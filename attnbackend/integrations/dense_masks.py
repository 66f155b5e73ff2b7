"""The masks of transformers' own forward passes, as the attention function takes them.

None where nothing is padded and the module's own arguments say the rest; else a tensor of four dimensions,
which models hand on as it is: bool [B, 1, 1, L], False where padded, or int32 [B, 1, 2, L], each key's
position (-1 where padded) and the number of its bidirectional range (-1 outside of any).

Shape legend: B sequences, N query tokens a sequence, L keys a sequence.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from attnbackend.integrations.mask_patterns import (
    LocalMask,
    fit_bidirectional,
    fit_ranges,
    local_mask,
    visible_keys,
)

__all__ = ["ATTN_IMPLEMENTATION", "MaskListener", "check_layer_types", "dense_mask", "listener", "make_mask"]

ATTN_IMPLEMENTATION = "attnbackend"
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class MaskListener(Protocol):
    """Hears of every mask that a model makes, in the place of having it made."""

    def note(self, mask: LocalMask) -> Tensor:
        """What the model shall hand to its layers."""
        ...


listener: ContextVar[MaskListener | None] = ContextVar("attnbackend_mask_listener", default=None)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """transformers' mask function.

    Raises:
        ValueError: keys of a static cache that are not filled yet, or a mask that the ops cannot express.
    """
    check_layer_types(kwargs.get("config"))
    plain = kwargs.get("allow_is_causal_skip", False) or kwargs.get("allow_is_bidirectional_skip", False)
    if (listening := listener.get()) is not None:
        return listening.note(_heard(mask_function, plain, kwargs))
    if not kwargs.get("allow_is_bidirectional_skip", False):
        _check_filled(q_length, kv_length, q_offset, kv_offset)
    padding_BL = _padding(attention_mask, kv_length, kv_offset)
    ids_BL = None
    if not plain:
        pattern = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
        ids_BL = _fitted_ranges(*pattern, **kwargs)
    return _encode(batch_size, kv_length, kv_offset, padding_BL, attention_mask, ids_BL, kwargs)


def _heard(mask_function: Any, plain: bool, kwargs: dict[str, Any]) -> LocalMask:
    if not plain:
        raise ValueError(
            "its attention mask is more than causal, window and chunks (a mask function of its own); engines "
            f"do not serve that: use the model's own generate with attn_implementation={ATTN_IMPLEMENTATION!r}"
        )
    causal = bool(kwargs.get("allow_is_causal_skip", False))
    return local_mask(mask_function, kwargs.get("local_size"), causal=causal, device=kwargs["device"])


def dense_mask(mask: Tensor | None) -> Tensor | None:
    """What `make_mask` gave the model, without its empty dimensions: bool [B, L] or int32 [B, 2, L].

    Raises:
        ValueError: a mask from elsewhere.
    """
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] == 1:
        if mask.dtype is torch.bool and mask.shape[2] == 1:
            return mask[:, 0, 0]
        if mask.dtype is torch.int32 and mask.shape[2] == 2:
            return mask[:, 0]
    raise ValueError(
        f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; attn_implementation="
        f"{ATTN_IMPLEMENTATION!r} takes a padding mask [batch, tokens], since the ops make all other masks "
        "themselves"
    )


def check_layer_types(config: Any) -> None:
    """Raises ValueError for kinds of layers that the ops do not have."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _SUPPORTED_LAYER_TYPES:
        raise ValueError(
            f"layer types {sorted(kinds - _SUPPORTED_LAYER_TYPES)} are not supported; "
            f"allowed: {sorted(_SUPPORTED_LAYER_TYPES)}"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "config.is_causal=False, a decoder made to look ahead, is not supported; use "
            "attn_implementation='sdpa'"
        )


def _check_filled(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> None:
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the cache holds {kv_length} keys from {kv_offset} and {q_offset + q_length} tokens were seen: "
            "static caches are not supported (use a DynamicCache, or attnbackend.Engine), nor is a mask "
            "of another length than the tokens"
        )


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding mask of the keys, bool [B, L]; None where nothing is padded, as far as can be told."""
    if attention_mask is None:
        return None
    if attention_mask.shape[1] != kv_offset + kv_length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens and {kv_offset + kv_length} were seen, "
            "those in the cache included; give a mask over all of them, or none"
        )
    mask_BL = attention_mask[:, -kv_length:].bool()
    # A traced mask has no values yet, and a graph that holds for any serves an unpadded batch too.
    return None if not torch.compiler.is_compiling() and bool(mask_BL.all()) else mask_BL


def _fitted_ranges(
    batch_size: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int, mask_function: Any,
    **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The bidirectional ranges of a mask that is not a plain one, [B, L]; None where it has none."""
    config = kwargs.get("config")
    looks_ahead = getattr(config, "use_bidirectional_attention", None) is True
    if torch.compiler.is_compiling():
        if looks_ahead:
            return None
        raise ValueError(
            "while it is traced, transformers cannot tell a plain mask from one of packed sequences: pass "
            "attention_mask, or leave use_cache=True; a model of bidirectional ranges runs uncompiled"
        )
    visible_BNL = visible_keys(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
    )  # fmt: skip
    windows = (None, getattr(config, "sliding_window", None))
    if looks_ahead and fit_bidirectional(visible_BNL, q_offset, kv_offset, windows):
        return None
    ids_BL = None if looks_ahead else fit_ranges(visible_BNL, q_offset, kv_offset, windows)
    if ids_BL is None:
        _refuse(visible_BNL, q_offset, kv_offset, windows[1])
    return ids_BL if bool((ids_BL >= 0).any()) else None


def _refuse(visible_BNL: Tensor, q_offset: int, kv_offset: int, window: int | None) -> None:
    row, query = 0, visible_BNL.shape[1] - 1
    keys = (visible_BNL[row, query].nonzero()[:, 0] + kv_offset).tolist()
    shown = f"{keys[0]} to {keys[-1]}" if len(keys) == keys[-1] - keys[0] + 1 else keys
    raise ValueError(
        "the attention mask is more than causal, window, padding and bidirectional ranges (packed sequences "
        f"with position_ids that start again, ranges longer than the window of {window}, or a mask function): "
        f"token {query + q_offset} of sequence {row} sees {len(keys)} of {visible_BNL.shape[2]} keys, {shown}. "
        f"attn_implementation={ATTN_IMPLEMENTATION!r} does not support that; give the sequences as a padded "
        "batch, or use attn_implementation='sdpa'"
    )


def _encode(
    batch_size: int, kv_length: int, kv_offset: int, padding_BL: Tensor | None, seen_BS: Tensor | None,
    ids_BL: Tensor | None, kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    chunks_begin_before = kv_offset and getattr(kwargs.get("config"), "attention_chunk_size", None)
    if ids_BL is None and not chunks_begin_before:
        return None if padding_BL is None else padding_BL[:, None, None]
    if torch.compiler.is_compiling():
        raise ValueError("a chunked cache that dropped keys cannot be traced; run the model uncompiled")
    if seen_BS is None:
        seen_BS = torch.ones(batch_size, kv_offset + kv_length, dtype=torch.bool, device=kwargs["device"])
    positions_BL = torch.where(seen_BS, seen_BS.cumsum(1) - 1, -1)[:, -kv_length:]
    if ids_BL is None:
        ids_BL = torch.full_like(positions_BL, -1)
    return torch.stack([positions_BL, ids_BL], dim=1).int().unsqueeze(1)
