"""`FLASHMLA_SPARSE`: the library of `FLASHMLA` over selected tokens, of bfloat16 rows or of packed ones.

Shape legend: T tokens, H heads, K selected tokens, S slots of the cache, L kv_lora_rank, B blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.backends.mla.common import SparseMLAMetadataBuilder, joined_query
from attnbackend.backends.mla.flashmla import flash_mla, flash_mla_problem, row_of_tokens
from attnbackend.backends.mla.library import RANK, LibraryMLABackend, LibraryRows
from attnbackend.impl import MLAAttentionImpl, MLATensors, SparseMLAAttentionImpl
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.types import AttentionCGSupport

__all__ = ["FlashMLASparseBackend", "slots_of_positions"]

_HEADS, _SELECTED = 64, 128
"""The kernels take multiples of these."""


class FlashMLASparseMetadataBuilder(SparseMLAMetadataBuilder):
    cudagraph_support = AttentionCGSupport.ALWAYS


def slots_of_positions(
    topk: Tensor, batch: CommonAttentionMetadata, block_size: int, block_rows: int
) -> Tensor:
    """int32 [T, K]: ``block * block_rows + offset`` of selected positions; -1 for none, for those behind a
    token's own, and for tokens past the last request."""
    tokens = topk.shape[0]
    row_T = row_of_tokens(batch.query_start_loc, tokens)
    token_T = torch.arange(tokens, device=topk.device)
    behind_T = batch.query_start_loc[1:][row_T] - 1 - token_T
    own_T = torch.where(behind_T < 0, -1, batch.seq_lens[row_T] - 1 - behind_T)
    seen = (topk >= 0) & (topk <= own_T.unsqueeze(1))
    position = torch.where(seen, topk, 0).long()
    block = batch.block_table[row_T].gather(1, position // block_size).long()
    return torch.where(seen, block * block_rows + position % block_size, -1).to(torch.int32)


class FlashMLASparseImpl(LibraryRows, SparseMLAAttentionImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        assert tensors.topk_indices is not None
        tokens, heads, _ = output.shape
        if tokens == 0:
            return
        is_packed = kv_cache.dtype == torch.uint8
        block_size = self.params.block_size
        block_rows = block_size if is_packed else kv_cache.stride(0) // kv_cache.stride(1)
        slots = slots_of_positions(tensors.topk_indices, attn_metadata.common, block_size, block_rows)
        slots = F.pad(slots, (0, -slots.shape[1] % _SELECTED), value=-1)
        query = F.pad(joined_query(query_latent, query_rope), (0, 0, 0, -heads % _HEADS)).contiguous()
        run = self._packed if is_packed else self._plain
        out_THL, lse_TH = run(query, kv_cache, slots)
        nothing = (slots < 0).all(1)
        output.copy_(out_THL[:, :heads].masked_fill(nothing.view(-1, 1, 1), 0.0))
        if tensors.lse is not None:
            tensors.lse.copy_(lse_TH[:, :heads].masked_fill(nothing.unsqueeze(1), -torch.inf))

    def _plain(self, query: Tensor, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows_S1W = _matrix_of_rows(kv_cache)
        out, _, lse = flash_mla().flash_mla_sparse_fwd(query, rows_S1W, slots.unsqueeze(1), self.params.scale)
        return out, lse

    def _packed(self, query: Tensor, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        library, tokens = flash_mla(), len(query)
        schedule, splits = library.get_mla_metadata(
            None, query.shape[1], 1, num_heads_q=query.shape[1], is_fp8_kvcache=True, topk=slots.shape[1]
        )
        out, lse = library.flash_mla_with_kvcache(
            query.unsqueeze(1), kv_cache.unsqueeze(2), None, None, RANK, schedule, splits,
            softmax_scale=self.params.scale, is_fp8_kvcache=True, indices=slots.unsqueeze(1),
        )  # fmt: skip
        return out.view(tokens, query.shape[1], RANK), lse.view(tokens, query.shape[1])


def _matrix_of_rows(kv_cache: Tensor) -> Tensor:
    """The cache, whose blocks may lie apart, as rows [S, 1, W] that the kernel can number.

    Raises:
        ValueError: blocks are not a multiple of rows apart.
    """
    (blocks, block_size, width), (block, row, _) = kv_cache.shape, kv_cache.stride()
    if block % row:
        raise ValueError(
            f"FLASHMLA_SPARSE: kv_cache.stride(0) is {block}; allowed: multiples of stride(1) = {row}"
        )
    return kv_cache.as_strided(((blocks - 1) * (block // row) + block_size, 1, width), (row, width, 1))


class FlashMLASparseBackend(LibraryMLABackend):
    """Hopper and data-centre Blackwell GPUs."""

    is_sparse = True
    supported_dtypes = (torch.bfloat16,)
    supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla")
    packed_dtypes = ("fp8_ds_mla",)
    supported_block_sizes = (64,)

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return FlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return FlashMLASparseMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return capability is None or capability[0] in (9, 10)

    @classmethod
    def library_problem(cls) -> str | None:
        return flash_mla_problem(("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"))
