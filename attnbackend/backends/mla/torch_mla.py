"""`TORCH_MLA` and `TORCH_MLA_SPARSE`: latent attention in torch's own ops, on any device.

They gather one request's rows at a time, never the whole cache, and need the batch's lengths on the host, so
a CUDA graph cannot hold them.

Shape legend: T tokens, N queries of one request, J its keys, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.common import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    SparseMLAMetadataBuilder,
)
from attnbackend.backends.mla.softmax import attend_explicitly, query_chunks
from attnbackend.backends.torch_sdpa import Request, TorchSDPAMetadata, TorchSDPAMetadataBuilder
from attnbackend.impl import MLAAttentionImpl, MLATensors, SparseMLAAttentionImpl
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.types import LSEBase, MultipleOf

__all__ = ["TorchMLABackend", "TorchMLASparseBackend"]


class _HostRows:
    """Decode plans with the batch's lengths on the host."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rows = TorchSDPAMetadataBuilder(*args)

    def build_decode(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        return self._rows.build(0, common)


class TorchMLAMetadataBuilder(_HostRows, MLACommonMetadataBuilder):
    pass


class TorchMLASparseMetadataBuilder(_HostRows, SparseMLAMetadataBuilder):
    pass


class _GatheredRows(MLAAttentionImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: TorchSDPAMetadata,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        for request in attn_metadata.requests:
            rows = slice(request.start, request.stop)
            slots_J = self._slots(attn_metadata.common.block_table[request.row], request.seq_len)
            kv_c_JL, k_pe_JR = self.gather_latents(kv_cache, slots_J, tensors.k_scale)
            for part in query_chunks(rows, request.seq_len, self.params.num_heads):
                queries = query_latent[part], query_rope[part]
                visible_NJ = _visible(request, part, tensors.topk_indices, output.device)
                output[part], lse = self._attend(*queries, kv_c_JL.float(), k_pe_JR.float(), visible_NJ)
                if tensors.lse is not None:
                    tensors.lse[part] = lse
        output[attn_metadata.num_tokens :] = 0
        if tensors.lse is not None:
            tensors.lse[attn_metadata.num_tokens :] = -torch.inf

    def _slots(self, table: Tensor, seq_len: int) -> Tensor:
        """int64 [J]: where the request's keys lie."""
        size = self.params.block_size
        within = torch.arange(size, device=table.device)
        blocks = table[: -(-seq_len // size)].long()
        return (blocks.unsqueeze(1) * size + within).flatten()[:seq_len]

    def _attend(
        self, q_NHL: Tensor, q_NHR: Tensor, kv_c_JL: Tensor, k_pe_JR: Tensor, visible_NJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        latent_HNJ, rope_HNJ = (
            torch.matmul(q.float().transpose(0, 1), k.t()) for q, k in ((q_NHL, kv_c_JL), (q_NHR, k_pe_JR))
        )
        weights_HNJ, lse_HN = attend_explicitly((latent_HNJ + rope_HNJ) * self.params.scale, visible_NJ)
        out_HNL = torch.matmul(weights_HNJ, kv_c_JL)
        return out_HNL.transpose(0, 1).to(q_NHL.dtype), lse_HN.t()


def _visible(request: Request, part: slice, topk: Tensor | None, device: torch.device) -> Tensor:
    """bool [N, J]: keys up to a query's own position, of those selected where some are."""
    queries = request.stop - request.start
    first = request.seq_len - queries - request.start
    own_N1 = torch.arange(part.start + first, part.stop + first, device=device).unsqueeze(1)
    seen_NJ = torch.arange(request.seq_len, device=device) <= own_N1
    if topk is None:
        return seen_NJ
    chosen = topk[part].long()
    inside = (chosen >= 0) & (chosen < request.seq_len)
    marks = torch.zeros(len(chosen), request.seq_len + 1, dtype=torch.bool, device=device)
    marks.scatter_(1, torch.where(inside, chosen, request.seq_len), True)
    return seen_NJ & marks[:, :-1]


class TorchMLAImpl(_GatheredRows, MLACommonImpl):
    pass


class TorchMLASparseImpl(_GatheredRows, SparseMLAAttentionImpl):
    pass


class TorchMLABackend(MLACommonBackend):
    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = (
        "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
    )  # fmt: skip
    supported_head_sizes = (MultipleOf(1),)
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cpu", "cuda", "xpu")
    lse_base = LSEBase.E
    is_deterministic = True

    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return TorchMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return TorchMLAMetadataBuilder


class TorchMLASparseBackend(TorchMLABackend):
    is_sparse = True

    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return TorchMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return TorchMLASparseMetadataBuilder
