"""`FuseOutputQuantization`: attention whose result is only wanted in float8 writes float8 itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.edits import emit, emit_again, remove_unused
from attnbackend.fx_passes.forms import ASSERTION, NoMatch, first, name_of, shape_of
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.fx_passes.quantization_forms import Quantization, match_quantization
from attnbackend.fx_passes.retarget import OpSite
from attnbackend.ops.library import ATTENTION, role_of
from attnbackend.registry import resolve_backend
from attnbackend.selector import AttentionSelectorConfig, backend_reasons, select_backend

__all__ = ["FuseOutputQuantization"]

aten = torch.ops.aten
_WHAT = "quantised output"


class FuseOutputQuantization(GraphPass):
    """``clamp(output / scale).to(float8)`` after attention becomes the op's ``output_scale``.

    Where each group of a token's elements is divided by its largest magnitude over the format's, it becomes
    the op's ``output_block_scale``, which also gives the scales; a group of zeros then has the scale 0,
    whatever guarded its division before.

    Left alone, with the reason: an output that somebody else reads, or that lies in the caller's memory, or
    whose LSE is asked for, since partial results are merged before they are quantised; a cast without the
    clamp that saturates; a given scale that is not one float32 number, or is computed or written after the
    attention; a backend that does not claim quantised outputs.

    Args:
        in_kernel_only: leave backends alone whose ops quantise after their kernel, which saves nothing.
    """

    name = "fuse_output_quantization"
    stage = Stage.FUSE

    def __init__(self, *, in_kernel_only: bool = True) -> None:
        self.in_kernel_only = in_kernel_only

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        for op in [op for op in find_ops(graph) if role_of(op.op) is ATTENTION]:
            try:
                found = _match(op)
                _check_memory(Memory(graph_module.graph), op, found)
                _check_backend(op, found, self.in_kernel_only)
            except NoMatch as no:
                misses.append(NearMiss(op.node.name, _WHAT, (str(no),)))
                continue
            changes.append(_fuse(graph, op, found))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))


def _match(op: OpNode) -> Quantization:
    if op.is_wrapped:
        raise NoMatch("the call is inside functionalisation's wrapper; run UndoFunctionalization first")
    given = op.arguments()
    if given.get("lse") is not None:
        raise NoMatch("its LSE is asked for: partial results are merged before they are quantised")
    if given.get("output_scale") is not None or given.get("output_block_scale") is not None:
        raise NoMatch("its output is quantised already")
    found = match_quantization(given["output"], op.node)
    _check_groups(op, found) if found.group else _check_scale(op, found)
    return found


def _check_memory(memory: Memory, op: OpNode, found: Quantization) -> None:
    """Whether nobody but the quantisation reads what the op writes, and the scale stays what it was."""
    output: Node = op.arguments()["output"]
    key, steps = memory.key(output), _steps(found, output, op.node)
    after = False
    for node in op.node.graph.nodes:
        if memory.key(node) == key and node.op in ("placeholder", "get_attr"):
            raise NoMatch(f"its output {output} lies in {node}, which outlives the graph")
        reads = any(memory.key(value) == key for value in node.all_input_nodes)
        if after and reads and node not in steps and not memory.hands_on(node):
            raise NoMatch(f"{node} reads its output too")
        if node in steps and not after and not memory.hands_on(node):
            raise NoMatch(f"{node} comes before the attention, and takes what its output was then")
        after = after or node is op.node
    if not found.group and (write := memory.first_write(op.node, found.end, [found.scale])):
        raise NoMatch(f"{write} changes the scale {found.scale} after the attention")


def _check_scale(op: OpNode, found: Quantization) -> None:
    scale = tensor_of(found.scale)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,)):
        raise NoMatch(
            f"the scale is {tuple(scale.shape)} of {scale.dtype} where one float32 number is wanted"
        )
    if not found.scale < op.node:
        raise NoMatch(f"the scale {found.scale} is computed after the attention")


def _check_groups(op: OpNode, found: Quantization) -> None:
    elements = _token_size(op)
    if elements % found.group:
        raise NoMatch(f"groups of {found.group} elements do not divide a token's {elements}")
    for scale in found.found_scales:
        value = tensor_of(scale)
        if value.dtype != torch.float32 or sum(not isinstance(size, int) for size in value.shape) > 1:
            raise NoMatch(f"{scale} is {tuple(value.shape)} of {value.dtype}, no float32 scales of groups")


def _token_size(op: OpNode) -> int:
    _, heads, size = shape_of(op.arguments()["output"])
    return int(heads) * int(size)


def _check_backend(op: OpNode, found: Quantization, in_kernel_only: bool) -> None:
    site = OpSite.of(op)
    assert site is not None
    config = replace(
        site.config, has_output_scale=not found.group, has_output_block_scale=bool(found.group)
    )  # fmt: skip
    name = site.backend or _selected(config)
    if reasons := backend_reasons(name, config):
        raise NoMatch("; ".join(f"{name}: {reason}" for reason in reasons))
    if in_kernel_only and not resolve_backend(name).quantizes_in_kernel(
        config.head_size, found.group or None
    ):
        kind = f"groups of {found.group} elements" if found.group else "with one scale"
        raise NoMatch(f"{name} quantises {kind} after its kernel, which the graph can do as well")


def _selected(config: AttentionSelectorConfig) -> str:
    try:
        return select_backend(config).name
    except ValueError as error:
        raise NoMatch(str(error)) from None


def _fuse(graph: Graph, op: OpNode, found: Quantization) -> Change:
    call, before = op.node, op.arguments()["output"]
    with graph.inserting_before(call):
        output = emit(graph, aten.empty_like.default, before, like=call, dtype=found.dtype)
        name, scale = _scale_argument(graph, op, found, output)
    call.replace_input_with(before, output)
    call.update_kwarg(name, scale)
    steps = _steps(found, before, call)
    for old in found.found_scales:
        sizes = [size if isinstance(size, int) else -1 for size in shape_of(old)]
        with graph.inserting_before(old):
            new = emit(graph, aten.reshape.default, scale, sizes, like=call)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in steps)
    result = output
    with graph.inserting_before(found.end):
        for view in found.views:
            result = emit_again(graph, view, {first(view): result})
    found.end.replace_all_uses_with(result)
    remove_unused(graph, steps)
    what = f"scales of {found.group} elements" if found.group else "division"
    return Change(call.name, f"{op.op.name()}, {what}, clamp, cast", op.op.name(), f"writes {found.dtype}")


def _scale_argument(graph: Graph, op: OpNode, found: Quantization, output: Node) -> tuple[str, Any]:
    """The name and the value of the argument that makes the op quantise."""
    like, scale = op.node, found.scale
    if not found.group:
        if shape_of(scale) == ():
            scale = emit(graph, aten.reshape.default, scale, [1], like=like)
        return "output_scale", scale
    groups = _token_size(op) // found.group
    parts = emit(graph, aten.reshape.default, output, [-1, groups, found.group], like=like)
    firsts = emit(graph, aten.select.int, parts, 2, 0, like=like)
    contiguous = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
    return "output_block_scale", emit(graph, aten.empty_like.default, firsts, like=like, **contiguous)


def _steps(found: Quantization, start: Node, call: Node) -> set[Node]:
    """The calls between the attention's output and the float8 value and scales, these included."""
    after: set[Node] = set()
    stack = [start]
    while stack:
        new = {user for user in stack.pop().users if user is not call} - after
        after |= new
        stack += new
    steps: set[Node] = set()
    stack = [found.end, *found.found_scales]
    while stack:
        node = stack.pop()
        if node in after and node not in steps:
            steps.add(node)
            stack += node.all_input_nodes
    return steps | {user for node in steps for user in node.users if name_of(user) == ASSERTION}
