"""The arguments of each role of op, once. Schemas, fakes and Python bindings all come from these classes.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R requests, W block-table width.
"""

from __future__ import annotations

import typing
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["SCHEMA_TYPES", "AttentionCall", "KVCacheUpdateCall", "schema_of"]


class AttentionCall(NamedTuple):
    """One call of `attention` or of a backend's ``forward``."""

    query: Tensor
    """[T, H, D], in the model's type, or quantised to float8_e4m3fn where the backend claims it."""
    key: Tensor | None
    """[T, K, D], the new tokens' own, in the cache already; a backend may read them there instead.
    Encoder attention keeps no cache: these are its keys. Cross attention takes None: the encoder's
    keys are in the cache."""
    value: Tensor | None
    kv_cache: Tensor
    """[num_blocks, 2, block_size, K, D] for most backends, with any strides; read."""
    output: Tensor
    """[T, H, D], written: every row."""
    query_start_loc: Tensor
    """int32 [R+1]."""
    seq_lens: Tensor
    """int32 [R]."""
    block_table: Tensor
    """int32 [R, W]."""
    scale: float
    """Factor of the logits, above 0, usually head_size ** -0.5."""
    lse: Tensor | None = None
    """float32 [T, H], written: natural log of the sum of exponentials of the logits."""
    causal: bool = True
    sliding_window: int | None = None
    """Keys a query sees, itself included; as many after it too where an encoder's attention is not causal."""
    attention_chunk_size: int | None = None
    """A query at position p sees only keys j of its chunk: ``j // chunk_size == p // chunk_size``."""
    logits_soft_cap: float = 0.0
    """c in ``c * tanh(s / c)``; 0 for none."""
    alibi_slopes: Tensor | None = None
    """float32 [H]."""
    sinks: Tensor | None = None
    """[H], one more logit in the denominator."""
    bidirectional_ranges: Tensor | None = None
    """int32 [R, G, 2], positions [start, end): a query in a range sees all of it, whatever else it sees."""
    q_scale: Tensor | None = None
    """float32 [1]: real query = query * q_scale."""
    k_scale: Tensor | None = None
    """float32, [1] or [K]: real key = stored key * k_scale."""
    v_scale: Tensor | None = None
    output_scale: Tensor | None = None
    """float32 [1]: the output is float8 (or bytes of float8_e4m3fn), real = stored * output_scale."""
    output_block_scale: Tensor | None = None
    """float32 [T, G], written: as output_scale, found for each of a token's G groups of elements."""
    kv_cache_dtype: str = "auto"
    attn_type: str = "decoder"
    """"decoder", "encoder" or "encoder_only" (no cache), "encoder_decoder" (cross attention)."""
    group: int = -1
    """KV cache group whose plan of this step applies; -1 for none."""


class KVCacheUpdateCall(NamedTuple):
    """One call of `kv_cache_update` or of a backend's own writer."""

    key: Tensor
    """[T, K, D]."""
    value: Tensor
    kv_cache: Tensor
    """As the backend's `get_kv_cache_shape`, with any strides; written."""
    slot_mapping: Tensor
    """int64 [T], ``block * block_size + offset``; -1 means do not write."""
    k_scale: Tensor | None = None
    """float32, [1] or [K]: stored = real / k_scale, for float8 caches."""
    v_scale: Tensor | None = None
    kv_cache_dtype: str = "auto"
    group: int = -1


SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "int",
    int | None: "int?",
    bool: "bool",
    str: "str",
}


def schema_of(call: type, *, writes: tuple[str, ...], keyword_from: str) -> str:
    """The torch schema of a call class.

    Args:
        call: a NamedTuple class of arguments.
        writes: the tensor fields that the op writes.
        keyword_from: the first field that is passed by keyword only.
    """
    parts, defaults = [], call._field_defaults  # type: ignore[attr-defined]
    for name, annotation in typing.get_type_hints(call).items():
        if name == keyword_from:
            parts.append("*")
        kind = SCHEMA_TYPES[annotation]
        if name in writes:
            kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + writes.index(name))}!)")
        default = f"={_literal(defaults[name])}" if name in defaults else ""
        parts.append(f"{kind} {name}{default}")
    return f"({', '.join(parts)}) -> ()"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
