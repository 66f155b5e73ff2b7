"""Faults that one path of several has: a kernel that is chosen for some calls only, or some rows of a call.

Each is a backend whose logits are 1% too large, there and nowhere else; or a view read as if it were none.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestImpl, Places
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.types import AttentionType

__all__ = ["PATH_MUTANTS", "on_path"]


@dataclass(frozen=True)
class _Call:
    """What a dispatcher looks at."""

    query: Tensor
    kv_cache: Tensor
    batch: CommonAttentionMetadata
    at: Places
    tensors: OptionalTensors
    params: AttentionParams

    @property
    def query_lens(self) -> Tensor:
        return self.batch.query_start_loc.diff()

    @property
    def is_decode(self) -> bool:
        return int(self.query_lens.max()) == 1

    @property
    def longest(self) -> int:
        return int(self.batch.seq_lens.max())

    @property
    def group(self) -> int:
        return self.params.num_heads // self.params.num_kv_heads

    @property
    def window(self) -> int:
        return self.params.sliding_window or 0

    @property
    def is_fp8(self) -> bool:
        return "fp8" in self.params.kv_cache_dtype

    @property
    def is_hnd(self) -> bool:
        return self.kv_cache.stride(2) < self.kv_cache.stride(3)

    @property
    def is_strided(self) -> bool:
        return not self.query.is_contiguous()

    def is_kind(self, kind: AttentionType) -> bool:
        return self.params.attn_type is kind

    def row_before(self, of_R: Tensor) -> Tensor:
        """bool [T]: whether ``of_R`` holds of the row before a token's own."""
        return torch.cat([of_R.new_zeros(1), of_R[:-1]])[self.at.row_T]

    def per_head(self) -> bool:
        return self.tensors.k_scale is not None and self.tensors.k_scale.numel() > 1


class _OnPath(HonestImpl):
    when: Callable[[_Call], Any]
    """Calls, or tokens of a call (bool [T]), that are served wrong."""

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        batch = attn_metadata.common
        call = _Call(query, kv_cache, batch, self.places(batch, len(query)), tensors, self.params)
        self.wrong_T = torch.as_tensor(type(self).when(call)).bool().expand(len(query))
        super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)

    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return super().logits(q_THD, k_TLKD) * torch.where(self.wrong_T, 1.01, 1.0).view(-1, 1, 1)


class TableReadAsDense(HonestImpl):
    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        dense_RW = table_RW.as_strided(table_RW.shape, (table_RW.shape[1], 1))
        return super().gather(kv_cache, side, dense_RW, at, tensors)


