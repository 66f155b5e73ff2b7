"""What one attention test is about, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.types import AttentionType

__all__ = ["AttentionCase", "Probe"]

Probe = Literal[
    "window_edge", "chunk_edge", "newest_key", "soft_cap", "value_is_head", "low_logits", "long_sums"
]

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Everything that determines a batch; equal cases give equal batches, on every device."""

    query_lens: tuple[int, ...]
    """New tokens of each request; 0 is a zero-length row."""
    context_lens: tuple[int, ...]
    """Tokens before them. Negative where a row has more query tokens than its sequence:
    seq_len = context + query, so (-1 with one query token) is a graph's one-token padding row."""
    num_padded_rows: int = 0
    """Rows after the requests with seq_len 0, no tokens, block table 0."""
    num_padded_tokens: int = 0
    """Tokens after ``query_start_loc[-1]``, slot -1."""

    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: Literal["NHD", "HND"] = "NHD"
    num_layers: int = 1
    """Layers in one buffer, interleaved block by block; the batch is that of the middle one."""
    kv_outermost: bool = False
    """Keys of all blocks before values of all blocks in memory (logical shape unchanged)."""
    strided_tensors: bool = False
    """query and key as views of one fused buffer, the other tensors of a call as views of larger ones."""
    spare_blocks: int = 3
    """Blocks that no request owns, besides block 0."""

    causal: bool = True
    attn_type: AttentionType = AttentionType.DECODER
    """Of an encoder, every request's tokens are its keys: context_lens are 0, or minus its query_lens
    for a row whose seq_len is 0. In cross attention the encoder's length is that of the keys,
    context plus query, and no new key is written."""
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float = 0.0
    use_alibi: bool = False
    use_sinks: bool = False
    narrow_sinks: bool = False
    """Sinks in the query's dtype, as models keep them, instead of float32."""
    bidirectional_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """For each request its ranges of positions [start, end); shorter lists are filled with empty ranges."""
    lse: bool = True
    scale: float | None = None
    """None is head_size ** -0.5."""
    k_scale: float | tuple[float, ...] | None = None
    """One for the cache, or one for each key/value head; None passes no tensor, meaning 1."""
    v_scale: float | tuple[float, ...] | None = None

    new_tokens_written: bool = True
    """False leaves the new tokens' slots poisoned, for tests that write, then attend."""
    raw_new_tokens: bool = False
    """False rounds key and value to what the cache can hold, so that reading the new tokens from
    either gives one answer. True leaves them as they are, to see a writer's rounding."""
    probe: Probe | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "attn_type", AttentionType(self.attn_type))
        _check_lengths(self)
        _check_kind(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.layout not in ("NHD", "HND"):
            raise ValueError(f'layout={self.layout!r} is unknown; allowed: "NHD", "HND"')
        _check_probe(self)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Context plus query tokens of each request, padded rows left out."""
        pairs = zip(self.context_lens, self.query_lens, strict=True)
        return tuple(context + query for context, query in pairs)

    @property
    def writes_new_tokens(self) -> bool:
        """Whether the tokens that bring queries bring keys for the cache too."""
        return self.attn_type is AttentionType.DECODER

    @property
    def num_rows(self) -> int:
        """R, padded rows included."""
        return len(self.query_lens) + self.num_padded_rows

    @property
    def num_tokens(self) -> int:
        """T, padded tokens included."""
        return sum(self.query_lens) + self.num_padded_tokens

    @property
    def softmax_scale(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale

    @property
    def cache_dtype(self) -> torch.dtype:
        return resolve_kv_cache_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def id(self) -> str:
        """A name for test reports: shapes first, then whatever is not the default."""
        parts = [
            _DTYPE_NAMES.get(self.dtype, str(self.dtype)),
            f"{self.num_heads}x{self.num_kv_heads}heads_of_{self.head_size}",
            f"pages_of_{self.block_size}_{self.layout}",
            f"query_{_joined(self.query_lens)}_after_{_joined(self.context_lens)}",
        ]
        return "-".join(parts + _feature_names(self))


def _feature_names(case: AttentionCase) -> list[str]:
    named = {
        f"cache_{case.kv_cache_dtype}": case.kv_cache_dtype != "auto",
        f"{case.num_padded_rows}_padded_rows": case.num_padded_rows,
        f"{case.num_padded_tokens}_padded_tokens": case.num_padded_tokens,
        f"{case.num_layers}_layers_interleaved": case.num_layers > 1,
        "kv_outermost": case.kv_outermost,
        "strided": case.strided_tensors,
        "full": not case.causal,
        str(case.attn_type): case.attn_type is not AttentionType.DECODER,
        f"window_{case.sliding_window}": case.sliding_window is not None,
        f"chunks_of_{case.attention_chunk_size}": case.attention_chunk_size is not None,
        "ranges": case.bidirectional_ranges is not None,
        f"soft_cap_{case.logits_soft_cap:g}": case.logits_soft_cap,
        "alibi": case.use_alibi,
        "sinks": case.use_sinks,
        "narrow": case.narrow_sinks,
        "no_lse": not case.lse,
        f"scale_{case.scale}": case.scale is not None,
        f"k_scale_{case.k_scale}": case.k_scale is not None,
        f"v_scale_{case.v_scale}": case.v_scale is not None,
        "unwritten": not case.new_tokens_written,
        "raw": case.raw_new_tokens,
        f"probing_{case.probe}": case.probe is not None,
        f"seed_{case.seed}": case.seed,
    }
    return [name.replace(" ", "") for name, present in named.items() if present]


def _joined(lengths: tuple[int, ...]) -> str:
    if len(lengths) > 6 and len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    if len(lengths) > 6:
        return f"{len(lengths)}_requests_up_to_{max(lengths)}"
    return ".".join(map(str, lengths))


def _check_lengths(case: AttentionCase) -> None:
    if len(case.query_lens) != len(case.context_lens):
        raise ValueError(
            f"query_lens has {len(case.query_lens)} requests, context_lens "
            f"{len(case.context_lens)}; they must be equal"
        )
    if any(length < 0 for length in (*case.query_lens, *case.seq_lens)):
        raise ValueError(
            "query_lens and query_lens + context_lens must not be negative, got query_lens="
            f"{case.query_lens}, context_lens={case.context_lens}"
        )


def _check_kind(case: AttentionCase) -> None:
    if case.attn_type.keeps_no_cache and any(
        context not in (0, -query) for query, context in zip(case.query_lens, case.context_lens, strict=True)
    ):
        raise ValueError(
            f"attn_type={str(case.attn_type)!r} keeps no cache, so a request's context is 0 (or minus its "
            f"query for an empty one); got context_lens={case.context_lens}"
        )
    ranges = case.bidirectional_ranges
    if ranges is not None and len(ranges) != len(case.query_lens):
        raise ValueError(
            f"bidirectional_ranges has {len(ranges)} requests, query_lens {len(case.query_lens)}; "
            "they must be equal"
        )


def _check_probe(case: AttentionCase) -> None:
    window, chunk = case.sliding_window, case.attention_chunk_size
    longest = max(case.seq_lens, default=0)
    if case.probe == "soft_cap" and not case.logits_soft_cap > 0:
        raise ValueError(f'probe="soft_cap" needs logits_soft_cap > 0, got {case.logits_soft_cap}')
    if case.probe == "chunk_edge" and (chunk is None or chunk >= longest):
        raise ValueError(
            f'probe="chunk_edge" needs a sequence longer than a chunk, got attention_chunk_size={chunk} '
            f"and seq_lens={case.seq_lens}"
        )
    if case.probe == "window_edge" and (window is None or window >= longest):
        raise ValueError(
            f'probe="window_edge" needs a sequence longer than the window, got sliding_window='
            f"{window} and seq_lens={case.seq_lens}"
        )
    if case.probe is not None and case.probe not in get_args(Probe):
        raise ValueError(f"probe={case.probe!r} is unknown; allowed: {', '.join(get_args(Probe))}")
