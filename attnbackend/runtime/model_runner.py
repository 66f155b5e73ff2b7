"""Runs a model step by step: caches, groups of equal layers, a plan for each group, the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnbackend._torch_compat import no_duck_shapes, unbounded_recompiles
from attnbackend.backend import AttentionBackend
from attnbackend.config import set_config
from attnbackend.cudagraph import (
    BatchShape,
    CUDAGraphDispatcher,
    CUDAGraphMode,
    Dispatch,
    GraphSupport,
    LongLivedTensors,
    PreparedStep,
    module_tensors,
    plan_tensors,
)
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams, MLADims
from attnbackend.kv_cache import (
    AttentionSpec,
    allocate_kv_cache,
    kv_cache_geometry,
    resolve_kv_cache_dtype,
    resolve_kv_sharing,
    spec_of,
)
from attnbackend.layers.paged import BoundLayer
from attnbackend.metadata import AttentionMetadataBuilder, BatchLimits, CommonAttentionMetadata
from attnbackend.platforms import as_current
from attnbackend.runtime.advance_decodes import advance_decodes
from attnbackend.runtime.cache_memory import count_blocks
from attnbackend.runtime.engine_arguments import require_flag, require_name, require_whole
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.sampler import take_largest
from attnbackend.runtime.served_model import AttentionLayer, ServedModel
from attnbackend.runtime.started_step import TokenMemory
from attnbackend.runtime.step_graphs import (
    GraphOptions,
    StepGraphs,
    StepInputs,
    inputs_of,
    inputs_of_graph,
    plan_graphs,
)
from attnbackend.selector import AttentionSelectorConfig, select_backend
from attnbackend.types import AttentionType

__all__ = ["LayerGroup", "ModelRunner", "RunnerOptions", "build_runner"]

_TUNED_TOKENS = 4000
"""Inductor lays kernels out, and tunes them, for the tokens of the first call. It is no size of a model."""


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
    num_drafts: int = 0
    """Speculative tokens a decode."""
    graphs: GraphOptions = field(default_factory=GraphOptions)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            require_whole(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        if self.backend is not None:
            require_name("backend", self.backend, "TORCH_SDPA")
        require_name("kv_cache_dtype", self.kv_cache_dtype, "bfloat16")
        require_flag("compile", self.compile)


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
    chosen, adapter = RunnerOptions(**options), None
    if not all(
        hasattr(model, name) for name in ("attention_layers", "bind", "forward", "compile", "vocab_size")
    ):
        from attnbackend.integrations.transformers import TransformersModel

        model = adapter = TransformersModel(model)
    try:
        with as_current(model.device):
            return ModelRunner(model, chosen)
    except BaseException:
        if adapter is not None:
            adapter.give_back()
        raise


class ModelRunner:
    """Implements the engine's runner over a `ServedModel`."""

    def __init__(self, model: ServedModel, options: RunnerOptions) -> None:
        _check_options(model, options)
        self.model = model
        self.options = options
        self.vocab_size = model.vocab_size
        self.placeholders: Mapping[int, str] = getattr(model, "placeholders", {})
        self.max_model_len = options.max_model_len or model.max_model_len
        self.num_drafts = options.num_drafts
        self.max_seq_len = self.max_model_len + options.num_drafts
        """Most tokens of a request in the cache, drafts behind its end included."""
        self.block_size = options.block_size
        self.device = model.device
        self.groups = _group_layers(model.attention_layers(), options)
        self.num_blocks = count_blocks(
            options.num_blocks, 1 + options.max_num_seqs * -(-self.max_seq_len // self.block_size),
            _block_bytes(self.groups), self.device,
        )  # fmt: skip
        self._has_latents = any(group.params.mla is not None for group in self.groups)
        self.kv_caches = self._allocate()
        limits = BatchLimits(options.max_num_seqs, options.max_num_batched_tokens, self.max_seq_len)
        self._builders: list[AttentionMetadataBuilder[Any]] = [
            group.backend.get_builder_cls()(group.params, group.spec, limits, self.device)
            for group in self.groups
        ]
        plan = plan_graphs(
            options.graphs, self.device, map(_graph_support, self.groups), options.max_num_seqs,
            options.max_num_batched_tokens, 1 + options.num_drafts,
        )  # fmt: skip
        self.graph_reasons = plan.reasons
        """Why not every step runs from a graph; nothing where all do, or where a person wants none."""
        self.graphs: StepGraphs | None = None
        self.greedy: TokenMemory | None = None
        """Where the last step's graph left each row's greedy choice; None: it ran from none that does."""
        self.has_advanced = False
        """Whether the graph made the batch the next one as well, see `advance_decodes`."""
        self._greedy: list[TokenMemory] = []
        """Where all graphs leave it, once one was made."""
        self._planned = _event(self.device)
        model.bind(self._bound_layers())
        if options.compile:
            model.compile(options.backend, in_pieces=plan.dispatcher.mode.needs_pieces)
            self.warm_up(plan.dispatcher)
        self.graphs = self._make_graphs(plan.dispatcher)

    def _make_graphs(self, dispatcher: CUDAGraphDispatcher) -> StepGraphs | None:
        if dispatcher.mode is CUDAGraphMode.NONE:
            return None
        caches = {f"the cache of {name}": partial(self.kv_caches.get, name) for name in self.kv_caches}
        modules = [m for m in (getattr(self.model, "model", None), self.model) if isinstance(m, nn.Module)]
        long_lived = LongLivedTensors({**caches, **(module_tensors(modules[0]) if modules else {})})
        # Graphs keep what makes their steps. Were it this object, which keeps the graphs, caches would
        # outlive the engine until Python looks for cycles.
        make = copy(self)._graphed_step
        return StepGraphs(dispatcher, self.options.graphs, self.device, long_lived, make)

    def padded_tokens(self, shape: BatchShape) -> int:
        """Tokens that a batch of this shape is to be padded to."""
        return shape.num_tokens if self.graphs is None else self.graphs.padded_tokens(shape)

    def capture_graphs(self, padding: Callable[[int, int], PreparedBatch]) -> None:
        """Captures the engine's graphs over its own buffers; ``padding`` fills them."""
        if self.graphs is not None:
            self.graphs.capture(padding)

    def warm_up(self, dispatcher: CUDAGraphDispatcher) -> None:
        """Compiles what serving will need: graphs for many tokens, few or all of them wanted, and for one.

        Latent attention has a graph of its own for many tokens of as many requests, and so may steps that are
        captured, of decodes or of one request.
        """
        most = self.options.max_num_batched_tokens
        # Layers of one kind may differ in modules and attributes, and each of these asks for all the graphs.
        with no_duck_shapes(), unbounded_recompiles():
            for tokens in (min(_TUNED_TOKENS if self.device.type == "cuda" else 8, most), min(2, most), 1):
                self.execute(self._padding_batch(tokens))
            if self._has_latents and self.options.max_num_seqs > 1:
                self.execute(self._padding_batch(min(2, most), num_reqs=min(2, most)))
            for graph in dispatcher.kinds():
                batch = self._padding_batch(graph.num_tokens, num_reqs=graph.num_reqs or 1)
                self._run(batch, inputs_of_graph(batch, graph, dispatcher.uniform_query_len))

    def _padding_batch(self, tokens: int, num_reqs: int = 1) -> PreparedBatch:
        """Requests of ``tokens`` tokens together that have no place in the cache: nothing is written."""
        reqs, width = self.options.max_num_seqs, -(-self.max_seq_len // self.block_size)
        ints = partial(torch.zeros, dtype=torch.int32, device="cpu")
        starts_cpu, lens_cpu = ints(reqs + 1), ints(reqs)
        starts_cpu[1:] = tokens
        starts_cpu[:num_reqs] = torch.arange(num_reqs, device="cpu")
        on_device = partial(torch.zeros, dtype=torch.int64, device=self.device)
        return PreparedBatch(
            input_ids=on_device(tokens),
            positions=on_device(tokens),
            slot_mapping=on_device(tokens) - 1,
            logits_indices=on_device(tokens),
            query_start_loc=starts_cpu.to(self.device),
            seq_lens=lens_cpu.to(self.device),
            block_table=ints(reqs, width, device=self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens_cpu=lens_cpu,
            is_prefilling_cpu=torch.zeros(reqs, dtype=torch.bool, device="cpu"),
            num_reqs=num_reqs,
            num_decodes=0,
            num_tokens=tokens,
            num_padded_tokens=tokens,
            max_query_len=tokens - num_reqs + 1,
            max_seq_len=0,
            sampled_rows=(0,),
            request_ids=("warm-up",),
        )

    def execute(self, batch: PreparedBatch) -> Tensor:
        """One step; see the engine's runner protocol."""
        self.greedy, self.has_advanced = None, False
        logits = None if self.graphs is None else self.graphs.run(batch)
        if logits is not None:
            key = self.graphs.ran  # type: ignore[union-attr]
            self.greedy = self._greedy[0] if key.mode is CUDAGraphMode.FULL else None
            self.has_advanced = self.greedy is not None and key.descriptor.uniform and self.num_drafts == 0
            return logits
        decode_only = self._has_latents and batch.max_query_len <= 1
        inputs = inputs_of(batch, batch.num_tokens, len(batch.seq_lens), batch.num_sampled, decode_only)
        return self._run(batch, inputs)

    def _run(self, batch: PreparedBatch, inputs: StepInputs) -> Tensor:
        """The step's logits, without a graph."""
        common = self._builder_input(batch, inputs, batch.num_tokens, batch.max_query_len)
        return self._forward(inputs, self._context(common))

    @property
    def repeat(self) -> Callable[[], bool] | None:
        """Runs the step after the last one, whose graph has made its batch; see the engine's protocol."""
        return self.graphs.repeat if self.graphs is not None and self.has_advanced else None

    def _forward(self, inputs: StepInputs, context: ForwardContext) -> Tensor:
        with self._running(context):
            return self.model.forward(*inputs)

    def _forward_and_choose(self, inputs: StepInputs, context: ForwardContext, advances: bool) -> Tensor:
        """The logits, with the greedy choice of each row in memory that stays where it is.

        With ``advances`` the inputs become those of the next step of the same requests.
        """
        logits_NV = self._forward(inputs, context)
        if not self._greedy:
            rows = self.options.max_num_seqs * (1 + self.num_drafts)
            self._greedy.append(TokenMemory.on(self.device, rows, logits_NV.dtype))
        chosen = take_largest(logits_NV, self._greedy[0].leading(len(logits_NV)))
        if advances:
            advance_decodes(chosen.ids, inputs, self.block_size)
        return logits_NV

    @contextmanager
    def _running(self, context: ForwardContext) -> Iterator[None]:
        with (
            torch.inference_mode(), self._without_autocast(), self._named_backend(),
            set_forward_context(context),
        ):  # fmt: skip
            yield

    def _without_autocast(self) -> AbstractContextManager[object]:
        """The caller's autocast would give keys another type than their cache."""
        device_type = self.device.type
        on = torch.is_autocast_enabled(device_type)
        return torch.autocast(device_type, enabled=False) if on else nullcontext()

    def _graphed_step(
        self, batch: PreparedBatch, inputs: StepInputs, key: Dispatch, capturing: bool
    ) -> PreparedStep:
        """A padded batch, planned as the graph of ``key`` needs it."""
        tokens = key.descriptor.num_tokens
        if key.mode is CUDAGraphMode.PIECEWISE:
            common = self._builder_input(batch, inputs, tokens, max(1, batch.max_query_len))
            return self._step_in_pieces(inputs, common)
        # Whatever the batch's own bound is, the graph's was this at capture.
        longest = 1 + self.options.num_drafts if key.descriptor.uniform else tokens
        common = self._builder_input(batch, inputs, tokens, longest)
        if capturing:
            common = common.replace(max_seq_len=self.max_seq_len)
        context = self._context(common, capturing)
        plans = {f"plan {group} of {name}": plan for (group, name), plan in context.plans.items()}
        lasts = not any(builder.plans_each_replay(longest) for builder in self._builders)
        tensors = {**inputs.named(), **dict(plan_tensors(plans, ""))}
        advances = key.descriptor.uniform and self.num_drafts == 0
        work = partial(self._forward_and_choose, inputs, context, advances)
        return PreparedStep(tensors, work, partial(self._running, context), lasts)

    def _step_in_pieces(self, inputs: StepInputs, common: CommonAttentionMetadata) -> PreparedStep:
        """Attention runs anew at each replay, with the step's own plan."""
        context = self._context(common)
        work = partial(self._forward, inputs, context)
        return PreparedStep(inputs.named(), work, partial(self._running, context))

    def _named_backend(self) -> AbstractContextManager[object]:
        """Names the engine's backend to the agnostic ops; without one, they choose as everywhere."""
        named = self.options.backend
        return nullcontext() if named is None else set_config(backend=named)

    def _builder_input(
        self, batch: PreparedBatch, inputs: StepInputs, num_tokens: int, max_query_len: int
    ) -> CommonAttentionMetadata:
        reqs = len(inputs.batch.seq_lens)
        return CommonAttentionMetadata(
            query_start_loc=inputs.batch.query_start_loc,
            seq_lens=inputs.batch.seq_lens,
            block_table=inputs.batch.block_table,
            slot_mapping=inputs.batch.slot_mapping,
            num_reqs=batch.num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc_cpu=batch.query_start_loc_cpu[: reqs + 1],
            seq_lens_cpu=batch.seq_lens_cpu[:reqs],
            is_prefilling=batch.is_prefilling_cpu[:reqs],
        )

    def _context(self, common: CommonAttentionMetadata, capturing: bool = False) -> ForwardContext:
        """The step's plans, one for each group of layers."""
        if self._planned is not None:
            self._planned.synchronize()  # Builders write host memory that the plans before are copied from.
        plans = {}
        for i, (group, builder) in enumerate(zip(self.groups, self._builders, strict=True)):
            plan = builder.build_for_cudagraph_capture(common) if capturing else builder.build(0, common)
            plans[i, group.backend.get_name()] = plan
        if self._planned is not None:
            self._planned.record()
        return ForwardContext(plans)

    def _allocate(self) -> dict[str, Tensor]:
        caches = {
            name: allocate_kv_cache(group.backend, group.spec, self.num_blocks, self.device)
            for group in self.groups
            for name in group.owning_layers
        }
        return {name: caches[group.owners.get(name, name)] for group in self.groups for name in group.layers}

    def _bound_layers(self) -> dict[str, BoundLayer]:
        dtype = self.options.kv_cache_dtype
        kept = resolve_kv_cache_dtype(dtype, self.model.dtype)
        scaled = kept.itemsize == 1 and kept.is_floating_point
        one = torch.ones(1, device=self.device) if scaled else None
        return {
            name: BoundLayer(self.kv_caches[name], dtype, i, one, one, name not in group.owners)
            for i, group in enumerate(self.groups)
            for name in group.layers
        }


def _event(device: torch.device) -> torch.cuda.Event | None:
    """An event of the device's stream; None where work is done when it is asked for."""
    return torch.cuda.Event() if device.type == "cuda" else None


def _check_options(model: ServedModel, options: RunnerOptions) -> None:
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    if options.num_blocks is not None and options.num_blocks < 2:
        raise ValueError(f"num_blocks={options.num_blocks} must be at least 2, since block 0 is reserved")
    longest = options.max_model_len
    if longest is not None and not 1 <= longest <= model.max_model_len:
        raise ValueError(
            f"max_model_len={longest} is outside 1..{model.max_model_len}, the positions that the model has"
        )


def _graph_support(group: LayerGroup) -> GraphSupport:
    level = group.backend.get_builder_cls().get_cudagraph_support(group.spec)
    return GraphSupport(level, group.backend.get_name())


def _group_layers(layers: Mapping[str, AttentionLayer], options: RunnerOptions) -> list[LayerGroup]:
    """Layers by equal backend and parameters, in the order of first appearance."""
    grouped: dict[tuple[type[AttentionBackend], AttentionParams], list[str]] = {}
    for name, layer in layers.items():
        _check_layer(name, layer.config)
        config = replace(layer.config, block_size=options.block_size, kv_cache_dtype=options.kv_cache_dtype)
        backend = select_backend(config, backend=options.backend).backend
        grouped.setdefault((backend, _params(config, layer.scale, layer.mla)), []).append(name)
    owners = _cache_owners(layers, grouped)
    return [
        LayerGroup(
            b,
            p,
            spec_of(p, b.supported_layouts[0]),
            tuple(names),
            {n: owners[n] for n in names if n in owners},
        )
        for (b, p), names in grouped.items()
    ]


def _check_layer(name: str, config: AttentionSelectorConfig) -> None:
    """A batch holds tokens of decoders: prompts in parts, and no encoder's lengths or ranges."""
    for field_name, allowed in (
        ("attn_type", AttentionType.DECODER), ("causal", True), ("has_bidirectional_ranges", False),
    ):  # fmt: skip
        value = getattr(config, field_name)
        if value != allowed:
            raise ValueError(
                f"layer {name!r} has {field_name}={value}; the engine serves layers of "
                f"{field_name}={allowed} alone: run the model itself"
            )


def _params(config: AttentionSelectorConfig, scale: float, mla: MLADims | None) -> AttentionParams:
    assert config.block_size is not None
    return AttentionParams(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_size=config.head_size,
        dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype, block_size=config.block_size,
        device_type=config.device_type, scale=scale, causal=config.causal,
        sliding_window=config.sliding_window, attention_chunk_size=config.attention_chunk_size,
        logits_soft_cap=config.logits_soft_cap, attn_type=config.attn_type, mla=mla,
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
                f"{backends[name].get_name()} and {backends[owner].get_name()}; name one with backend="
            )
    return owners


def _block_bytes(groups: Sequence[LayerGroup]) -> int:
    """What a block takes in the caches of all layers."""
    return sum(kv_cache_geometry(g.backend, g.spec, 1).page_size_bytes * len(g.owning_layers) for g in groups)