class QueryReadAsDense(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return super().logits(q_THD.as_strided(q_THD.shape, torch.empty(q_THD.shape).stride()), k_TLKD)


class QueryReadFromItsBase(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        """Strides are kept, the offset is lost."""
        return super().logits(q_THD.as_strided(q_THD.shape, q_THD.stride(), 0), k_TLKD)


class OutputWrittenAsDense(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        dense = output.as_strided(output.shape, torch.empty(output.shape).stride())
        super().finish(out_THD, lse_TH, at, dense, tensors)


class LSEWrittenAsDense(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        lse = tensors.lse
        if lse is not None:
            tensors = tensors._replace(lse=lse.as_strided(lse.shape, (lse.shape[1], 1)))
        super().finish(out_THD, lse_TH, at, output, tensors)


class SinkInEachSplit(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        """Keys are split in parts of 512, each with its sink."""
        if tensors.sinks is None:
            return super().log_sum_exp(s_THL, at, tensors)
        parts_T1 = (at.seq_len_T.clamp(min=1).unsqueeze(1) + 511) // 512
        return torch.logaddexp(s_THL.logsumexp(-1), tensors.sinks.float() + parts_T1.log())


class NaNOfEmptySplits(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        """Keys are split in parts of 512; a part in which nothing is seen is -inf less -inf."""
        lse_TH = super().log_sum_exp(s_THL, at, tensors)
        if s_THL.shape[-1] <= 512:
            return lse_TH
        unseen_TH = torch.stack([part.amax(-1) == -torch.inf for part in s_THL.split(512, dim=-1)]).any(0)
        return lse_TH.masked_fill(unseen_TH, torch.nan)


class KeysInOneTile(HonestImpl):
    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        """Keys from the 513th on are not read."""
        return super().visible(at, keys, tensors) & (torch.arange(keys, device=at.row_T.device) < 512)


class SoftmaxWithoutMaximum(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        sinks = 0.0 if tensors.sinks is None else tensors.sinks.float().exp()
        return (s_THL.exp().sum(-1) + sinks).log()


def on_path(name: str, where: str, when: Callable[[_Call], Any], shown_by: str | None = None) -> Mutant:
    """A backend that is wrong where ``when`` says so: of a call, or of each of its tokens (bool [T])."""
    impl = type(f"OnPath_{name}", (_OnPath,), {"when": staticmethod(when)})
    return Mutant(name, f"logits are off by 1% {where}", "numerics", impl, shown_by=shown_by)


def _together(name: str, where: str, when: Callable[[_Call], Any]) -> Mutant:
    return on_path(name, where, when, shown_by=f"{name}-*")


ENCODER, CROSS = AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER

PATH_MUTANTS = (
    on_path("one_token", "for one token with context", lambda c: len(c.query) == 1 and c.longest > 1),
    on_path(
        "decodes_with_prompts",
        "where decodes and prompts share a batch",
        lambda c: not c.is_decode and bool((c.query_lens == 1).any()),
    ),
    on_path(
        "second_tile_of_queries",
        "for queries from the 129th on",
        lambda c: c.at.position_T - (c.at.seq_len_T - c.query_lens[c.at.row_T]) >= 128,
    ),
    on_path("many_rows", "for requests from the 33rd on", lambda c: c.at.row_T >= 32),
    on_path(
        "wide_window_of_a_decode",
        "in decodes with a window wider than a page",
        lambda c: c.is_decode and c.window > c.params.block_size,
        shown_by="window_far-uneven_decode",
    ),
    on_path(
        "wide_window_of_a_prompt",
        "in prompts with a window wider than a page",
        lambda c: not c.is_decode and c.params.block_size < c.window < c.longest,
        shown_by="window_over_pages-mixed",
    ),
    on_path(
        "window_from_a_page_border",
        "where a window starts with a page",
        lambda c: (
            (c.at.seq_len_T > (c.window or 10**9)) & ((c.at.seq_len_T - c.window) % c.params.block_size == 0)
        ),
        shown_by="window_edge-many_requests",
    ),
    on_path(
        "window_filled",
        "where the window is just filled",
        lambda c: c.at.seq_len_T == (c.window or -1),
        shown_by="window_of_a_page-*",
    ),
    on_path(
        "last_page_full",
        "in decodes that fill their last page",
        lambda c: c.is_decode & (c.at.seq_len_T % c.params.block_size == 0),
    ),
    on_path(
        "page_begun",
        "in decodes that begin a page",
        lambda c: c.is_decode & (c.at.seq_len_T > 1) & (c.at.seq_len_T % c.params.block_size == 1),
    ),
    on_path(
        "after_no_query",
        "for a request behind one without a query",
        lambda c: c.row_before(c.query_lens == 0),
    ),
    on_path(
        "after_no_keys",
        "for a decode behind one without keys",
        lambda c: c.row_before(c.batch.seq_lens == 0) & c.is_decode,
    ),
    on_path("far_decode", "in decodes beyond 1024 keys", lambda c: c.is_decode & (c.at.seq_len_T > 1024)),
    on_path(
        "short_beside_far",
        "for short requests beside long ones",
        lambda c: (c.longest > 1024) & (c.at.seq_len_T < 16),
    ),
    on_path(
        "far_alibi",
        "under alibi beyond 512 keys",
        lambda c: c.tensors.alibi_slopes is not None and c.longest > 512,
        "alibi-*",
    ),
    on_path(
        "far_cap",
        "under a soft-cap beyond 512 keys",
        lambda c: c.params.logits_soft_cap and c.longest > 512,
        shown_by="everything-long_context",
    ),
    on_path(
        "far_window",
        "under a window beyond 512 keys",
        lambda c: c.window > 512 and c.longest > c.window,
        shown_by="window_far-long_context",
    ),
    on_path(
        "far_fp8",
        "in float8 caches beyond 512 keys",
        lambda c: c.is_fp8 and c.longest > 512,
        "dtype_float32_cache_fp8-*",
    ),
    on_path(
        "far_chunks",
        "in chunks beyond 512 keys",
        lambda c: bool(c.params.attention_chunk_size) and c.longest > 512,
        "chunks-*",
    ),
    on_path(
        "no_lse_window",
        "under a window, without an LSE",
        lambda c: c.tensors.lse is None and 0 < c.window < 9,
        "window-*",
    ),
    on_path(
        "no_lse_fp8",
        "in float8 caches, without an LSE",
        lambda c: c.tensors.lse is None and c.is_fp8,
        "dtype_float32_cache_fp8-*",
    ),
    on_path(
        "no_lse_groups",
        "for groups of heads, without an LSE",
        lambda c: c.tensors.lse is None and c.group > 2,
        "group_of_three-*",
    ),
    on_path(
        "no_lse_encoder",
        "in encoders, without an LSE",
        lambda c: c.tensors.lse is None and c.is_kind(ENCODER),
        "encoder_only-*",
    ),
    on_path(
        "group_of_more_than_eight",
        "for groups of more than 8 heads in decodes",
        lambda c: c.is_decode and c.group > 8,
    ),
    on_path(
        "odd_groups",
        "for groups of no power of 2, in decodes",
        lambda c: c.is_decode and c.group not in (1, 2, 4, 8, 16),
    ),
    on_path(
        "odd_kv_heads",
        "for an odd number of key-value heads",
        lambda c: c.params.num_kv_heads % 2 == 1 and c.group == 1,
    ),
    on_path(
        "strided_decode",
        "where a decode's query is a view",
        lambda c: c.is_decode and c.is_strided,
        "strided_tensors-*",
    ),
    on_path(
        "encoder_padded",
        "in encoders with padding tokens",
        lambda c: c.is_kind(ENCODER) & (len(c.query) > c.batch.query_start_loc[-1]),
        "encoder_only-*",
    ),
    _together(
        "hnd_with_per_head_scales", "in HND caches scaled by head", lambda c: c.is_hnd and c.per_head()
    ),
    _together("window_with_fp8", "under a window in float8 caches", lambda c: c.is_fp8 and c.window),
    _together(
        "window_with_sinks",
        "with sinks under a window alone",
        lambda c: c.tensors.sinks is not None and c.window and c.tensors.alibi_slopes is None,
    ),
    _together(
        "alibi_with_soft_cap",
        "with alibi under a soft-cap alone",
        lambda c: c.tensors.alibi_slopes is not None and c.params.logits_soft_cap and not c.window,
    ),
    _together(
        "window_with_float16",
        "under a window in float16",
        lambda c: c.query.dtype is torch.float16 and c.window,
    ),
    _together(
        "strided_with_hnd",
        "where the query is a view, in HND caches",
        lambda c: c.is_hnd and c.is_strided and not c.window,
    ),
    _together(
        "ranges_with_fp8",
        "with ranges in float8 caches",
        lambda c: c.is_fp8 and c.tensors.bidirectional_ranges is not None,
    ),
    _together(
        "chunks_with_sinks",
        "with sinks in chunks",
        lambda c: c.tensors.sinks is not None and bool(c.params.attention_chunk_size),
    ),
    _together(
        "cross_with_fp8", "in cross attention over float8 caches", lambda c: c.is_fp8 and c.is_kind(CROSS)
    ),
    _together(
        "encoder_only_with_soft_cap",
        "in encoders under a soft-cap",
        lambda c: c.is_kind(ENCODER) and c.params.logits_soft_cap,
    ),
    Mutant(
        "table_read_as_dense",
        "the row stride of the block table is taken from its shape",
        "numerics",
        TableReadAsDense,
        shown_by="strided_tensors-mixed",
    ),
    Mutant(
        "query_read_as_dense",
        "the strides of the query are taken from its shape",
        "numerics",
        QueryReadAsDense,
    ),
    Mutant(
        "query_read_from_its_base",
        "the query's offset in its buffer is lost",
        "numerics",
        QueryReadFromItsBase,
    ),
    Mutant(
        "output_written_as_dense",
        "the strides of the output are taken from its shape",
        "numerics",
        OutputWrittenAsDense,
    ),
    Mutant(
        "lse_written_as_dense",
        "the strides of the LSE are taken from its shape",
        "numerics",
        LSEWrittenAsDense,
    ),
    Mutant(
        "sink_in_each_split",
        "each 512 keys have a sink of their own",
        "numerics",
        SinkInEachSplit,
        shown_by="sinks-*",
    ),
    Mutant("nan_of_empty_splits", "512 keys of which none is seen give NaN", "numerics", NaNOfEmptySplits),
    Mutant("keys_in_one_tile", "keys from the 513th on are not read", "numerics", KeysInOneTile),
    Mutant(
        "softmax_without_maximum", "exponentials of large logits overflow", "numerics", SoftmaxWithoutMaximum
    ),
)
