"""The masks of transformers' own forward passes, as the attention function takes them.

None where nothing is padded and the module's own arguments say the rest; else a tensor of four dimensions,
which models hand on as it is:

- bool [B, 1, 1, L], False where padded;
- int8 [B, W, 1, L], the same under a two-sided window of W, its rows one piece of memory: some modules pass
  on a window that is one narrower than that of their mask, which eager attention honours;
- int32 [B, 1, 1 or 2, L], for causal attention whatever the module says of itself: each key's position (-1
  where padded) and the number of its bidirectional range (-1 outside of any).

Shape legend: B sequences, N query tokens a sequence, L keys a sequence.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from attnbackend.integrations.mask_patterns import (
    LocalMask,
    fit_bidirectional,
    fit_ranges,
    local_mask,
    visible_keys,
)

__all__ = ["ATTN_IMPLEMENTATION", "DenseMask", "MaskListener", "check_layer_types", "listener", "make_mask"]

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
    listening = None if torch.compiler.is_compiling() else listener.get()
    if listening is not None:
        return listening.note(_heard(mask_function, plain, kwargs))
    if not kwargs.get("allow_is_bidirectional_skip", False):
        _check_filled(q_length, kv_length, q_offset, kv_offset)
    padding_BL = _padding(attention_mask, kv_length, kv_offset)
    if plain:
        causal, ids_BL = not kwargs.get("allow_is_bidirectional_skip", False), None
    else:
        pattern = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
        causal, ids_BL = _fit(*pattern, **kwargs)
    window = None if causal else kwargs.get("local_size")
    if window is not None and plain:
        return _two_sided(batch_size, kv_length, padding_BL, window, mask_function, kwargs["device"])
    if ids_BL is None and not (causal and _needs_positions(kwargs.get("config"), kv_offset)):
        return None if padding_BL is None else padding_BL[:, None, None]
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_offset + kv_length, device=kwargs["device"])
    seen_BS = attention_mask.bool()
    positions_BL = torch.where(seen_BS, seen_BS.cumsum(1) - 1, -1)[:, -kv_length:]
    rows = [positions_BL] if ids_BL is None else [positions_BL, ids_BL]
    return torch.stack(rows, dim=1).int().unsqueeze(1)


def _two_sided(
    batch_size: int, kv_length: int, padding_BL: Tensor | None, reach: int, mask_function: Any, device: Any
) -> Tensor:
    """transformers' bidirectional windows count the keys to one side; ours count the token itself too."""
    window = reach + 1
    if not torch.compiler.is_compiling():
        found = local_mask(mask_function, reach, causal=False, device=device)
        assert found.sliding_window == window, found
    if padding_BL is None:
        padding_BL = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return padding_BL.to(torch.int8)[:, None, None].expand(-1, window, -1, -1)


def _needs_positions(config: Any, kv_offset: Any) -> bool:
    """Modules that call themselves bidirectional must hear that a mask is not; chunks count from 0."""
    if _looks_ahead(config):
        return True
    return bool(getattr(config, "attention_chunk_size", None)) and bool(kv_offset)


def _looks_ahead(config: Any) -> bool:
    return getattr(config, "use_bidirectional_attention", None) is True


def _heard(mask_function: Any, plain: bool, kwargs: dict[str, Any]) -> LocalMask:
    if not plain:
        raise ValueError(
            "its attention mask is more than causal, window and chunks (a mask function of its own); engines "
            "do not serve that: use the model's own generate with "
            f"attn_implementation={ATTN_IMPLEMENTATION!r}"
        )
    causal = bool(kwargs.get("allow_is_causal_skip", False))
    return local_mask(mask_function, kwargs.get("local_size"), causal=causal, device=kwargs["device"])


class DenseMask(NamedTuple):
    """What `make_mask` gave the model, without its empty dimensions."""

    keys: Tensor | None
    """bool [B, L], or int32 [B, 1 or 2, L]."""
    is_causal: bool = False
    """Whatever the module says."""
    sliding_window: int | None = None
    """Two-sided; None: as the module says."""

    @classmethod
    def of(cls, mask: Tensor | None) -> DenseMask:
        """Reads a mask.

        Raises:
            ValueError: it comes from elsewhere.
        """
        if mask is None:
            return cls(None)
        if mask.dim() == 4:
            _, ways, rows, _ = mask.shape
            if mask.dtype is torch.bool and ways == rows == 1:
                return cls(mask[:, 0, 0])
            if mask.dtype is torch.int8 and rows == 1:
                return cls(mask[:, 0, 0].bool(), sliding_window=ways)
            if mask.dtype is torch.int32 and ways == 1 and rows in (1, 2):
                return cls(mask[:, 0], is_causal=True)
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; attn_implementation="
            f"{ATTN_IMPLEMENTATION!r} takes a padding mask [batch, tokens], since the ops make all other "
            "masks themselves"
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


def _fit(
    batch_size: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int, mask_function: Any,
    **kwargs: Any,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Whether a mask that is no plain one is causal, and its bidirectional ranges, [B, L], if it has any."""
    config = kwargs.get("config")
    if torch.compiler.is_compiling():
        if _looks_ahead(config):
            return False, None
        raise ValueError(
            "while it is traced, transformers cannot tell a plain mask from one of packed sequences: pass "
            "attention_mask, or leave use_cache=True; a model of bidirectional ranges runs uncompiled"
        )
    visible_BNL = visible_keys(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
    )  # fmt: skip
    windows = (None, getattr(config, "sliding_window", None))
    if _looks_ahead(config) and fit_bidirectional(visible_BNL, q_offset, kv_offset, windows):
        return False, None
    fitted = fit_ranges(visible_BNL, q_offset, kv_offset, windows)
    if isinstance(fitted, tuple):
        _refuse(visible_BNL, *fitted, q_offset, kv_offset, windows[1])
    return True, fitted if bool((fitted >= 0).any()) else None


def _refuse(
    visible_BNL: Tensor, row: int, query: int, q_offset: int, kv_offset: int, window: int | None
) -> NoReturn:
    keys = (visible_BNL[row, query].nonzero()[:, 0] + kv_offset).tolist()
    in_one_piece = bool(keys) and len(keys) == keys[-1] - keys[0] + 1
    shown = f"{keys[0]} to {keys[-1]}" if in_one_piece else keys
    raise ValueError(
        "the attention mask is more than causal, window, padding and bidirectional ranges (packed sequences "
        f"with position_ids that start again, ranges longer than the window of {window}, or a mask function: "
        f"token {query + q_offset} of sequence {row} sees keys {shown}). "
        f"attn_implementation={ATTN_IMPLEMENTATION!r} does not support that; give the sequences as a padded "
        "batch, or use attn_implementation='sdpa'"
    )
