"""What the model runner needs of a model, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnbackend.impl import MLADims
from attnbackend.layers.paged import BatchTensors, BoundLayer
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["AttentionLayer", "BatchTensors", "BoundLayer", "ServedModel"]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model, as selection sees it; cache choices are still open."""

    config: AttentionSelectorConfig
    scale: float
    kv_sharing_target: str | None = None
    """Name of the layer whose cache this one reads, writing none; None: it has its own."""
    mla: MLADims | None = None
    """Of latent attention: its sizes."""


class ServedModel(Protocol):
    """A causal language model whose attention reads and writes paged caches through the agnostic ops."""

    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """Every attention layer, by name, in the order in which they run."""
        ...

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        """Gives each layer its cache."""
        ...

    def compile(self, backend: str | None, *, in_pieces: bool = False) -> None:
        """Compiles the model, with the named attention backend or the selected one in its graphs.

        ``in_pieces`` asks for attention apart from the rest, see `attnbackend.compile`; a step can be
        captured in pieces without, at the cost of more CUDA graphs.
        """
        ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        """Logits [len(logits_indices), vocab_size] at the given tokens of the batch [T]."""
        ...
