"""`CUTLASS_MLA`: the decode kernel for data-centre Blackwell GPUs that vLLM's package brings.

The kernel takes one token of every request, of up to 128 heads, whose rows of output it writes as if there
were 128; a batch with more tokens a request becomes one of single tokens.

Shape legend: T tokens, H heads, L kv_lora_rank, W table width.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.common import MLACommonImpl, MLACommonMetadataBuilder
from attnbackend.backends.mla.flashmla import each_token_alone
from attnbackend.backends.mla.library import RANK, LibraryMLABackend, LibraryRows, import_problem
from attnbackend.impl import MLAAttentionImpl, MLATensors
from attnbackend.metadata import AttentionMetadata
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import AttentionCGSupport, Reason

__all__ = ["CutlassMLABackend"]

_MODULE = "vllm._custom_ops"
_NAMES = ("sm100_cutlass_mla_decode", "sm100_cutlass_mla_get_workspace_size")
_MAX_HEADS = 128


def custom_ops() -> Any:
    """The library."""
    return importlib.import_module(_MODULE)


class CutlassMLAMetadataBuilder(MLACommonMetadataBuilder):
    """The kernel reads lengths on the device, and every call allocates its workspace."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16


class CutlassMLAImpl(LibraryRows, MLACommonImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        batch, (tokens, heads, _) = attn_metadata.common, output.shape
        if tokens == 0:
            return
        lens, table = each_token_alone(batch, tokens)
        out = output.new_empty(tokens, _MAX_HEADS, RANK)
        lse = torch.empty(tokens, _MAX_HEADS, dtype=torch.float32, device=output.device)
        custom_ops().sm100_cutlass_mla_decode(
            out, lse, query_latent.contiguous(), query_rope.contiguous(), kv_cache, lens, table,
            self._workspace(lens, table), self.params.scale, -1,
        )  # fmt: skip
        output.copy_(out[:, :heads])
        self.finish(output, lse[:, :heads], batch, tensors)

    def _workspace(self, lens: Tensor, table: Tensor) -> Tensor:
        from attnbackend.kernels.triton.splits import processor_count

        longest = table.shape[1] * self.params.block_size
        processors = processor_count(lens.device)
        size = custom_ops().sm100_cutlass_mla_get_workspace_size(longest, lens.shape[0], processors, -1)
        return torch.empty(size, dtype=torch.uint8, device=lens.device)


class CutlassMLABackend(LibraryMLABackend):
    supported_block_sizes = (128,)
    min_compute_capability = (10, 0)

    @staticmethod
    def get_name() -> str:
        return "CUTLASS_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return CutlassMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return CutlassMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return capability is None or capability[0] == 10

    @classmethod
    def library_problem(cls) -> str | None:
        problem = import_problem(_MODULE, _NAMES)
        if problem is None and not hasattr(torch.ops._C, _NAMES[0]):
            return f"{_MODULE} was built without {_NAMES[0]}"
        return problem

    @classmethod
    def library(cls) -> str | None:
        return None if cls.library_problem() else _MODULE

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        if config.num_heads > _MAX_HEADS:
            return [Reason("num_heads", config.num_heads, f"at most {_MAX_HEADS}")]
        return super().supports_combination(config)
