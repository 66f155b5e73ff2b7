"""Runs a model step by step: caches, groups of equal layers, a plan for each group, the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend._torch_compat import no_duck_shapes
from attnbackend.backend import AttentionBackend
from attnbackend.config import set_config
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import (
    AttentionSpec,
    allocate_kv_cache,
    kv_cache_geometry,
    resolve_kv_cache_dtype,
    resolve_kv_sharing,
    spec_of,
)
from attnbackend.layers.paged import BatchTensors, BoundLayer
from attnbackend.metadata import AttentionMetadataBuilder, BatchLimits, CommonAttentionMetadata
from attnbackend.platforms import free_memory
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.served_model import AttentionLayer, ServedModel
from attnbackend.selector import AttentionSelectorConfig, select_backend

__all__ = ["LayerGroup", "ModelRunner", "RunnerOptions", "build_runner"]

_MEMORY_SHARE = {"cuda": 0.9, "cpu": 0.25}
"""Share of the free memory that the cache may take where ``num_blocks`` is left open."""


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """The choices of `Engine` that concern the model and its cache."""

    backend: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    compile: bool = True
    cudagraph_mode: Any = None


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal parameters on one backend: they share a plan."""

    backend: type[AttentionBackend]
    params: AttentionParams
    spec: AttentionSpec
    layers: tuple[str, ...]
    owners: Mapping[str, str] = field(default_factory=dict)
    """Layer that reads another's cache -> the one that it belongs to."""

    @property
    def owning_layers(self) -> tuple[str, ...]:
        """Those with a cache of their own."""
        return tuple(name for name in self.layers if name not in self.owners)


def build_runner(model: Any, **options: Any) -> ModelRunner:
    """A runner for a `ServedModel` or a transformers model.

    Raises:
        ValueError: a value that the model, a backend or the device cannot serve.
        TypeError: the model is neither, or an option is unknown.
    """
    if not all(
        hasattr(model, name) for name in ("attention_layers", "bind", "forward", "compile", "vocab_size")
    ):
        from attnbackend.integrations.transformers import TransformersModel

        adapter = TransformersModel(model)
        try:
            return ModelRunner(adapter, RunnerOptions(**options))
        except BaseException:
            adapter.give_back()
            raise
    return ModelRunner(model, RunnerOptions(**options))


