"""transformers models on the agnostic ops.

Importing this module registers the attention implementation "attnbackend": models loaded with
``attn_implementation="attnbackend"`` run on the ops, with transformers' own caches. `TransformersModel`
serves a model over paged caches; `Engine` uses it.

Shape legend: B sequences, T tokens, N query tokens a sequence, L keys a sequence, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnbackend._torch_compat import compiled_call, run_module, set_compiled_call, with_own_code
from attnbackend.compiler import make_compiler
from attnbackend.fx_passes import GraphPass, MergeLinears, SelectBackend
from attnbackend.integrations.dense_cache import attend_dense
from attnbackend.layers.merged_linears import merge_linears
from attnbackend.layers.packed_linear import pack_linears, unpack_linears
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend
from attnbackend.ops.packed_linear import packed_weights_in_use
from attnbackend.platforms import free_memory
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["ATTN_IMPLEMENTATION", "TransformersModel", "attention_forward"]

ATTN_IMPLEMENTATION = "attnbackend"
_BATCH = "attnbackend_batch"
_BOUND = "attnbackend_layer"
_OWNER = "attnbackend_owner"
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
        _check_dense_mask(attention_mask)
        return attend_dense(query, key, value, attention_mask, features), None
    if isinstance(batch, _Recorder):
        batch.check(module, query, value, attention_mask)
        batch.layers[module] = _layer_of(query, key, features)
        return torch.zeros_like(query.transpose(1, 2)), None
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = write_and_attend(q_THD, k_TKD, v_TKD, getattr(module, _BOUND), batch, **features)
    return out_THD.unsqueeze(0), None


def _check_arguments(dropout: float, kwargs: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout}: attnbackend serves inference; call model.eval() first")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported by attn_implementation={ATTN_IMPLEMENTATION!r}")
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attn_implementation='eager': no kernel forms the weights"
        )


def _check_dense_mask(mask: Tensor | None) -> None:
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; attn_implementation={ATTN_IMPLEMENTATION!r} "
            "takes a padding mask [batch, tokens], since the ops make the causal mask themselves"
        )


@dataclass(frozen=True)
class _Recorder:
    """Stands in a batch's place to note what each layer asks of attention."""

    no_mask: Tensor
    layers: dict[nn.Module, AttentionLayer] = field(default_factory=dict)

    def check(self, module: nn.Module, query: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Refuses layers that the features of the ops do not describe in full."""
        where = type(module).__name__
        if module in self.layers:
            raise ValueError(f"{where} calls attention twice a forward, and a layer has one cache")
        if mask is not None and mask.data_ptr() != self.no_mask.data_ptr():
            raise ValueError(f"{where} computes an attention mask of its own, which the ops do not take")
        if value.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"{where} has values of head size {value.shape[-1]} and queries of {query.shape[-1]}; "
                "they must be equal"
            )


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
        ValueError: keys of a static cache that are not filled yet, or a mask that is more than causal,
            window and padding.
    """
    _check_plain_mask(**kwargs)
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the cache holds {kv_length} keys from {kv_offset} and {q_offset + q_length} tokens were seen: "
            "static caches are not supported (use a DynamicCache, or attnbackend.Engine), nor is a mask "
            "of another length than the tokens"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[1] != kv_offset + kv_length:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens and {kv_offset + kv_length} were seen, "
            "those in the cache included; give a mask over all of them, or none"
        )
    mask = attention_mask[:, -kv_length:].bool()
    return None if bool(mask.all()) else mask


