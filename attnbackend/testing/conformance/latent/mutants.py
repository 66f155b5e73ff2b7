"""Broken backends of latent attention: each must be rejected by the check that is named in its data.

Shape legend: T tokens, N queries of one request, J its keys, S keys of all, H heads, L kv_lora_rank,
R qk_rope_head_dim, P qk_nope_head_dim, D = P + R, V v_head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.backends.mla.torch_mla import (
    TorchMLAImpl,
    TorchMLAMetadataBuilder,
    TorchMLASparseBackend,
    TorchMLASparseImpl,
)
from attnbackend.impl import MLATensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata, MLAPrefillMetadata
from attnbackend.testing.conformance.latent.mutant import LatentMutant
from attnbackend.testing.conformance.latent.range_mutants import LATENT_RANGE_MUTANTS
from attnbackend.testing.conformance.latent.state_mutants import LATENT_STATE_MUTANTS
from attnbackend.types import LSEBase

__all__ = ["LATENT_MUTANTS"]


class _RopeMissing(TorchMLAImpl):
    def _attend(
        self, q_NHL: Tensor, q_NHR: Tensor, kv_c_JL: Tensor, k_pe_JR: Tensor, visible_NJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super()._attend(q_NHL, torch.zeros_like(q_NHR), kv_c_JL, k_pe_JR, visible_NJ)


class _RopeMissingInPrompts(TorchMLAImpl):
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        half = query.clone()
        half[..., -16:] = 0
        super().forward_mha(half, key, value, attn_metadata, output, lse)


class _ScaleOff(TorchMLAImpl):
    def __init__(self, params: Any) -> None:
        super().__init__(replace(params, scale=params.scale * 1.01))


class _NewestKeyMissing(TorchMLAImpl):
    def _attend(
        self, q_NHL: Tensor, q_NHR: Tensor, kv_c_JL: Tensor, k_pe_JR: Tensor, visible_NJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        newest_N1 = visible_NJ.sum(1, keepdim=True) - 1
        keys_J = torch.arange(visible_NJ.shape[1], device=visible_NJ.device)
        hidden_NJ = (keys_J == newest_N1) & (newest_N1 > 0)
        return super()._attend(q_NHL, q_NHR, kv_c_JL, k_pe_JR, visible_NJ & ~hidden_NJ)


class _StalePage(TorchMLAImpl):
    def _slots(self, table: Tensor, seq_len: int) -> Tensor:
        """The page of the newest key is that before it."""
        last = (seq_len - 1) // self.params.block_size
        if last < 1:
            return super()._slots(table, seq_len)
        wrong = table.clone()
        wrong[last] = table[last - 1]
        return super()._slots(wrong, seq_len)


class _ScaleIgnored(TorchMLAImpl):
    def gather_latents(
        self, kv_cache: Tensor, slots: Tensor, k_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return super().gather_latents(kv_cache, slots, None)


class _LatentAlsoScalesRope(TorchMLAImpl):
    def gather_latents(
        self, kv_cache: Tensor, slots: Tensor, k_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = super().gather_latents(kv_cache, slots, k_scale)
        return kv_c, k_pe * 0.5 if self.params.kv_cache_dtype == "fp8_ds_mla" else k_pe


class _BaseTwoForgotten(TorchMLAImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        tensors: MLATensors,
    ) -> None:  # fmt: skip
        super().forward_mqa(query_latent, query_rope, kv_cache, attn_metadata, output, tensors)
        if tensors.lse is not None:
            tensors.lse.div_(0.6931471805599453)


class _PromptLSEInBaseTwo(TorchMLAImpl):
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        super().forward_mha(query, key, value, attn_metadata, output, lse)
        if lse is not None:
            lse.div_(0.6931471805599453)


class _PaddingLeaked(TorchMLAImpl):
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Values are padded to the keys' width, and the output is cut at the wrong end."""
        width = value.shape[-1]
        padded = F.pad(value, (0, query.shape[-1] - width))
        wide = torch.empty(query.shape, dtype=output.dtype, device=output.device)
        super().forward_mha(query, key, padded, attn_metadata, wide, lse)
        output.copy_(wide[..., -width:])


class _ScaleOfOwnKeys(TorchMLAImpl):
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """The layer's factor is not asked for."""
        usual = TorchMLAImpl(replace(self.params, scale=query.shape[-1] ** -0.5))
        usual.forward_mha(query, key, value, attn_metadata, output, lse)


class _ChunksCausal(TorchMLAImpl):
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        causal = replace(attn_metadata, causal=True)
        super().forward_mha(query, key, value, causal, output, lse)


