"""transformers models on the agnostic ops.

Importing this module registers the attention implementation "attnbackend": models loaded with
``attn_implementation="attnbackend"`` run on the ops, with transformers' own caches. `TransformersModel`
serves a model over paged caches; `Engine` uses it.

Shape legend: B sequences, T tokens, N query tokens a sequence, L keys a sequence, H query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnbackend._torch_compat import (
    GuardedCalls,
    compiled_call,
    run_module,
    set_compiled_call,
    with_own_code,
)
from attnbackend.compiler import make_compiler
from attnbackend.fx_passes import (
    FuseLatentRopeCacheWrite,
    FuseRopeCacheWrite,
    GraphPass,
    JoinCPULinears,
    MergeLinears,
    PickRowsEarly,
    SelectBackend,
)
from attnbackend.host_memory import keep_freed_memory, move_to_huge_pages
from attnbackend.integrations.compiled_layers import (
    CompiledEnd,
    CompiledLayer,
    LastLayer,
    run_and_pick,
    why_not_picked,
)
from attnbackend.integrations.dense_cache import attend_dense
from attnbackend.integrations.dense_masks import (
    ATTN_IMPLEMENTATION,
    DenseMask,
    check_layer_types,
    listener,
    make_mask,
)
from attnbackend.integrations.hook_watch import HookWatch
from attnbackend.integrations.latent_attention import (
    BATCH,
    BOUND,
    AdoptedParts,
    LatentCalls,
    adopt_latent_module,
    is_latent_module,
    release_latent_module,
)
from attnbackend.integrations.layer_record import Recorder, chunk_size_of
from attnbackend.layers.cpu_linear import give_back_linears, take_linears
from attnbackend.layers.merged_linears import merge_linears
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend
from attnbackend.ops.cpu_linear import own_products
from attnbackend.platforms import free_memory
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.types import AttentionType

__all__ = ["ATTN_IMPLEMENTATION", "BOUND", "CHUNK", "TransformersModel", "attention_forward"]

CHUNK = "attnbackend_chunk"
_OWNER = "attnbackend_owner"
_REFUSED = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "indices")
"""Arguments that change the result and that the ops do not take."""


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: query [B, H, N, D], key and value [B, K, L, D] -> [B, N, H, D].

    Encoders attend to their own keys, cross attention to the encoder's, decoders to a cache.

    Raises:
        ValueError: dropout, or an argument or mask that the ops cannot honour.
    """
    _check_arguments(module, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    features: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "causal": bool(causal),
        "sliding_window": sliding_window, "logits_soft_cap": softcap or 0.0, "sinks": s_aux,
    }  # fmt: skip
    batch = kwargs.get(BATCH)
    if isinstance(batch, BatchTensors):
        features["attention_chunk_size"] = getattr(module, CHUNK, None)
        layer: BoundLayer = getattr(module, BOUND)
        own = (key, value) if layer.writes_cache else (None, None)
        q_THD, k_TKD, v_TKD = (x if x is None else x[0].transpose(0, 1) for x in (query, *own))
        assert q_THD is not None
        out_THD = write_and_attend(q_THD, k_TKD, v_TKD, layer, batch, **features)
        return out_THD.unsqueeze(0), None
    if isinstance(batch, Recorder):
        features["attention_chunk_size"] = chunk_size_of(module, sliding_window)
        batch.ask(module, query, key, value, attention_mask, features)
        return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None
    mask = DenseMask.of(attention_mask)
    features["causal"] = features["causal"] or mask.is_causal
    features["attention_chunk_size"] = None
    kind = _kind_of(module, query, key, features)
    if kind is not AttentionType.ENCODER_DECODER:
        features["attention_chunk_size"] = chunk_size_of(module, sliding_window)
        features["sliding_window"] = mask.sliding_window or sliding_window
    return attend_dense(query, key, value, mask.keys, features, kind), None


def _kind_of(module: nn.Module, query: Tensor, key: Tensor, features: dict[str, Any]) -> AttentionType:
    """What the keys are to the queries. Without padding and windows the kinds of encoders are one."""
    if features["causal"]:
        return AttentionType.DECODER
    config = getattr(module, "config", None)
    of_decoder = getattr(module, "is_decoder", getattr(config, "is_decoder", False))
    if query.shape[2] != key.shape[2] or of_decoder or "cross" in type(module).__name__.lower():
        return AttentionType.ENCODER_DECODER
    two_parts = getattr(config, "is_encoder_decoder", False)
    return AttentionType.ENCODER if two_parts else AttentionType.ENCODER_ONLY