def _check_plain_mask(
    config: Any = None, allow_is_causal_skip: bool = False, allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """transformers allows to leave out the mask, one way or the other, only where it is a plain one."""
    if config is not None:
        _check_config(config)
    if not (allow_is_causal_skip or allow_is_bidirectional_skip) and torch.compiler.is_compiling():
        raise ValueError(
            "while it is traced, transformers cannot tell a plain mask from one of packed sequences: pass "
            "attention_mask, or leave use_cache=True"
        )
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise ValueError(
            "the attention mask is more than causal, window and padding (packed sequences with position_ids "
            f"that start again, or a mask function): attn_implementation={ATTN_IMPLEMENTATION!r} does not "
            "support that; give the sequences as a padded batch, or use attn_implementation='sdpa'"
        )
    if local_size is not None and not allow_is_causal_skip:
        raise ValueError(
            f"a window of {local_size} to both sides is not supported: the ops' windows reach back only"
        )


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
        self._attn_implementation_before = model.config._attn_implementation
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        text_config = model.config.get_text_config()
        self.model = model
        self.vocab_size = int(text_config.vocab_size)
        self.max_model_len = _longest_sequence(text_config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_merged = 0
        """Groups of linear layers whose weights were laid together, see `merge_linears`."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        try:
            self._modules = _record_layers(self)
        except Exception as error:
            self.give_back()
            raise ValueError(f"{type(model).__name__} cannot be served: {error}") from error

    def give_back(self) -> None:
        """Sets the model's attention implementation to what it was, where no engine came of this."""
        self.model.set_attn_implementation(self._attn_implementation_before)

    def attention_layers(self) -> dict[str, AttentionLayer]:
        """Every attention layer in the order in which they run, found by running the model on one token."""
        names = {module: name for name, module in self.model.named_modules()}
        return {names[module]: layer for module, layer in self._modules.items()}

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        """Gives each layer its cache, as attributes of its attention module, until this object goes."""
        _release(self.model)
        owner = self.model.__dict__[_OWNER] = object()
        weakref.finalize(self, _release, self.model, owner)
        modules = dict(self.model.named_modules())
        for name, layer in layers.items():
            setattr(modules[name], _BOUND, layer)
        self._first = next((modules[name], layer) for name, layer in layers.items())
        if self.device.type == "cpu":
            self.packing = pack_linears(self.model, max_bytes=free_memory(self.device) // 2)
        else:
            self.num_merged = merge_linears(self.model)

    def compile(self, backend: str | None) -> None:
        """Compiles each decoder layer for serving; equal layers share one compilation."""
        passes: list[GraphPass] = [SelectBackend(backend)]
        if self.num_merged:
            passes.append(MergeLinears())
        self.compiler = make_compiler(backend, passes=passes)
        run = torch.compile(with_own_code(run_module), backend=self.compiler, dynamic=True, fullgraph=True)
        for layer in _decoder_layers(self._modules, self.model):
            set_compiled_call(layer, _CompiledLayer(run, layer))

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        """Logits [len(logits_indices), vocab_size] at the given tokens of the batch [T]."""
        module, layer = self._first
        if getattr(module, _BOUND, None) is not layer:
            raise RuntimeError("the model was given to another engine since; make a new Engine of it")
        if self.model.training:
            raise RuntimeError("the model was put in training mode since; call model.eval()")
        chosen = self.model.config.get_text_config()._attn_implementation
        if chosen != ATTN_IMPLEMENTATION:
            raise RuntimeError(
                f"the model's attention implementation was set to {chosen!r} since; call "
                f"model.set_attn_implementation({ATTN_IMPLEMENTATION!r})"
            )
        with packed_weights_in_use():
            result = self._run(input_ids, positions, logits_indices, batch)
        return result.logits[0]

    def _run(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Any:  # fmt: skip
        return self.model(
            input_ids=input_ids[None], position_ids=positions[None], attention_mask=self._no_mask,
            use_cache=False, logits_to_keep=logits_indices, **{_BATCH: batch},
        )  # fmt: skip


@dataclass(frozen=True)
class _CompiledLayer:
    """Called in a layer's place: compiled in served batches, as it is when the model is used by itself."""

    run: Callable[..., Any]
    layer: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run if isinstance(kwargs.get(_BATCH), BatchTensors) else run_module
        return run(self.layer, *args, **kwargs)


def _release(model: nn.Module, owner: object = None) -> None:
    """Takes what the engine ``owner`` put into the model out of it; None: whichever engine did."""
    if owner not in (None, model.__dict__.get(_OWNER)):
        return
    model.__dict__.pop(_OWNER, None)
    for module in model.modules():
        if hasattr(module, _BOUND):
            delattr(module, _BOUND)
        if isinstance(compiled_call(module), _CompiledLayer):
            set_compiled_call(module, None)
    unpack_linears(model)


def _longest_sequence(config: Any) -> int:
    """Positions that a request may have, whatever is served beside it.

    With LongRoPE, transformers takes the factors of the longest request of a call for all of them, so a batch
    is right only while every request is within the original length.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if "longrope" in (kind.get("rope_type"), kind.get("type")):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def _check_config(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _SUPPORTED_LAYER_TYPES:
        raise ValueError(
            f"layer types {sorted(kinds - _SUPPORTED_LAYER_TYPES)} are not supported; "
            f"allowed: {sorted(_SUPPORTED_LAYER_TYPES)}"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "config.is_causal=False, a decoder made to look ahead, is not supported; use "
            "attn_implementation='sdpa'"
        )


def _check_model(model: Any) -> None:
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "generation_config"):
        raise TypeError(
            f"{type(model).__name__} is neither a transformers causal language model nor a ServedModel"
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoders can be served")
    _check_config(model.config.get_text_config())


def _record_layers(model: TransformersModel) -> dict[nn.Module, AttentionLayer]:
    """Runs the model on one token with attention that only notes what it is asked for."""
    recorder = _Recorder(model._no_mask)
    with torch.no_grad():
        model.model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
            attention_mask=model._no_mask, use_cache=False, **{_BATCH: recorder},
        )  # fmt: skip
    if not recorder.layers:
        raise ValueError(
            f"{type(model.model).__name__} did not call its attention interface and cannot be served"
        )
    return recorder.layers


def _decoder_layers(attention_modules: Mapping[nn.Module, Any], model: nn.Module) -> list[nn.Module]:
    """For each attention module the repeated block around it: the element of a ModuleList that holds it."""
    layers = [
        block
        for module_list in model.modules() if isinstance(module_list, nn.ModuleList)
        for block in module_list
        if any(module in attention_modules for module in block.modules())
    ]  # fmt: skip
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has its layers in no ModuleList, so they cannot be compiled one by one; "
            "make the engine with compile=False"
        )
    return layers
