"""What each layer of a model asks of attention, found by running the model once.

Shape legend: B sequences, T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnbackend.integrations.dense_masks import ATTN_IMPLEMENTATION
from attnbackend.integrations.latent_attention import is_latent_module, latent_layer
from attnbackend.integrations.mask_patterns import LocalMask
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["Recorder", "chunk_size_of"]


def chunk_size_of(module: nn.Module, sliding_window: int | None) -> int | None:
    """The chunk of a layer whose kind is "chunked_attention"; modules do not pass it on.

    Raises:
        ValueError: the layer's kind and the window that it passes contradict each other.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or not isinstance(index, int) or not 0 <= index < len(kinds):
        return None
    if (kinds[index] == "sliding_attention") != (sliding_window is not None):
        raise ValueError(
            f"{type(module).__name__} {index} is of kind {kinds[index]!r} and passes sliding_window="
            f"{sliding_window}; expected a window from sliding layers and None from all others"
        )
    return int(config.attention_chunk_size) if kinds[index] == "chunked_attention" else None  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Asked:
    layer: AttentionLayer
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Recorder:
    """Stands in a batch's place to note what each layer asks of attention."""

    masks: list[tuple[Tensor, LocalMask]] = field(default_factory=list)
    """What was handed to the model in a mask's place, and the mask."""
    asked: dict[nn.Module, _Asked] = field(default_factory=dict)
    sharing: dict[nn.Module, nn.Module] = field(default_factory=dict)
    """Layer that attends to another's very keys -> the first one that brought them."""

    def note(self, mask: LocalMask) -> Tensor:
        self.masks.append((torch.zeros(1, 1, 1, 1), mask))
        return self.masks[-1][0]

    def ask(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        features: dict[str, Any],
    ) -> None:  # fmt: skip
        """Notes a layer; query [1, H, T, D], key and value [1, K, T, D].

        Raises:
            ValueError: the features of the ops do not describe the layer in full.
        """
        self._check(module, query, value, mask, features)
        for other, asked in self.asked.items():
            if asked.key is key and asked.value is value:
                self.sharing[module] = other
                break
        of_latents = is_latent_module(module)
        layer = latent_layer(module, query, features) if of_latents else _layer_of(query, key, features)
        self.asked[module] = _Asked(layer, key, value)

    def _check(
        self, module: nn.Module, query: Tensor, value: Tensor, mask: Tensor | None, features: dict[str, Any]
    ) -> None:  # fmt: skip
        where = type(module).__name__
        if module in self.asked:
            raise ValueError(f"{where} calls attention twice a forward, and a layer has one cache")
        if not features["causal"]:
            raise ValueError(
                f"{where} has is_causal=False: it looks ahead, as encoders and cross attention do; engines "
                "serve causal decoders alone: run the model itself with attn_implementation="
                f"{ATTN_IMPLEMENTATION!r}"
            )
        if value.shape[-1] != query.shape[-1] and not is_latent_module(module):
            raise ValueError(
                f"{where} has values of head size {value.shape[-1]} and queries of {query.shape[-1]}; "
                "they must be equal"
            )
        self._check_mask(where, mask, features)

    def _check_mask(self, where: str, mask: Tensor | None, features: dict[str, Any]) -> None:
        """The mask that a layer got is what eager attention would honour: the features must say the same."""
        if mask is None:
            return
        noted = next((m for given, m in self.masks if given.data_ptr() == mask.data_ptr()), None)
        if noted is None:
            raise ValueError(f"{where} computes an attention mask of its own, which the ops do not take")
        asked = LocalMask(*(features[name] for name in LocalMask._fields))
        if asked != noted:
            raise ValueError(f"{where} asks for {asked}, and its mask is {noted}; the two must agree")


def _layer_of(query: Tensor, key: Tensor, features: dict[str, Any]) -> AttentionLayer:
    config = AttentionSelectorConfig.dense(
        device_type=query.device.type, head_size=query.shape[-1], num_heads=query.shape[1],
        num_kv_heads=key.shape[1], dtype=query.dtype, causal=features["causal"],
        sliding_window=features["sliding_window"], attention_chunk_size=features["attention_chunk_size"],
        logits_soft_cap=features["logits_soft_cap"], has_sinks=features["sinks"] is not None,
    )  # fmt: skip
    return AttentionLayer(config, features["scale"])
