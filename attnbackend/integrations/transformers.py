"""transformers models on the agnostic ops.

Importing this module registers the attention implementation "attnbackend": models loaded with
``attn_implementation="attnbackend"`` run on the ops, with transformers' own caches. `TransformersModel`
serves a model over paged caches; `Engine` uses it.

Shape legend: B sequences, T tokens, N query tokens a sequence, L keys a sequence, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnbackend.compiler import make_compiler
from attnbackend.integrations.dense_cache import attend_dense
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["ATTN_IMPLEMENTATION", "TransformersModel", "attention_forward"]

ATTN_IMPLEMENTATION = "attnbackend"
_BATCH = "attnbackend_batch"
_BOUND = "attnbackend_layer"
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_REFUSED = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments that change the result and that the ops do not take."""


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: query [B, H, N, D], key and value [B, K, L, D] -> [B, N, H, D].

    Raises:
        ValueError: dropout, or an argument that the ops cannot honour.
    """
    _check_arguments(dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    features = {
        "scale": scale, "causal": causal, "sliding_window": sliding_window,
        "logits_soft_cap": softcap or 0.0, "sinks": s_aux,
    }  # fmt: skip
    batch = kwargs.get(_BATCH)
    if batch is None:
        return attend_dense(query, key, value, attention_mask, features), None
    if isinstance(batch, _Recorder):
        batch.layers[module] = _layer_of(query, key, features)
        return torch.zeros_like(query.transpose(1, 2)), None
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = write_and_attend(q_THD, k_TKD, v_TKD, getattr(module, _BOUND), batch, **features)
    return out_THD.unsqueeze(0), None


def _check_arguments(dropout: float, kwargs: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"dropout={dropout}: attnbackend serves inference; call model.eval() first"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is not supported by attn_implementation={ATTN_IMPLEMENTATION!r}"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attn_implementation='eager': no kernel forms the weights"
        )


@dataclass(frozen=True)
class _Recorder:
    """Stands in a batch's place to note what each layer asks of attention."""

    layers: dict[nn.Module, AttentionLayer] = field(default_factory=dict)


def _layer_of(query: Tensor, key: Tensor, features: dict[str, Any]) -> AttentionLayer:
    config = AttentionSelectorConfig.dense(
        device_type=query.device.type, head_size=query.shape[-1], num_heads=query.shape[1],
        num_kv_heads=key.shape[1], dtype=query.dtype, causal=features["causal"],
        sliding_window=features["sliding_window"], logits_soft_cap=features["logits_soft_cap"],
        has_sinks=features["sinks"] is not None,
    )  # fmt: skip
    return AttentionLayer(config, features["scale"])


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """transformers' mask function: the padding mask, bool [B, L], or None where nothing is padded.

    Raises:
        ValueError: keys of a static cache that are not filled yet.
    """
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the cache holds {kv_length} keys from {kv_offset} where {q_offset + q_length} tokens were seen: "
            "static caches are not supported; use a DynamicCache, or attnbackend.Engine"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    return None if bool(mask.all()) else mask


AttentionInterface.register(ATTN_IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, padding_mask)


class TransformersModel:
    """A transformers causal language model, served over paged caches.

    Its attention implementation is set to "attnbackend" and stays so; the model goes on working by itself.

    Args:
        model: a model such as ``AutoModelForCausalLM`` gives, in evaluation mode.

    Raises:
        TypeError: not a transformers causal language model.
        ValueError: an attention kind that the ops do not have, or a model in training mode.
    """

    def __init__(self, model: Any) -> None:
        _check_model(model)
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        text_config = model.config.get_text_config()
        self.model = model
        self.vocab_size = int(text_config.vocab_size)
        self.max_model_len = int(text_config.max_position_embeddings)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self._modules = _record_layers(self)
        self._bound: dict[nn.Module, BoundLayer] = {}
        self._layers: list[nn.Module] = []
        self._compiled: list[Any] = []

    def attention_layers(self) -> dict[str, AttentionLayer]:
        """Every attention layer in the order in which they run, found by running the model on one token."""
        names = {module: name for name, module in self.model.named_modules()}
        return {names[module]: layer for module, layer in self._modules.items()}

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        """Gives each layer its cache, as attributes of its attention module."""
        modules = dict(self.model.named_modules())
        for name, layer in layers.items():
            setattr(modules[name], _BOUND, layer)
        self._first = next((modules[name], layer) for name, layer in layers.items())

    def compile(self, backend: str | None) -> None:
        """Compiles each decoder layer; equal layers share one compilation."""
        self.compiler = make_compiler(backend)
        for layer in _decoder_layers(self._modules, self.model):
            layer.compile(backend=self.compiler, dynamic=True, fullgraph=True)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        """Logits [len(logits_indices), vocab_size] at the given tokens of the batch [T]."""
        module, layer = self._first
        if getattr(module, _BOUND) is not layer:
            raise RuntimeError(
                "the model was given to another engine since; make a new Engine of it"
            )
        result = self.model(
            input_ids=input_ids[None], position_ids=positions[None], attention_mask=self._no_mask,
            use_cache=False, logits_to_keep=logits_indices, **{_BATCH: batch},
        )  # fmt: skip
        return result.logits[0]


def _check_model(model: Any) -> None:
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "generation_config"):
        raise TypeError(
            f"{type(model).__name__} is neither a transformers causal language model nor a ServedModel"
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - _SUPPORTED_LAYER_TYPES:
        raise ValueError(
            f"layer types {sorted(kinds - _SUPPORTED_LAYER_TYPES)} are not supported; "
            f"allowed: {sorted(_SUPPORTED_LAYER_TYPES)}"
        )


def _record_layers(model: TransformersModel) -> dict[nn.Module, AttentionLayer]:
    """Runs the model on one token with attention that only notes what it is asked for."""
    recorder = _Recorder()
    with torch.no_grad():
        model.model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
            attention_mask=model._no_mask, use_cache=False, **{_BATCH: recorder},
        )  # fmt: skip
    if not recorder.layers:
        raise ValueError(
            f"{type(model.model).__name__} did not call its attention interface, so attnbackend cannot serve it"
        )
    return recorder.layers


def _decoder_layers(
    attention_modules: Mapping[nn.Module, Any], model: nn.Module
) -> list[nn.Module]:
    """For each attention module the repeated block around it: the element of a ModuleList that holds it."""
    return [
        block
        for module_list in model.modules() if isinstance(module_list, nn.ModuleList)
        for block in module_list
        if any(module in attention_modules for module in block.modules())
    ]  # fmt: skip