class ModelRunner:
    """Implements the engine's runner over a `ServedModel`."""

    def __init__(self, model: ServedModel, options: RunnerOptions) -> None:
        _check_options(model, options)
        self.model = model
        self.options = options
        self.vocab_size = model.vocab_size
        self.max_model_len = options.max_model_len or model.max_model_len
        self.block_size = options.block_size
        self.device = model.device
        self.groups = _group_layers(model.attention_layers(), options)
        self.num_blocks = options.num_blocks or _blocks_that_fit(
            self.groups, self.max_model_len, options, self.device
        )
        self.kv_caches = self._allocate()
        limits = BatchLimits(options.max_num_seqs, options.max_num_batched_tokens, self.max_model_len)
        self._builders: list[AttentionMetadataBuilder[Any]] = [
            group.backend.get_builder_cls()(group.params, group.spec, limits, self.device)
            for group in self.groups
        ]
        model.bind(self._bound_layers())
        if options.compile:
            model.compile(options.backend)
            self.warm_up()

    def warm_up(self) -> None:
        """Compiles what serving will need: a graph for many tokens and one for a single token."""
        with no_duck_shapes():
            for tokens in (2, 1):
                self.execute(self._padding_batch(min(tokens, self.options.max_num_batched_tokens)))

    def _padding_batch(self, tokens: int) -> PreparedBatch:
        """One request of ``tokens`` tokens that has no place in the cache: nothing is written."""
        reqs, width = self.options.max_num_seqs, -(-self.max_model_len // self.block_size)
        ints = partial(torch.zeros, dtype=torch.int32)
        starts_cpu, lens_cpu = ints(reqs + 1), ints(reqs)
        starts_cpu[1:] = tokens
        on_device = partial(torch.zeros, dtype=torch.int64, device=self.device)
        return PreparedBatch(
            input_ids=on_device(tokens),
            positions=on_device(tokens),
            slot_mapping=on_device(tokens) - 1,
            logits_indices=on_device(1),
            query_start_loc=starts_cpu.to(self.device),
            seq_lens=lens_cpu.to(self.device),
            block_table=ints(reqs, width, device=self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens_cpu=lens_cpu,
            is_prefilling_cpu=torch.zeros(reqs, dtype=torch.bool),
            num_reqs=1,
            num_decodes=0,
            num_tokens=tokens,
            max_query_len=tokens,
            max_seq_len=0,
            sampled_rows=(0,),
            request_ids=("warm-up",),
        )

    def execute(self, batch: PreparedBatch) -> Tensor:
        """One step; see the engine's runner protocol."""
        tokens = batch.num_tokens
        tensors = BatchTensors(
            batch.slot_mapping[:tokens], batch.query_start_loc, batch.seq_lens, batch.block_table
        )
        wanted = batch.logits_indices[: batch.num_sampled]
        context = ForwardContext(self._plans(batch, tensors))
        with (
            torch.inference_mode(),
            self._named_backend(),
            set_forward_context(context),
        ):
            return self.model.forward(batch.input_ids[:tokens], batch.positions[:tokens], wanted, tensors)

    def _named_backend(self) -> AbstractContextManager[object]:
        """Names the engine's backend to the agnostic ops; without one, they choose as everywhere."""
        named = self.options.backend
        return nullcontext() if named is None else set_config(backend=named)

    def _plans(self, batch: PreparedBatch, tensors: BatchTensors) -> dict[tuple[int, str], Any]:
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=tensors.slot_mapping,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
            is_prefilling=batch.is_prefilling_cpu,
        )
        return {
            (i, group.backend.get_name()): builder.build(0, common)
            for i, (group, builder) in enumerate(zip(self.groups, self._builders, strict=True))
        }

    def _allocate(self) -> dict[str, Tensor]:
        caches = {
            name: allocate_kv_cache(group.backend, group.spec, self.num_blocks, self.device)
            for group in self.groups
            for name in group.owning_layers
        }
        return {name: caches[group.owners.get(name, name)] for group in self.groups for name in group.layers}

    def _bound_layers(self) -> dict[str, BoundLayer]:
        dtype = self.options.kv_cache_dtype
        scaled = resolve_kv_cache_dtype(dtype, self.model.dtype).itemsize == 1
        one = torch.ones(1, device=self.device) if scaled else None
        return {
            name: BoundLayer(self.kv_caches[name], dtype, i, one, one, name not in group.owners)
            for i, group in enumerate(self.groups)
            for name in group.layers
        }


def _check_options(model: ServedModel, options: RunnerOptions) -> None:
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    if options.num_blocks is not None and options.num_blocks < 2:
        raise ValueError(f"num_blocks={options.num_blocks} must be at least 2, since block 0 is reserved")
    if not isinstance(options.kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype={options.kv_cache_dtype!r} must be a name, such as 'bfloat16'")
    longest = options.max_model_len
    if longest is not None and not 1 <= longest <= model.max_model_len:
        raise ValueError(
            f"max_model_len={longest} is outside 1..{model.max_model_len}, the positions that the model has"
        )
    if options.cudagraph_mode not in (None, "NONE"):
        raise ValueError(
            f"cudagraph_mode={options.cudagraph_mode!r} is not available; the engine runs without CUDA "
            "graphs: leave it None"
        )


def _group_layers(layers: Mapping[str, AttentionLayer], options: RunnerOptions) -> list[LayerGroup]:
    """Layers by equal backend and parameters, in the order of first appearance."""
    grouped: dict[tuple[type[AttentionBackend], AttentionParams], list[str]] = {}
    for name, layer in layers.items():
        config = replace(layer.config, block_size=options.block_size, kv_cache_dtype=options.kv_cache_dtype)
        backend = select_backend(config, backend=options.backend).backend
        grouped.setdefault((backend, _params(config, layer.scale)), []).append(name)
    owners = _cache_owners(layers, grouped)
    return [
        LayerGroup(b, p, spec_of(p), tuple(names), {n: owners[n] for n in names if n in owners})
        for (b, p), names in grouped.items()
    ]


def _params(config: AttentionSelectorConfig, scale: float) -> AttentionParams:
    assert config.block_size is not None
    return AttentionParams(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_size=config.head_size,
        dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype, block_size=config.block_size,
        device_type=config.device_type, scale=scale, causal=config.causal,
        sliding_window=config.sliding_window, attention_chunk_size=config.attention_chunk_size,
        logits_soft_cap=config.logits_soft_cap, attn_type=config.attn_type,
    )  # fmt: skip


def _cache_owners(
    layers: Mapping[str, AttentionLayer],
    grouped: Mapping[tuple[type[AttentionBackend], AttentionParams], Sequence[str]],
) -> dict[str, str]:
    """For each layer that reads another's cache, the layer that writes it."""
    targets = {n: layer.kv_sharing_target for n, layer in layers.items() if layer.kv_sharing_target}
    specs = {name: spec_of(params) for (_, params), names in grouped.items() for name in names}
    backends = {name: backend for (backend, _), names in grouped.items() for name in names}
    owners = resolve_kv_sharing(targets, specs)
    for name, owner in owners.items():
        if backends[name] is not backends[owner]:
            raise ValueError(
                f"layer {name!r} reads the cache of {owner!r}, and they are on different backends, "
                f"{backends[name].get_name()} and {backends[owner].get_name()}; name one for all with backend="
            )
    return owners


def _blocks_that_fit(
    groups: list[LayerGroup], max_model_len: int, options: RunnerOptions, device: torch.device
) -> int:
    """As many blocks as all requests at full length would need, or as a share of free memory holds."""
    page_bytes = sum(
        kv_cache_geometry(g.backend, g.spec, 1).page_size_bytes * len(g.owning_layers) for g in groups
    )
    wanted = options.max_num_seqs * -(-max_model_len // options.block_size) + 1
    budget = int(free_memory(device) * _MEMORY_SHARE.get(device.type, 0.5))
    fitting = budget // page_bytes
    if fitting < 2:
        raise ValueError(
            f"a cache block of all layers takes {page_bytes} bytes and {budget} may be used on {device}; "
            "free memory, or choose a smaller kv_cache_dtype or block_size"
        )
    return min(wanted, fitting)
