"""Faults of the cache writer."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.testing.conformance.honest import HonestImpl
from attnbackend.testing.conformance.mutants.mutant import Mutant

__all__ = ["WRITER_MUTANTS"]


class WritesPadding(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """Slot -1 is the last slot, as Python counts."""
        last = kv_cache.shape[0] * kv_cache.shape[2] - 1
        super().kv_cache_update(
            key, value, kv_cache, torch.where(slot_mapping < 0, last, slot_mapping), tensors
        )


class WritesNothing(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """The op declares that it writes kv_cache, and does not."""


class KeysWithValues(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        swapped = tensors._replace(k_scale=tensors.v_scale, v_scale=tensors.k_scale)
        super().kv_cache_update(value, key, kv_cache, slot_mapping, swapped)


class OverflowsToNaN(HonestImpl):
    def quantize(self, x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Out of range is NaN (or infinite), not the largest value."""
        if dtype.itemsize > 1:
            return super().quantize(x_TKD, scale, dtype)
        scaled = x_TKD.float() if scale is None else x_TKD.float() / scale.view(-1, 1)
        limit = torch.finfo(dtype).max
        return scaled.masked_fill(scaled.abs() > limit, torch.nan).to(dtype)


class MultipliesByScale(HonestImpl):
    def quantize(self, x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return super().quantize(x_TKD, None if scale is None else 1 / scale, dtype)


class FixedPageSize(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """Blocks of 16 tokens, whatever the cache says."""
        size = kv_cache.shape[2]
        wrong = slot_mapping // 16 * size + (slot_mapping % 16) % size
        inside = (wrong < kv_cache.shape[0] * size) & (slot_mapping >= 0)
        super().kv_cache_update(key, value, kv_cache, torch.where(inside, wrong, -1), tensors)


WRITER_MUTANTS = (
    Mutant("writes_padding", "slot -1 is written", "cache_writes", WritesPadding),
    Mutant("writes_nothing", "declares a write that it never makes", "state_audit", WritesNothing),
    Mutant("keys_with_values", "keys are written where values belong", "cross_reading", KeysWithValues),
    Mutant("overflows_to_nan", "values beyond the format become NaN", "cache_writes", OverflowsToNaN),
    Mutant("multiplies_by_scale", "stores real * scale", "cross_reading", MultipliesByScale),
    Mutant("fixed_page_size", "slots are read in blocks of 16 tokens", "cache_writes", FixedPageSize),
)
