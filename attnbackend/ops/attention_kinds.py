"""What each kind of attention asks of a call: where its keys are, and which masks make sense for it."""

from __future__ import annotations

from typing import Any, NoReturn

from attnbackend.backend import KVCacheDims
from attnbackend.ops.calls import AttentionCall
from attnbackend.types import AttentionType

__all__ = ["check_kind"]


def _refuse(call: AttentionCall, field: str, got: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{field} is {got} with attn_type={str(call.attn_type)!r}; expected {allowed}")


def check_kind(call: AttentionCall, dims: KVCacheDims) -> None:
    """Raises ValueError where arguments contradict the kind of attention, or each other."""
    kind = AttentionType(call.attn_type)
    if kind.keeps_no_cache:
        _check_own_keys(call, dims)
    elif kind is AttentionType.ENCODER_DECODER:
        _check_cross(call)
    if call.attention_chunk_size is not None and call.sliding_window is not None:
        raise ValueError(
            f"sliding_window={call.sliding_window} and attention_chunk_size={call.attention_chunk_size} are "
            "both given; expected one of the two"
        )
    if call.bidirectional_ranges is not None and not (kind is AttentionType.DECODER and call.causal):
        _refuse(call, "bidirectional_ranges", f"given, causal={call.causal}", "a causal decoder's call")


def _check_own_keys(call: AttentionCall, dims: KVCacheDims) -> None:
    if call.key is None:
        _refuse(call, "key", None, "the keys: this kind of attention keeps no cache")
    if dims.num_blocks:
        _refuse(call, "num_blocks of kv_cache", dims.num_blocks, "0, since no cache is kept")
    if call.kv_cache_dtype != "auto":
        _refuse(call, "kv_cache_dtype", repr(call.kv_cache_dtype), "'auto', since no cache is kept")
    for field in ("k_scale", "v_scale"):
        if getattr(call, field) is not None:
            _refuse(call, field, "given", "None, since no cache is kept")


def _check_cross(call: AttentionCall) -> None:
    if call.key is not None:
        _refuse(call, "key", "given", "None: the encoder's keys are in kv_cache")
    if call.causal:
        _refuse(call, "causal", True, "False: positions of the two sequences are not comparable")
    for field in ("sliding_window", "attention_chunk_size", "alibi_slopes"):
        if getattr(call, field) is not None:
            _refuse(call, field, "given", "None: positions of the two sequences are not comparable")
