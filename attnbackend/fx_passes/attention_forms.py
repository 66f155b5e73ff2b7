"""Recognising attention however a model spells it: torch's function, flex_attention, softmax(Q K^T) V.

Shape legend: B requests, H query heads, K key-value heads, N query tokens, L keys, D head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.forms import (
    NoMatch,
    argument,
    first,
    name_of,
    only_adds_dimensions,
    operands,
    pair_of,
    past_casts,
    rounds,
    shape_of,
)
from attnbackend.fx_passes.nodes import tensor_of

__all__ = ["AttentionForm", "is_candidate", "match_attention"]


class AttentionForm(NamedTuple):
    """Attention of [B, H, N, D] over [B, K, L, D], bottom-right causal or not."""

    query: Node
    key: Node
    value: Node
    scale: float
    causal: bool
    logits_soft_cap: float = 0.0
    takes_pair: bool = False
    """The node's value is a tuple, of which the output is the first element."""


_MATMULS = ("matmul", "bmm", "__matmul__")


def is_candidate(node: Node) -> bool:
    """Whether a node may be the end of attention: worth a match, or a reason why not."""
    if name_of(node) in ("scaled_dot_product_attention", "flex_attention"):
        return True
    if name_of(node) not in _MATMULS or None in pair_of(node):
        return False
    return name_of(_past_dropout(first(node))) in ("softmax", "_softmax")


def match_attention(node: Node, graph_module: GraphModule) -> AttentionForm:
    """Reads a node as attention.

    Raises:
        NoMatch: it is another thing, or attention that the ops cannot do; says what.
    """
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        form = _match_sdpa(node)
    elif name == "flex_attention":
        form = _match_flex(node, graph_module)
    else:
        form = _match_by_hand(node)
    _check(form)
    return form


