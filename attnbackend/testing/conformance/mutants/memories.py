"""Faults of what is kept from one call for the next.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestImpl
from attnbackend.testing.conformance.mutants.mutant import Mutant

__all__ = ["MEMORY_MUTANTS"]

_OF_THE_BATCH = ("query_start_loc", "seq_lens", "block_table")


def _keeping(name: str, *, by_address: bool = False) -> type[HonestImpl]:
    """A kernel that reads the first call's argument ``name`` ever after.

    ``by_address``: at each address the first that lay there.
    """

    class Keeps(HonestImpl):
        def forward(
            self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
            attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
        ) -> None:  # fmt: skip
            common: CommonAttentionMetadata = attn_metadata.common
            if name in _OF_THE_BATCH:
                common = common.replace(**{name: self.keep(getattr(common, name))})
            elif name == "query":
                query = self.keep(query)
            elif name == "output":
                output = self.keep(output, copy=False)
            else:
                tensors = tensors._replace(**{name: self.keep(getattr(tensors, name))})
            plan = type(attn_metadata)(common=common)
            super().forward(query, key, value, kv_cache, plan, output, tensors)

        def keep(self, x: Any, *, copy: bool = True) -> Any:
            if x is None:
                return None
            first: dict[Any, Tensor] = self.__dict__.setdefault("first", {})
            where = x.data_ptr() if by_address else None
            kept = first.setdefault(where, x.clone() if copy else x)
            return kept if kept.shape == x.shape else x

    return Keeps


class KeepsFirstSlots(HonestImpl):
    first: Tensor | None = None

    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        if self.first is None or self.first.shape != slot_mapping.shape:
            self.first = slot_mapping.clone()
        inside = self.first.clamp(max=kv_cache.shape[0] * kv_cache.shape[2] - 1)
        super().kv_cache_update(key, value, kv_cache, inside, tensors)


class KeepsFirstWriteScale(HonestImpl):
    first: float | None = None

    def quantize(self, x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Asks the device for a scale once."""
        if scale is not None and scale.numel() == 1:
            self.first = self.first or float(scale)
            scale = torch.full_like(scale, self.first)
        return super().quantize(x_TKD, scale, dtype)


def _first(name: str, what: str) -> Mutant:
    fault = f"{what} of the first call {'are' if what.endswith('s') else 'is'} used ever after"
    return Mutant(f"keeps_first_{name}", fault, "stateless", _keeping(name))


def _by_address(name: str, what: str) -> Mutant:
    impl = _keeping(name, by_address=True)
    return Mutant(f"remembers_{name}", f"{what} known by its address, whatever lies there", "stateless", impl)


MEMORY_MUTANTS = (
    _first("query", "the query"),
    _first("output", "the output's memory"),
    _first("query_start_loc", "starts"),
    _first("seq_lens", "lengths"),
    _first("block_table", "the block table"),
    _first("k_scale", "k_scale"),
    _first("v_scale", "v_scale"),
    _first("q_scale", "q_scale"),
    _first("alibi_slopes", "alibi slopes"),
    _first("sinks", "sinks"),
    _first("bidirectional_ranges", "ranges"),
    _first("lse", "the LSE's memory"),
    _by_address("seq_lens", "a tensor of lengths is"),
    _by_address("block_table", "a block table is"),
    Mutant("keeps_first_slots", "slots of the first call are used ever after", "stateless", KeepsFirstSlots),
    Mutant(
        "keeps_first_write_scale", "values are stored by the scale of the first call", "stateless",
        KeepsFirstWriteScale,
    ),
)  # fmt: skip