def _check_arguments(module: nn.Module, dropout: float, kwargs: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout}: attnbackend serves inference; call model.eval() first")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which attn_implementation={ATTN_IMPLEMENTATION!r} "
                "does not support; use attn_implementation='sdpa'"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attn_implementation='eager': no kernel forms the weights"
        )


AttentionInterface.register(ATTN_IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, make_mask)


class TransformersModel:
    """A transformers causal language model, served over paged caches.

    Its attention implementation is set to "attnbackend" and stays so; the model goes on working by itself.

    Args:
        model: a model such as ``AutoModelForCausalLM`` gives, in evaluation mode.
        passes: what to run on compiled layers besides `SelectBackend`, `PickRowsEarly`, and `MergeLinears` or
            `JoinCPULinears`; None: `FuseRopeCacheWrite`, and on a GPU `FuseLatentRopeCacheWrite`.
        merges_linears: on a GPU, lay the weights of linear layers of one input together and multiply at once.

    Raises:
        TypeError: not a transformers causal language model.
        ValueError: an attention kind that the ops do not have, or a model in training mode.
    """

    def __init__(
        self, model: Any, *, passes: Sequence[GraphPass] | None = None, merges_linears: bool = True
    ) -> None:  # fmt: skip
        _check_model(model)
        self._attn_implementation_before = model.config._attn_implementation
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        text_config = self._text_config = model.config.get_text_config()
        self.model = model
        self.vocab_size = int(text_config.vocab_size)
        self.placeholders = _placeholders(model.config)
        self.max_model_len = _longest_sequence(text_config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        if passes is None:
            passes = (FuseRopeCacheWrite(), FuseLatentRopeCacheWrite())[: 1 + (self.device.type == "cuda")]
        self._passes = tuple(passes)
        self._merges_linears = merges_linears
        self.num_merged = 0
        """Groups of linear layers whose weights were laid together, see `merge_linears`."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self._cache_argument = _cache_argument(model)
        self._last: LastLayer | None = None
        self.why_not_picked: str | None = "not compiled"
        """Why the last layer computes all tokens, and not only those whose logits are wanted; None: those."""
        try:
            recorder = _record_layers(self)
        except Exception as error:
            self.give_back()
            raise ValueError(f"{type(model).__name__} cannot be served: {error}") from error
        self._modules = {module: asked.layer for module, asked in recorder.asked.items()}
        self._sharing = recorder.sharing

    def give_back(self) -> None:
        """Sets the model's attention implementation to what it was, where no engine came of this."""
        self.model.set_attn_implementation(self._attn_implementation_before)

    def attention_layers(self) -> dict[str, AttentionLayer]:
        """Every attention layer in the order in which they run, found by running the model on one token."""
        names = {module: name for name, module in self.model.named_modules()}
        targets = {module: names[owner] for module, owner in self._sharing.items()}
        return {
            names[module]: replace(layer, kv_sharing_target=targets.get(module))
            for module, layer in self._modules.items()
        }

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        """Gives each layer its cache, as attributes of its attention module, until this object goes."""
        _release(self.model)
        owner = self.model.__dict__[_OWNER] = object()
        weakref.finalize(self, _release, self.model, owner)
        modules = dict(self.model.named_modules())
        for name, layer in layers.items():
            setattr(modules[name], BOUND, layer)
            setattr(modules[name], CHUNK, self._modules[modules[name]].config.attention_chunk_size)
            if is_latent_module(modules[name]):
                adopt_latent_module(modules[name])
        latent = [module for name in layers if is_latent_module(module := modules[name])]
        self._latent = AdoptedParts(latent)
        self._hooks = HookWatch(self.model, (module.kv_b_proj for module in latent))
        self._first = next((modules[name], layer) for name, layer in layers.items())
        if self.device.type == "cpu":
            keep_freed_memory(free_memory(self.device) // 8)
            weights = (m.weight for m in self.model.modules() if isinstance(m, nn.Linear))
            move_to_huge_pages(weights, max_bytes=free_memory(self.device) // 2)
            self.linears = take_linears(self.model)
        elif self._merges_linears:
            self.num_merged = merge_linears(self.model)

    def compile(self, backend: str | None, *, in_pieces: bool = False) -> None:
        """Compiles each decoder layer for serving; equal layers share one compilation.

        Globals of modules are taken to stay what they were: looking at them takes much of a call's guards.
        """
        merging = [MergeLinears()] if self.num_merged else []
        passes: list[GraphPass] = [SelectBackend(backend), *self._passes, *merging]
        if self.device.type == "cpu":  # Queries are picked too: before a fusion makes them of all tokens.
            passes = [passes[0], PickRowsEarly(), *passes[1:], JoinCPULinears()]
        else:
            passes.append(PickRowsEarly())
        self.compiler = make_compiler(backend, passes=passes, in_pieces=in_pieces)
        layers, runs = _decoder_layers(self._modules, self.model), {}
        self.why_not_picked = why_not_picked(layers, self._logits_of, self.device)
        compiled = partial(self._compiled, same_floats=len(set(map(_floats, layers))) == 1)
        for layer in layers:
            kind = self._kind_of(layer)
            if kind not in runs:
                runs[kind] = compiled(run_module)
            set_compiled_call(layer, CompiledLayer(runs[kind], layer))
        if self.why_not_picked is None:
            self._last = LastLayer(runs[kind], layers[-1], compiled(run_and_pick))
            set_compiled_call(layers[-1], self._last)
        self._hooks = HookWatch(self.model, (m for layer in layers for m in layer.modules()))
        if self.device.type == "cuda":
            self.compile_ends()

    def _compiled(self, function: Callable[..., Any], *, same_floats: bool) -> Callable[..., Any]:
        compiled = torch.compile(
            with_own_code(function), backend=self.compiler, dynamic=True, fullgraph=True,
            options={"guard_filter_fn": _guards_to_check},
        )  # fmt: skip
        if self.device.type != "cpu":
            return compiled
        return GuardedCalls(compiled, specialize_float=same_floats)

    def _logits_of(self, tokens_T: Tensor, rows_R: Tensor | None) -> Tensor:
        """Of layers that want no batch."""
        positions_T = torch.arange(len(tokens_T), device=self.device)
        logits_RV: Tensor = self._run(tokens_T, positions_T, rows_R, None).logits[0]
        return logits_RV

    def compile_ends(self, compiler: str | Callable[..., Any] = "inductor") -> None:
        """Compiles the norm behind the layers and the rotary angles before them, each a kernel then."""
        for module in _ends(_decoder_layers(self._modules, self.model), self.model):
            run = torch.compile(with_own_code(run_module), backend=compiler, dynamic=True)
            set_compiled_call(module, CompiledEnd(run, module))

    def _kind_of(self, layer: nn.Module) -> tuple[Any, ...]:
        """Layers of a kind compile alike; Dynamo counts recompilations for each kind by itself."""
        bound = [(m, getattr(m, BOUND)) for m in layer.modules() if m in self._modules]
        return tuple((b.group, b.writes_cache, m in self._sharing.values()) for m, b in bound)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        """Logits [len(logits_indices), vocab_size] at the given tokens of the batch [T]."""
        self._check_unchanged()
        with own_products():
            result = self.step(input_ids, positions, logits_indices, batch)
        return result.logits[0]

    def _check_unchanged(self) -> None:
        module, layer = self._first
        if getattr(module, BOUND, None) is not layer:
            raise RuntimeError("the model was given to another engine since; make a new Engine of it")
        if self.model.training:
            raise RuntimeError("the model was put in training mode since; call model.eval()")
        chosen = self._text_config._attn_implementation
        if chosen != ATTN_IMPLEMENTATION:
            raise RuntimeError(
                f"the model's attention implementation was set to {chosen!r} since; call "
                f"model.set_attn_implementation({ATTN_IMPLEMENTATION!r})"
            )
        if (replaced := self._latent.replaced()) is not None:
            part, module = replaced
            raise RuntimeError(
                f"{part} of {_name_of(module, self.model)} was replaced since; make a new Engine"
            )
        if (module := self._hooks.changed()) is not None:
            raise RuntimeError(
                f"the forward hooks of {_name_of(module, self.model)} changed since, and compiled code does "
                "not notice; make a new Engine of the model, or one with compile=False"
            )

    def step(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Any:  # fmt: skip
        """What the model returns for a batch, with the caches that its attention modules hold."""
        if self._last is None:
            return self._run(input_ids, positions, logits_indices, batch)
        with self._last.picking(logits_indices, len(input_ids)) as rest:
            return self._run(input_ids, positions, rest, batch)

    def _run(
        self, input_ids: Tensor, positions: Tensor, rows_R: Tensor | None, batch: BatchTensors | None
    ) -> Any:
        stand_in = {self._cache_argument: _Positions(positions)} if self._cache_argument else {}
        return self.model(
            input_ids=input_ids[None], position_ids=positions[None], attention_mask=self._no_mask,
            use_cache=False, output_hidden_states=False, logits_to_keep=0 if rows_R is None else rows_R,
            **{BATCH: batch}, **stand_in,
        )  # fmt: skip


class _Positions:
    """Stands in a cache's place for layers that count positions on from the cache's length (Llama 4)."""

    def __init__(self, positions_T: Tensor) -> None:
        self._ahead_T = positions_T - torch.arange(positions_T.shape[0], device=positions_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int64 [T]: what a token's place in the batch lacks to its position."""
        return self._ahead_T

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _cache_argument(model: nn.Module) -> str | None:
    """The name of the cache's argument where layers ask the cache for positions; None: none does."""
    if not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules()):
        return None
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _release(model: nn.Module, owner: object = None) -> None:
    """Takes what the engine ``owner`` put into the model out of it; None: whichever engine did."""
    if owner not in (None, model.__dict__.get(_OWNER)):
        return
    model.__dict__.pop(_OWNER, None)
    for module in model.modules():
        release_latent_module(module)
        for name in (BOUND, CHUNK):
            if hasattr(module, name):
                delattr(module, name)
        if isinstance(compiled_call(module), CompiledLayer):
            set_compiled_call(module, None)
    give_back_linears(model)


def _placeholders(config: Any) -> dict[int, str]:
    """Token ids in whose place a model puts an image's or a sound's features."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return {id: name for name in names if isinstance(id := getattr(config, name, None), int)}


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


def _check_model(model: Any) -> None:
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            "the model is what torch.compile returned; an Engine compiles itself: give the model from before"
        )
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "generation_config"):
        raise TypeError(
            f"{type(model).__name__} is neither a transformers causal language model nor a ServedModel"
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoders can be served")
    check_layer_types(model.config.get_text_config())


def _record_layers(model: TransformersModel) -> Recorder:
    """Runs the model on two tokens with masks and attention that only note what they are asked for."""
    recorder, latent = Recorder(), LatentCalls(model.model)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    token = listener.set(recorder)
    try:
        with torch.no_grad(), latent:
            model.model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                **{BATCH: recorder},
            )
    finally:
        listener.reset(token)
    latent.check(model.max_model_len - 1)
    if not recorder.asked:
        raise ValueError(
            f"{type(model.model).__name__} did not call its attention interface and cannot be served"
        )
    return recorder


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next((name for name, m in model.named_modules() if m is module), type(module).__name__)


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


def _guards_to_check(guards: Sequence[Any]) -> list[bool]:
    """Neither those on modules' globals, nor on hooks of what gradients need, which nobody wants here."""
    kept = torch.compiler.skip_guard_on_globals_unsafe(guards)
    return [
        keep and guard.guard_type != "AUTOGRAD_SAVED_TENSORS_HOOKS"
        for guard, keep in zip(guards, kept, strict=True)
    ]


def _floats(layer: nn.Module) -> tuple[tuple[str, float], ...]:
    """Numbers that a layer's modules hold, such as a norm's epsilon."""
    return tuple(
        (f"{name}.{key}", value)
        for name, module in layer.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, float)
    )


def _ends(layers: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """The norms and rotary embeddings that stand beside the list of the layers."""
    found = set(layers)
    return [
        child
        for owner in model.modules()
        if any(isinstance(x, nn.ModuleList) and not found.isdisjoint(x) for x in owner.children())
        for child in owner.children()
        if type(child).__name__.endswith("Norm") or _has_fixed_angles(child)
    ]


def _has_fixed_angles(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose factors do not follow the lengths of a batch."""
    rope_type = getattr(module, "rope_type", None)
    of_fixed = isinstance(rope_type, str) and "dynamic" not in rope_type and rope_type != "longrope"
    return of_fixed and type(module).__name__.endswith("RotaryEmbedding")
