"""transformers' modules of latent attention, and `layers.MLAAttention` for them while a model is served.

A module keeps its weights and its place; its class is changed to one that runs steps of an engine on the
layer, and everything else as before.

Shape legend: T tokens, E hidden size, H heads, R qk_rope_head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from attnbackend._torch_compat import children_of
from attnbackend.impl import MLADims
from attnbackend.kv_cache import MLAAttentionSpec, allocate_kv_cache
from attnbackend.layers.mla_attention import MLAAttention
from attnbackend.layers.paged import BatchTensors, BoundLayer
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.selector import AttentionSelectorConfig, select_backend

__all__ = [
    "BATCH",
    "BOUND",
    "AdoptedParts",
    "LatentCalls",
    "adopt_latent_module",
    "is_latent_module",
    "latent_layer",
    "release_latent_module",
]

BOUND = "attnbackend_layer"
"""Attribute of an attention module that holds its `BoundLayer`."""
BATCH = "attnbackend_batch"
"""The keyword argument with which an engine's batch comes to attention modules."""
_LAYER = "attnbackend_mla"
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_PROJECTIONS = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", *_PARTS[:3])


def is_latent_module(module: nn.Module) -> bool:
    """Whether a module is built as DeepSeek's latent attention is."""
    return all(hasattr(module, name) for name in (*_SIZES, *_PARTS, "num_heads", "scaling"))


def _dims_of(module: Any) -> MLADims:
    return MLADims(**{name: int(getattr(module, name)) for name in _SIZES})


def latent_layer(module: Any, query: Tensor, features: Mapping[str, Any]) -> AttentionLayer:
    """What a module asks of attention; ``query`` [1, H, T, D] is what it brought."""
    config = replace(
        _config_of(module, query), sliding_window=features["sliding_window"], causal=features["causal"],
        attention_chunk_size=features["attention_chunk_size"], logits_soft_cap=features["logits_soft_cap"],
        has_sinks=features["sinks"] is not None,
    )  # fmt: skip
    return AttentionLayer(config, features["scale"], mla=_dims_of(module))


def _config_of(module: Any, like: Tensor) -> AttentionSelectorConfig:
    dims = _dims_of(module)
    return AttentionSelectorConfig.dense(
        device_type=like.device.type, head_size=dims.kv_lora_rank + dims.qk_rope_head_dim,
        num_heads=int(module.num_heads), num_kv_heads=1, dtype=like.dtype, use_mla=True,
        kv_lora_rank=dims.kv_lora_rank,
    )  # fmt: skip


class _Served:
    """What a module's class becomes: its own, with an engine's steps on the layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get(BATCH)
        if not isinstance(batch, BatchTensors):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        layer: MLAAttention = self.__dict__[_LAYER]
        cos, sin = _angles(kwargs["position_embeddings"])
        out = layer.attend(hidden_states[0], cos, sin, batch, getattr(self, BOUND))
        return self.o_proj(out.unsqueeze(0)), None  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copied or saved module is what it was before: the layer and its cache are the engine's."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, (_, *rest), state, *more = reduced
        kept = {name: value for name, value in state.items() if name != _LAYER}
        return make, (_own_class(type(self)), *rest), kept, *more


@cache
def _served_class(cls: type) -> type[Any]:
    return type(f"Served{cls.__name__}", (_Served, cls), {})


def _own_class(cls: type) -> type:
    return next(base for base in cls.__mro__[1:] if not issubclass(base, _Served) and base is not _Served)


def _angles(position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, R / 2] of a rotary embedding: complex numbers, or two halves alike."""
    if isinstance(position_embeddings, Tensor):
        return position_embeddings[0].real, position_embeddings[0].imag
    cos, sin = (x[0].chunk(2, -1)[0] for x in position_embeddings)
    return cos, sin


def _layer_of(module: Any) -> MLAAttention:
    parts = {
        name: part for name in _PROJECTIONS if isinstance(part := getattr(module, name, None), nn.Module)
    }
    return MLAAttention.from_projections(
        parts, int(module.num_heads), _dims_of(module), scale=float(module.scaling),
        interleaved=bool(getattr(module.config, "rope_interleave", True)),
    )  # fmt: skip


def adopt_latent_module(module: nn.Module) -> None:
    """Has the module run an engine's steps on `MLAAttention`, over the cache of its `BoundLayer`."""
    own = _layer_of(module)
    own.split_kv_b()
    module.__dict__[_LAYER] = own
    if not isinstance(module, _Served):
        cls: Any = type(module)
        module.__class__ = _served_class(cls)