class _PaddingNotZeroed(TorchMLAImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        tensors: MLATensors,
    ) -> None:  # fmt: skip
        super().forward_mqa(query_latent, query_rope, kv_cache, attn_metadata, output, tensors)
        output[attn_metadata.num_tokens :] = 1


class _RowSwapped(TorchMLAImpl):
    def mla_kv_cache_update(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None
    ) -> None:
        """The rotated key before the latent."""
        row = torch.cat([k_pe, kv_c], -1)
        sizes = (kv_c.shape[-1], k_pe.shape[-1])
        super().mla_kv_cache_update(*row.split(sizes, -1), kv_cache, slot_mapping, k_scale)  # type: ignore[call-arg]


class _WritesPadding(TorchMLAImpl):
    def mla_kv_cache_update(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None
    ) -> None:
        super().mla_kv_cache_update(kv_c, k_pe, kv_cache, slot_mapping.clamp(min=0), k_scale)


class _SelectionIgnored(TorchMLASparseImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        tensors: MLATensors,
    ) -> None:  # fmt: skip
        every = tensors._replace(topk_indices=None)
        super().forward_mqa(query_latent, query_rope, kv_cache, attn_metadata, output, every)


class _NoneIsNewest(TorchMLASparseImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        tensors: MLATensors,
    ) -> None:  # fmt: skip
        """-1 counts back from the end, as in Python."""
        assert tensors.topk_indices is not None
        batch, chosen_TN = attn_metadata.common, tensors.topk_indices.clone()
        starts = batch.query_start_loc.tolist()
        for row, length in enumerate(batch.seq_lens.tolist()):
            own_NN = chosen_TN[starts[row] : starts[row + 1]]
            own_NN[own_NN < 0] = length - 1
        wrong = tensors._replace(topk_indices=chosen_TN)
        super().forward_mqa(query_latent, query_rope, kv_cache, attn_metadata, output, wrong)


