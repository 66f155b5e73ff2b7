"""`FuseOutputQuantization`: attention whose result is only wanted in float8 writes float8 itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.edits import emit, emit_again, remove_unused
from attnbackend.fx_passes.forms import NoMatch, argument, name_of, shape_of
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.fx_passes.retarget import OpSite
from attnbackend.ops.library import ATTENTION, role_of
from attnbackend.selector import backend_reasons, select_backend

__all__ = ["FuseOutputQuantization"]

aten = torch.ops.aten
_WHAT = "quantised output"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CASTS = {"to", "_to_copy", "float", "type", "convert_element_type"}
_VIEWS = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "contiguous",
}


class _Chain(NamedTuple):
    """What happens to an attention's output until it is float8."""

    views: tuple[Node, ...]
    scale: Node
    dtype: torch.dtype
    end: Node


class FuseOutputQuantization(GraphPass):
    """``clamp(output / scale).to(float8)`` after attention becomes the op's ``output_scale``.

    Left alone, with the reason: an output that somebody else reads, or whose LSE is asked for, since partial
    results are merged before they are quantised; a cast without the clamp that saturates; a scale that is not
    one float32 number, or is computed after the attention; a backend that does not claim quantised outputs.
    """

    name = "fuse_output_quantization"
    stage = Stage.FUSE

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        for op in [op for op in find_ops(graph) if role_of(op.op) is ATTENTION]:
            try:
                chain = _match(op)
            except NoMatch as no:
                misses.append(NearMiss(op.node.name, _WHAT, (str(no),)))
                continue
            changes.append(_fuse(graph, op, chain))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))


def _match(op: OpNode) -> _Chain:
    if op.is_wrapped:
        raise NoMatch("the call is inside functionalisation's wrapper; run UndoFunctionalization first")
    given = op.arguments()
    if given.get("lse") is not None:
        raise NoMatch("its LSE is asked for: partial results are merged before they are quantised")
    if given.get("output_scale") is not None or given.get("output_block_scale") is not None:
        raise NoMatch("its output is quantised already")
    chain = _follow(given["output"], op.node)
    scale = tensor_of(chain.scale)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,)):
        raise NoMatch(
            f"the scale is {tuple(scale.shape)} of {scale.dtype} where one float32 number is wanted"
        )
    if not chain.scale < op.node:
        raise NoMatch(f"the scale {chain.scale} is computed after the attention")
    if reasons := _reasons(op):
        raise NoMatch("; ".join(reasons))
    return chain


def _reasons(op: OpNode) -> list[str]:
    """Why the backend that serves this node cannot quantise its output."""
    site = OpSite.of(op)
    assert site is not None
    config = replace(site.config, has_output_scale=True)
    if site.backend is not None:
        return [f"{site.backend}: {reason}" for reason in backend_reasons(site.backend, config)]
    try:
        select_backend(config)
    except ValueError as error:
        return [str(error)]
    return []


def _follow(output: Node, call: Node) -> _Chain:
    views: list[Node] = []
    scale: Node | None = None
    limits: tuple[Any, Any] | None = None
    source, node = output, _only_user(output, call)
    while True:
        name = name_of(node)
        if name in _VIEWS:
            views.append(node)
        elif name in _CASTS:
            dtype = tensor_of(node).dtype
            if dtype in _FLOAT8:
                break
            if not dtype.is_floating_point or limits is not None:
                raise NoMatch(f"{node} converts to {dtype}")
        elif name in ("div", "truediv", "mul") and scale is None and limits is None:
            scale = _divisor(node, source)
        elif name in ("clamp", "clip") and limits is None:
            limits = argument(node, 1, "min"), argument(node, 2, "max")
        else:
            raise NoMatch(f"{node} is {name or 'no call'}, no step of a quantisation")
        source, node = node, _only_user(node, call)
    largest = torch.finfo(dtype).max
    if scale is None:
        raise NoMatch(f"{node} converts to {dtype} without a scale")
    if limits != (-largest, largest):
        raise NoMatch(f"values are limited to {limits} before {dtype}, not to its -{largest} to {largest}")
    return _Chain(tuple(views), scale, dtype, node)


def _only_user(node: Node, call: Node) -> Node:
    users = [user for user in node.users if user is not call]
    if len(users) != 1:
        raise NoMatch(f"{node} is read by {', '.join(map(str, users)) or 'nobody'}, not by one quantisation")
    return users[0]


def _divisor(node: Node, source: Node) -> Node:
    """The scale by which ``source`` is divided, or by whose reciprocal it is multiplied."""
    a, b = (*node.args, None)[:2]
    if name_of(node) != "mul":
        other = b if a is source else None
    else:
        factor = b if a is source else a
        is_reciprocal = name_of(factor) == "reciprocal"
        other = factor.args[0] if is_reciprocal and isinstance(factor, Node) else None
    if not isinstance(other, Node):
        raise NoMatch(f"{node} neither divides by a scale nor multiplies by the reciprocal of one")
    return other


def _fuse(graph: Graph, op: OpNode, chain: _Chain) -> Change:
    call, before = op.node, op.arguments()["output"]
    with graph.inserting_before(call):
        output = emit(graph, aten.empty_like.default, before, like=call, dtype=chain.dtype)
        scale = chain.scale
        if shape_of(scale) == ():
            scale = emit(graph, aten.reshape.default, scale, [1], like=call)
    call.replace_input_with(before, output)
    call.update_kwarg("output_scale", scale)
    result = output
    with graph.inserting_before(chain.end):
        for view in chain.views:
            result = emit_again(graph, view, result)
    chain.end.replace_all_uses_with(result)
    remove_unused(graph, _upstream(chain.end, output))
    return Change(call.name, f"{op.op.name()}, division, clamp, cast", op.op.name(), f"writes {chain.dtype}")


def _upstream(end: Node, stop: Node) -> set[Node]:
    """The steps that led to ``end``, each the first input of the next."""
    found = {end}
    while end.all_input_nodes and end.all_input_nodes[0] is not stop:
        end = end.all_input_nodes[0]
        if end.op not in ("call_function", "call_method"):
            break
        found.add(end)
    return found
