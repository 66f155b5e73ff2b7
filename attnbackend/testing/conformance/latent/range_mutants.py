"""Broken backends of latent attention that fail beyond what a number or a tile holds.

Shape legend: N queries of one request, J its keys, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.torch_mla import TorchMLAImpl
from attnbackend.testing.conformance.latent.mutant import LatentMutant

__all__ = ["LATENT_RANGE_MUTANTS"]


class _RankInTiles(TorchMLAImpl):
    tile = 64

    def gather_latents(self, *args: Any) -> tuple[Tensor, Tensor]:
        """What is left of the last tile is not read."""
        kv_c_JL, k_pe_JR = super().gather_latents(*args)
        rest = torch.arange(kv_c_JL.shape[1]) >= kv_c_JL.shape[1] // self.tile * self.tile
        return kv_c_JL.masked_fill(rest.to(kv_c_JL.device), 0.0), k_pe_JR


class _NarrowRankInTiles(_RankInTiles):
    tile = 16

    def gather_latents(self, *args: Any) -> tuple[Tensor, Tensor]:
        is_fp8 = self.params.kv_cache_dtype.startswith("fp8")
        return super().gather_latents(*args) if is_fp8 else TorchMLAImpl.gather_latents(self, *args)


class _DenseNarrowBlocks(TorchMLAImpl):
    def gather_latents(self, kv_cache: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        if kv_cache.dtype.itemsize == 1:
            block, *inner = kv_cache.stride()
            kv_cache = kv_cache.as_strided(kv_cache.shape, (min(block, kv_cache[0].numel()), *inner))
        return super().gather_latents(kv_cache, *args)


class _BlocksIn16Bits(TorchMLAImpl):
    def _slots(self, table: Tensor, seq_len: int) -> Tensor:
        return super()._slots(table.to(torch.int16).clamp(min=0), seq_len)


class _LSEClamped(TorchMLAImpl):
    def _attend(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        out_NHL, lse_NH = super()._attend(*args)
        return out_NHL, torch.where(lse_NH > -torch.inf, lse_NH.clamp(min=-30), lse_NH)


class _MaximumFromZero(TorchMLAImpl):
    def _attend(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """Weights below the smallest number are 0, and so is their sum."""
        out_NHL, lse_NH = super()._attend(*args)
        lost_NH = (lse_NH > -torch.inf) & (lse_NH < -104)
        return out_NHL.masked_fill(lost_NH.unsqueeze(-1), torch.nan), lse_NH


class _ManyHeadsOfDecodes(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        super().forward_mqa(*args)
        if args[0].shape[1] > 64 and all(r.stop - r.start == 1 for r in args[3].requests):
            args[4][:, 64:] *= 1.01


class _StaleSplits(TorchMLAImpl):
    """Merges as many partial results of 512 keys as the call before had."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.splits: list[int] = []

    def forward_mqa(self, *args: Any) -> None:
        super().forward_mqa(*args)
        requests = args[3].requests
        now = [-(-request.seq_len // 512) for request in requests]
        if len(now) == len(self.splits):
            for request, splits, last in zip(requests, now, self.splits, strict=True):
                args[4][request.start : request.stop] *= 1.01 if last > splits else 1.0
        self.splits = now


LATENT_RANGE_MUTANTS = (
    LatentMutant("rank_in_tiles", "latents are read in whole tiles of 64", "mqa", _RankInTiles),
    LatentMutant(
        "narrow_rank_in_tiles", "float8 latents are read by 16 elements, without a rest", "mqa",
        _NarrowRankInTiles,
    ),
    LatentMutant(
        "dense_narrow_blocks", "the stride between float8 blocks is taken from the shape", "mqa",
        _DenseNarrowBlocks,
    ),
    LatentMutant(
        "blocks_in_16_bits", "the numbers of blocks are read as 16 bits", "overflow", _BlocksIn16Bits
    ),
    LatentMutant("lse_clamped", "the LSE is at least -30", "mqa", _LSEClamped),
    LatentMutant("maximum_from_zero", "the maximum of logits is at least 0", "mqa", _MaximumFromZero),
    LatentMutant(
        "many_heads_of_decodes", "in decodes, heads from the 65th on are off by 1%", "mqa",
        _ManyHeadsOfDecodes,
    ),
    LatentMutant(
        "stale_splits", "partial results of a longer call are merged into a shorter one", "stateless",
        _StaleSplits,
    ),
)  # fmt: skip