def _check(form: AttentionForm) -> None:
    q, k, v = (shape_of(x) for x in (form.query, form.key, form.value))
    if not len(q) == len(k) == len(v) == 4:
        raise NoMatch(
            f"query, key and value have {len(q)}, {len(k)} and {len(v)} dimensions where 4 are wanted"
        )
    if not (isinstance(q[1], int) and isinstance(k[1], int)) or q[1] % k[1]:
        raise NoMatch(f"{q[1]} query heads over {k[1]} key-value heads")
    if not same_size(q[3], v[3]) or not same_size(q[3], k[3]):
        raise NoMatch(f"head sizes {q[3]}, {k[3]} and {v[3]} of query, key and value differ")
    if not (same_size(q[0], k[0]) and all(same_size(a, b) for a, b in zip(k[:3], v[:3], strict=True))):
        raise NoMatch(f"keys of {tuple(k)} and values of {tuple(v)} are not one for one, or not {q[0]} rows")
    if form.causal and not same_size(q[2], k[2]):
        raise NoMatch(
            f"is causal from the top left over {q[2]} queries and {k[2]} keys, which need not be as many"
        )
    if not form.scale > 0:
        raise NoMatch(f"its scale is {form.scale}, and the ops take one above 0")
    values = [tensor_of(x) for x in (form.query, form.key, form.value)]
    if len({x.dtype for x in values}) > 1 or not values[0].dtype.is_floating_point:
        raise NoMatch(f"types {', '.join(str(x.dtype) for x in values)}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in values):
        raise NoMatch("its inputs require grad, and the ops have no backward")


def _match_sdpa(node: Node) -> AttentionForm:
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    causal, scale = argument(node, 5, "is_causal", False), node.kwargs.get("scale")
    if mask is not None:
        raise NoMatch(f"its mask {mask} is a tensor, whose contents are not known")
    if dropout != 0.0 or not isinstance(causal, bool):
        raise NoMatch(f"dropout_p={dropout}, is_causal={causal}")
    size = shape_of(query)[-1:]
    number: Any = 1 / math.sqrt(size[0]) if scale is None and size and isinstance(size[0], int) else scale
    if not isinstance(number, (int, float)):
        raise NoMatch(f"its scale {scale} is no number that all graphs have, for heads of size {size}")
    return AttentionForm(query, *_same_repeat(key, value), float(number), causal)


def _same_repeat(key: Node, value: Node) -> tuple[Node, Node]:
    """Keys and values before their heads were repeated, where both were."""
    before = _unrepeated(key), _unrepeated(value)
    return before if same_size(shape_of(before[0])[1], shape_of(before[1])[1]) else (key, value)


def _unrepeated(node: Node) -> Node:
    """Past [B, K, L, D] -> [B, K, n, L, D] -> [B, K * n, L, D]: each head n times in a row."""
    flat = node
    while name_of(flat) in ("contiguous", "clone"):
        flat = first(flat)
    if name_of(flat) in ("repeat_interleave",):
        dim = argument(flat, 2, "dim")
        return first(flat) if dim in (1, -3) and isinstance(argument(flat, 1, "repeats"), int) else node
    if name_of(flat) not in ("reshape", "view", "_unsafe_view", "flatten"):
        return node
    wide: Any = first(flat)
    while name_of(wide) in ("clone", "contiguous"):
        wide = first(wide)
    if name_of(wide) != "expand" or len(shape_of(wide)) != 5:
        return node
    narrow = first(wide)
    source = first(narrow) if _adds_a_dimension(narrow) else None
    if not isinstance(source, Node) or len(shape_of(source)) != 4:
        return node
    b, k, length, size = shape_of(source)
    wanted = (b, k, 1, length, size)
    if len(shape_of(node)) != 4 or not all(
        same_size(shape_of(node)[i], x) for i, x in ((2, length), (3, size))
    ):
        return node
    is_repeat = all(same_size(x, y) for x, y in zip(shape_of(narrow), wanted, strict=True)) and all(
        same_size(shape_of(wide)[i], wanted[i]) for i in (0, 1, 3, 4)
    )
    return source if is_repeat else node


def _adds_a_dimension(node: Any) -> bool:
    if name_of(node) == "getitem":
        return only_adds_dimensions(node.args[1])
    return name_of(node) in ("unsqueeze", "view", "reshape")


def _match_by_hand(node: Node) -> AttentionForm:
    weights, value = _past_dropout(first(node)), pair_of(node)[1]
    logits, dim = argument(weights, 0, "input"), argument(weights, 1, "dim")
    rank = len(shape_of(weights))
    if not isinstance(dim, int) or dim % rank != rank - 1:
        raise NoMatch(f"{weights} is a softmax over dimension {dim}, not over the keys")
    logits, causal = _causal(logits)
    logits, cap = _soft_cap(logits)
    query, key, scale = _scaled_product(logits)
    assert isinstance(value, Node)
    key, value = _same_repeat(key, value)
    return AttentionForm(query, key, value, scale, causal, cap)


def _past_dropout(node: Any) -> Any:
    """Past conversions, and dropout that drops nothing."""
    node = past_casts(node)
    while name_of(node) == "dropout" and _drops_nothing(node):
        node = past_casts(first(node))
    return node


def _drops_nothing(node: Node) -> bool:
    return argument(node, 1, "p", 0.5) == 0.0 or not argument(
        node, 2, "training", argument(node, 2, "train", True)
    )


def _causal(logits: Any) -> tuple[Any, bool]:
    """Past a mask that hides what comes after, above the diagonal, which the graph itself makes."""
    logits = _past_dropout(logits)
    if name_of(logits) == "masked_fill":
        hidden, fill = argument(logits, 1, "mask"), argument(logits, 2, "value")
        if not (isinstance(fill, float) and fill == -math.inf):
            raise NoMatch(
                f"{logits} hides keys by {fill}, which gives rows without keys a mean; -inf is wanted"
            )
        if not _is_above_diagonal(hidden, shape_of(logits)[-2]):
            raise NoMatch(f"{hidden} is a mask whose contents are not known")
        return first(logits), True
    return logits, False


def _is_above_diagonal(mask: Any, queries: Any) -> bool:
    while name_of(mask) in ("bool", "to", "_to_copy"):
        mask = first(mask)
    if name_of(mask) != "triu" or argument(mask, 1, "diagonal", 0) != 1 or name_of(first(mask)) != "ones":
        return False
    shape = shape_of(mask)
    return len(shape) == 2 and all(same_size(size, queries) for size in shape)


def _soft_cap(logits: Any) -> tuple[Any, float]:
    """Past c * tanh(s / c)."""
    logits = _past_dropout(logits)
    if name_of(logits) != "mul":
        return logits, 0.0
    for inner, cap in _number_and_other(logits):
        inner = _past_dropout(inner)
        if name_of(inner) == "tanh":
            quotient = _past_dropout(first(inner))
            source, divisor = operands(quotient, _either(quotient, "div", "truediv"))
            if divisor != cap or cap == 0:
                raise NoMatch(f"{logits} caps by {cap} what was divided by {divisor}")
            return source, abs(float(cap))
    return logits, 0.0


def _either(node: Any, *names: str) -> str:
    return name_of(node) if name_of(node) in names else names[0]


def _number_and_other(node: Node) -> list[tuple[Any, float]]:
    a, b = operands(node, "mul")
    return [(x, y) for x, y in ((a, b), (b, a)) if isinstance(y, (int, float))]


def _scaled_product(logits: Any) -> tuple[Node, Node, float]:
    """Query, key and the factor of their product, wherever in it the model multiplies by one."""
    logits, scale = _factor(_past_dropout(logits))
    if name_of(logits) not in _MATMULS:
        raise NoMatch(
            f"{logits} is {name_of(logits) or 'no call'} where a product of query and key is looked for"
        )
    (query, own), (turned, other) = map(_factor, pair_of(logits))
    if name_of(turned) == "transpose":
        dims = sorted(argument(turned, i, f"dim{i - 1}") % 4 for i in (1, 2))
        key: Any = first(turned) if dims == [2, 3] else None
    else:
        key = None
    if key is None:
        raise NoMatch(f"{turned} is no transposed key")
    key, of_key = _factor(key)
    return query, key, scale * own * other * of_key


def _factor(node: Any) -> tuple[Any, float]:
    """Past a product with a number, or a quotient by one."""
    if name_of(node) == "mul" and (found := _number_and_other(node)):
        return found[0][0], float(found[0][1])
    source, divisor = pair_of(node)
    if name_of(node) in ("div", "truediv") and not rounds(node) and isinstance(divisor, (int, float)):
        return source, 1.0 / divisor
    return node, 1.0


def _match_flex(node: Node, graph_module: GraphModule) -> AttentionForm:
    """Dynamo's higher-order op, with the score as it is and no block mask.

    What a block mask lets through is in its tensors, whatever its mask_mod says.
    """
    arguments: Any = node.args
    query, key, value, score_mod, block_mask, scale = arguments[:6]
    if not _returns_the_score(score_mod, graph_module):
        raise NoMatch("its score_mod changes the score")
    if [size for size in block_mask if isinstance(size, int)][-2:] != [_NO_BLOCKS, _NO_BLOCKS]:
        raise NoMatch("it has a block mask, whose contents are not known")
    return AttentionForm(query, key, value, float(scale), causal=False, takes_pair=True)


_NO_BLOCKS = 1 << 30
"""Sizes of the one block of torch's mask for no mask (``_LARGE_SPARSE_BLOCK_SIZE``)."""


def _returns_the_score(attribute: Any, graph_module: GraphModule) -> bool:
    function = getattr(graph_module, str(attribute.target), None)
    if not isinstance(function, GraphModule):
        return False
    inputs = [n for n in function.graph.nodes if n.op == "placeholder"]
    result: Any = function.graph.output_node().args[0]
    return (result[0] if isinstance(result, (tuple, list)) else result) is inputs[0]