class _ChunkTwice(TorchMLAMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:  # fmt: skip
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if plan.prefill is None or not plan.prefill.chunks:
            return plan
        chunks = (*plan.prefill.chunks, plan.prefill.chunks[-1])
        return replace(plan, prefill=replace(plan.prefill, chunks=chunks))


class _LastChunkMissing(TorchMLAMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:  # fmt: skip
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if plan.prefill is None:
            return plan
        return replace(plan, prefill=replace(plan.prefill, chunks=plan.prefill.chunks[:-1]))


def _shape_with_heads(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:  # fmt: skip
    return (num_blocks, block_size, num_kv_heads, head_size)


def _transposed(query_nope_THP: Tensor, kv_b_weight: Tensor) -> Tensor:
    """W_UK of each head read as if it lay [L, P] in memory."""
    heads, _, rank = kv_b_weight.shape
    nope = query_nope_THP.shape[-1]
    w_HPL = kv_b_weight[:, :nope].reshape(heads, rank, nope).transpose(1, 2)
    return torch.bmm(query_nope_THP.transpose(0, 1), w_HPL).transpose(0, 1)


def _values_of_keys(latent_THL: Tensor, kv_b_weight: Tensor, v_head_dim: int) -> Tensor:
    """W_UK's rows in the place of W_UV's."""
    w_HVL = kv_b_weight[:, :v_head_dim]
    return torch.bmm(latent_THL.transpose(0, 1), w_HVL.transpose(1, 2)).transpose(0, 1)


def _sum_of_outputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Partial results averaged, whatever their weights."""
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


class _SelectionInOneTile(TorchMLASparseImpl):
    def forward_mqa(self, *args: Any) -> None:
        query, rope, kv_cache, plan, output, tensors = args
        first = tensors.topk_indices.clone()
        first[:, 64:] = -1
        super().forward_mqa(query, rope, kv_cache, plan, output, tensors._replace(topk_indices=first))


class _RequestsInOneTile(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        query, rope, kv_cache, plan, *rest = args
        wrong = replace(plan, requests=tuple(r._replace(row=r.row % 128) for r in plan.requests))
        super().forward_mqa(query, rope, kv_cache, wrong, *rest)


class _DecodesWithoutScale(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        query, rope, kv_cache, plan, output, tensors = args
        if all(r.stop - r.start == 1 for r in plan.requests):
            tensors = tensors._replace(k_scale=None)
        super().forward_mqa(query, rope, kv_cache, plan, output, tensors)


class _DefaultDtype(TorchMLAImpl):
    def _attend(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        out_NHL, lse_NH = super()._attend(*args)
        return out_NHL.to(torch.get_default_dtype()).to(out_NHL.dtype), lse_NH


class _OneKeyLost(TorchMLAImpl):
    def forward_mha(self, *args: Any) -> None:
        query, key, value, plan, output, lse = args
        super().forward_mha(query, key, value, plan, output, lse)
        if plan.max_seqlen_k == 1 and not plan.causal:
            lse.fill_(-torch.inf)


_ALL = (
    LatentMutant("rope_missing", "scores of decodes lack the rotated part", "mqa", _RopeMissing),
    LatentMutant("rope_missing_in_prompts", "so do those of prompts", "mha", _RopeMissingInPrompts),
    LatentMutant("scale_off_by_one_percent", "the logits' factor is 1% off", "mqa", _ScaleOff),
    LatentMutant("newest_key_missing", "a token does not see itself", "mqa", _NewestKeyMissing),
    LatentMutant("stale_page", "the newest key's page is that before it", "mqa", _StalePage),
    LatentMutant("k_scale_ignored", "float8 rows are read without their scale", "mqa", _ScaleIgnored),
    LatentMutant(
        "packed_rope_scaled", "the rotated key of a packed row is scaled too", "mqa", _LatentAlsoScalesRope
    ),
    LatentMutant("lse_in_base_two", "the LSE is in base 2, claimed natural", "mqa", _BaseTwoForgotten),
    LatentMutant(
        "lse_base_claimed_wrongly", "the LSE is natural, claimed in base 2", "mqa",
        claims={"lse_base": LSEBase.TWO},
    ),
    LatentMutant(
        "prompt_lse_in_base_two", "the LSE of prompts is in base 2", "mixed", _PromptLSEInBaseTwo
    ),
    LatentMutant("v_padding_leaked", "the columns that pad values reach the output", "mha", _PaddingLeaked),
    LatentMutant("context_causal", "a context chunk is attended to causally", "mixed", _ChunksCausal),
    LatentMutant("chunk_merged_twice", "the last context chunk counts twice", "mixed", builder=_ChunkTwice),
    LatentMutant("chunk_missing", "the last context chunk is left out", "mixed", builder=_LastChunkMissing),
    LatentMutant(
        "absorb_transposed", "W_UK is read as its transpose lies", "mixed", patch=("absorb", _transposed)
    ),
    LatentMutant(
        "values_of_keys", "values are projected with W_UK's rows", "mixed",
        patch=("up_project", _values_of_keys),
    ),
    LatentMutant(
        "merged_without_weights", "partial results are averaged", "mixed",
        patch=("merge_attn_states", _sum_of_outputs),
    ),
    LatentMutant("padding_not_zeroed", "tokens behind the last request are 1", "padding", _PaddingNotZeroed),
    LatentMutant("row_swapped", "the rotated key is written before the latent", "cache_writes", _RowSwapped),
    LatentMutant("writes_padding", "slot -1 writes to slot 0", "cache_writes", _WritesPadding),
    LatentMutant(
        "claims_windows", "a window is claimed, and ignored", "refusal",
        claims={"supports_sliding_window": True},
    ),
    LatentMutant("scale_of_own_keys", "prompts take the usual factor", "mha", _ScaleOfOwnKeys),
    LatentMutant(
        "cache_with_heads", "the cache's shape has a dimension of heads", "cache_writes",
        claims={"get_kv_cache_shape": staticmethod(_shape_with_heads)},
    ),
    LatentMutant(
        "none_is_newest", "a selection of -1 is the newest key", "mqa", _NoneIsNewest,
        base=TorchMLASparseBackend,
    ),
    LatentMutant(
        "selection_ignored", "all keys are seen, not the selected ones", "mqa", _SelectionIgnored,
        base=TorchMLASparseBackend,
    ),
    LatentMutant(
        "selection_in_one_tile", "no more than 64 selected keys are read", "mqa", _SelectionInOneTile,
        base=TorchMLASparseBackend,
    ),
    LatentMutant(
        "requests_in_one_tile", "requests from the 129th on have the pages of those from the first", "mqa",
        _RequestsInOneTile,
    ),
    LatentMutant(
        "sums_in_default_dtype", "results pass through torch's default dtype", "mqa", _DefaultDtype
    ),
    LatentMutant("one_key_lost", "context chunks of one key count for nothing", "mixed", _OneKeyLost),
    LatentMutant(
        "decodes_without_scale", "float8 rows are read without their scale in decodes", "stateless",
        _DecodesWithoutScale,
    ),
    *LATENT_STATE_MUTANTS, *LATENT_RANGE_MUTANTS,
)  # fmt: skip
LATENT_MUTANTS: dict[str, LatentMutant] = {m.name: m for m in _ALL}
"""By name."""
