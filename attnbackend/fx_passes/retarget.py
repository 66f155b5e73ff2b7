"""Another backend for a graph, or for code that is compiled already, without tracing the model again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnbackend._torch_compat import FUNCTIONALIZED
from attnbackend.backend import KVCacheDims
from attnbackend.fx_passes.base import Change
from attnbackend.fx_passes.cache_writes import has_standard_cache
from attnbackend.fx_passes.forms import name_of
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.ops.bind import attention_config, cache_dims, update_config
from attnbackend.ops.generate import backend_of_op, backend_op
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE, NAMESPACE, OpRole, role_of
from attnbackend.ops.rope_write import rope_kv_cache_update
from attnbackend.registry import require_implemented, resolve_backend
from attnbackend.selector import AttentionSelectorConfig, backend_reasons

__all__ = [
    "OpSite",
    "calls_in",
    "check_fused_writes",
    "check_not_empty",
    "check_sites",
    "op_sites",
    "reasons_against",
    "retarget",
]


@dataclass(frozen=True)
class OpSite:
    """An op of a graph, with what a backend must serve to stand there."""

    node: str
    backend: str | None
    """None: the agnostic op."""
    role: OpRole
    config: AttentionSelectorConfig
    sizes: tuple[int, int, int]
    """block_size, num_kv_heads, head_size of the cache."""
    kv_cache_dtype: str

    @classmethod
    def of(cls, op: OpNode) -> OpSite | None:
        """None for ops in no role of the dense pair."""
        role = role_of(op.op)
        if role not in (ATTENTION, KV_CACHE_UPDATE):
            return None
        named = backend_of_op(op.op)
        backend = named[0] if named else None
        call = role.call(**{name: tensor_of(a) for name, a in op.arguments().items()})
        dims = cache_dims(backend, call.kv_cache, call.kv_cache_dtype)
        config = attention_config(call, dims) if role is ATTENTION else update_config(call, dims)
        sizes = (int(dims.block_size), int(dims.num_kv_heads), int(dims.head_size))
        return cls(op.node.name, backend, role, config, sizes, call.kv_cache_dtype)


def op_sites(graph_module: GraphModule) -> list[OpSite]:
    """Of every op in the graph, and in graphs inside of it, that belongs to the dense pair."""
    sites = (OpSite.of(op) for op in _all_ops(graph_module))
    return [site for site in sites if site is not None]


def _all_ops(graph_module: GraphModule) -> Iterator[OpNode]:
    """In branches, loops and pieces too, which are graphs of their own."""
    for graph in _graphs(graph_module):
        yield from find_ops(graph.graph)


def _graphs(graph_module: GraphModule) -> list[GraphModule]:
    return [module for module in graph_module.modules() if isinstance(module, GraphModule)]


def calls_in(graph_module: GraphModule) -> Counter[str]:
    """What a graph calls, and how often; graphs inside of it counted."""
    nodes = (node for module in _graphs(graph_module) for node in module.graph.nodes)
    return Counter(_called(node) for node in nodes if node.op.startswith("call_"))


def _called(node: Node) -> str:
    target: Any = node.args[0] if node.target in FUNCTIONALIZED else node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    return name_of(node) or f"module {target}"


def check_fused_writes(calls: Mapping[str, int], backend: str) -> None:
    """Raises ValueError where ``backend`` would read fused writes, and they are not of its kind of cache."""
    name = rope_kv_cache_update.name()
    if calls.get(name, 0) and not has_standard_cache(resolve_backend(backend)):
        raise ValueError(
            f"backend {backend!r} has a cache of its own kind, and {calls[name]} writes are {name}, for the "
            "standard one; nothing was changed: leave FuseRopeCacheWrite out and compile anew"
        )


def check_not_empty(sites: Iterable[OpSite], calls: Mapping[str, int]) -> None:
    """Raises ValueError where there is nothing to retarget, with what there is instead."""
    if any(True for _ in sites):
        return
    wanted = ", ".join(f"{NAMESPACE}::{op}" for op in ("attention", "kv_cache_update"))
    listed = ", ".join(f"{n} x {name}" for name, n in sorted(calls.items())) or "none at all"
    raise ValueError(
        f"nothing to retarget: looked for {wanted} and backends' ops of these roles (ops of latent attention "
        f"are not retargeted), and found none; the calls are: {listed}. Give what holds the model's "
        "attention; fx_passes.RecogniseAttention finds attention in other words"
    )


def reasons_against(site: OpSite, backend: str) -> list[str]:
    """Why ``backend`` cannot stand at a site: what it does not serve, or a cache of another shape."""
    reasons = [str(reason) for reason in backend_reasons(backend, site.config)]
    if reasons:
        return reasons
    dims = KVCacheDims(2, *site.sizes)
    here = _cache_shape(site.backend, dims, site.kv_cache_dtype)
    there = _cache_shape(backend, dims, site.kv_cache_dtype)
    return [] if here == there else [f"its cache has shape {there} where the graph's has {here}"]


def _cache_shape(backend: str | None, dims: KVCacheDims, kv_cache_dtype: str) -> tuple[int, ...]:
    if backend is None:
        return (dims.num_blocks, 2, *dims[1:])
    return tuple(resolve_backend(backend).get_kv_cache_shape(*dims, kv_cache_dtype))


def check_sites(sites: Iterable[OpSite], backend: str) -> None:
    """Raises ValueError where ``backend`` cannot stand at one of the sites."""
    require_implemented(backend)
    wrong = [(site, why) for site in sites if (why := reasons_against(site, backend))]
    if wrong:
        listed = "".join(f"\n  {site.node}: {'; '.join(why)}" for site, why in wrong)
        raise ValueError(
            f"backend {backend!r} cannot take the place of another; nothing was changed:{listed}"
        )


def retarget(target: Any, backend: str) -> list[Change]:
    """Runs every attention of a graph, or of a compiled model, on another backend, without a new trace.

    In a graph the ops themselves are changed. Code that is compiled stays as it is: its ops keep their names
    and, from now on, run on ``backend`` whenever the model calls them; what is compiled later is held to the
    same. CUDA graphs that were captured before replay what they captured.

    Args:
        target: a ``torch.fx.GraphModule``, a ``torch.export.ExportedProgram``, what `attnbackend.compile`
            returned, or what `compile_layers` returned.
        backend: the other backend's name.

    Returns:
        What was changed.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: the backend is unknown, or cannot serve at one of the places, or there is no attention
            and no cache write, in a graph or in all that was compiled so far; nothing is changed then.
    """
    if isinstance(target, torch.export.ExportedProgram):
        target = target.graph_module
    if isinstance(target, GraphModule):
        return _retarget_graph(target, backend)
    compiler = getattr(target, "attnbackend_compiler", target)
    if not hasattr(compiler, "retarget"):
        raise TypeError(
            f"cannot retarget {type(target).__name__}; expected a GraphModule, an ExportedProgram, or what "
            "attnbackend.compile or compile_layers returned"
        )
    return compiler.retarget(backend)


def _retarget_graph(graph_module: GraphModule, backend: str) -> list[Change]:
    sites = op_sites(graph_module)
    calls = calls_in(graph_module)
    check_not_empty(sites, calls)
    check_sites(sites, backend)
    check_fused_writes(calls, backend)
    changes = []
    for op in list(_all_ops(graph_module)):
        site = OpSite.of(op)
        own = backend_op(backend, site.role) if site else None
        if site is not None and own is not None and own is not op.op:
            op.set_op(own)
            changes.append(Change(op.node.name, op.op.name(), own.name(), "retargeted"))
    for changed in _graphs(graph_module) if changes else ():
        changed.recompile()
    return changes