class AdoptedParts:
    """The projections of modules that were adopted, as they were then: a step asks for them of each layer."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = [
            (children_of(module), name, part, module)
            for module in modules
            for name, part in module.__dict__[_LAYER].named_children()
        ]

    def replaced(self) -> tuple[str, nn.Module] | None:
        """Name of a projection that is another now, and whose it is; None: there is none."""
        for children, name, part, module in self._parts:
            if children.get(name) is not part:
                return name, module
        return None


def release_latent_module(module: nn.Module) -> None:
    """Makes the module what it was."""
    if isinstance(module, _Served):
        module.__dict__.pop(_LAYER, None)
        module.__class__ = _own_class(type(module))


def _check_same_attention(
    module: Any, kwargs: Mapping[str, Any], hidden_states: Tensor, last_position: int
) -> None:
    """Compares `MLAAttention` over the module's weights with the module itself.

    Args:
        module: of latent attention, on the attention implementation "attnbackend".
        kwargs: what its model called it with for two tokens.
        hidden_states: [1, 2, E].
        last_position: of the longest request, where the module is compared too if it is told positions.

    Raises:
        ValueError: they differ: the module computes more, or other things, than DeepSeek's.
    """
    _check_parts(module)
    layer = _layer_of(module)
    layer.bind(BoundLayer(_one_block(module, hidden_states)))
    batch, told = _two_tokens(hidden_states.device), [kwargs]
    if isinstance(positions := kwargs.get("position_ids"), Tensor):
        told.append({**kwargs, "position_ids": positions + max(last_position - 1, 0)})
    with torch.no_grad():
        out = layer(hidden_states[0], *_angles(kwargs["position_embeddings"]), batch)
        found = module.o_proj(out).float()
        for own in told:
            wanted = module(hidden_states, **own)[0][0].float()
            error, size = float((found - wanted).abs().max()), float(wanted.abs().max())
            if not error <= size * 16 * torch.finfo(hidden_states.dtype).eps:
                where = "" if own is kwargs else f" at position {last_position}, their rotation left alone,"
                raise ValueError(
                    f"{type(module).__name__} is built as latent attention but computes something else: its "
                    f"output for two tokens{where} differs by {error:.3g} of {size:.3g} from that of "
                    "layers.MLAAttention"
                )


def _check_parts(module: nn.Module) -> None:
    """Two tokens would not show what chooses among many, as the indexer of DeepSeek-V3.2 does."""
    others = [
        name
        for name, part in module.named_children()
        if name not in (*_PROJECTIONS, *_PARTS) and next(part.parameters(), None) is not None
    ]
    if others:
        raise ValueError(
            f"{type(module).__name__} is built as latent attention but has {', '.join(others)} besides, "
            "which layers.MLAAttention does not compute"
        )


_BLOCK_SIZE = 64


def _one_block(module: Any, like: Tensor) -> Tensor:
    """A cache of two blocks, the first reserved."""
    config = replace(_config_of(module, like), block_size=_BLOCK_SIZE)
    spec = MLAAttentionSpec(
        block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=config.head_size, dtype=like.dtype
    )
    return allocate_kv_cache(select_backend(config).backend, spec, 2, like.device)


def _two_tokens(device: torch.device) -> BatchTensors:
    """One request's first two tokens, in block 1."""
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    slots = torch.arange(_BLOCK_SIZE, _BLOCK_SIZE + 2, device=device)
    return BatchTensors(slots, ints([0, 2]), ints([2]), ints([[1]]))


class LatentCalls:
    """Notes, in a ``with`` block, how a model calls its modules of latent attention."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if is_latent_module(module)]
        self._handles: list[Any] = []
        self.noted: dict[nn.Module, tuple[Tensor, dict[str, Any]]] = {}

    def __enter__(self) -> None:
        self._handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self._modules]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        own = {k: v for k, v in kwargs.items() if k not in ("hidden_states", BATCH)}
        self.noted[module] = hidden_states, own | {"attention_mask": None}

    def check(self, last_position: int) -> None:
        """Raises ValueError where a module computes something that `layers.MLAAttention` does not."""
        for module, (hidden_states, kwargs) in self.noted.items():
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(hidden_states.shape, generator=generator, device="cpu").to(hidden_states)
            _check_same_attention(module, kwargs, noise, last_position)
