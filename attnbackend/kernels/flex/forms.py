"""The two forms of torch's ``flex_attention``: compiled over all tiles, or plain math a request at a time.

Shape legend: M packed query rows, N packed key rows, L keys of one request, H query heads, K key-value
heads, D head size, Q and J tiles of queries and of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbackend._torch_compat import (
    flex_attention_in_math,
    flex_kernel_options,
    mark_dynamic,
    transforms_allowed,
    with_own_code,
)
from attnbackend.impl import AttentionParams
from attnbackend.kernels.flex.packing import Packing, TileSizes

__all__ = ["FormKey", "compiled_form", "kernel_options", "math_form", "run_compiled", "tile_sizes"]

COMPILER: Any = "inductor"
"""The backend of ``torch.compile`` that makes the compiled form."""
_MAX_LOGITS = 1 << 24
"""Most logits held at once by the math form: 64 MiB in float32, of which it makes several copies."""
_MASK_TILE = 128
"""The tile that ``flex_attention`` takes where none is named; its fastest kernels divide it."""
_SHORT_TILE = 16
"""Rows of a query tile where no request brings more: the fewest that ``tl.dot`` multiplies."""


class FormKey(NamedTuple):
    """What a compiled form is specialised for."""

    scale: float
    soft_cap: float
    has_alibi: bool
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    query_tile: int
    key_tile: int

    @classmethod
    def of(cls, params: AttentionParams, sizes: TileSizes, *, has_alibi: bool) -> FormKey:
        return cls(
            params.scale, params.logits_soft_cap, has_alibi, params.num_heads, params.num_kv_heads,
            params.head_size, params.dtype, sizes.queries, sizes.keys,
        )  # fmt: skip


def tile_sizes(longest_query: int) -> TileSizes:
    """Tiles for the compiled form; batches of short queries, such as decodes, take low ones.

    There are always 128 query rows and two tiles of each kind: compiled code is specialised for a size of
    1, and torch's lowering for fewer rows than 128.
    """
    if longest_query <= _SHORT_TILE:
        return TileSizes(_SHORT_TILE, _MASK_TILE, _MASK_TILE // _SHORT_TILE, 2)
    return TileSizes(_MASK_TILE, _MASK_TILE, 2, 2)


def run_compiled(
    key: FormKey, packing: Packing, q_MHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *,
    interval: tuple[Tensor, Tensor], slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of all packed rows: ``(output [M, H, D], lse float32 [M, H])``; padding rows hold anything.

    Args:
        key: as `FormKey.of` gives it for the layer and ``packing``.
        packing: the batch; tiles of at least 16 queries.
        q_MHD, k_NKD, v_NKD: packed as it says, contiguous.
        interval: first and one past the last key of each query row, int32 [M] each.
        slopes: float32 [H], or None.
    """
    lists, sizes = packing.lists, packing.sizes
    tiled = (
        q_MHD.unflatten(0, (-1, sizes.queries)), k_NKD.unflatten(0, (-1, sizes.keys)),
        v_NKD.unflatten(0, (-1, sizes.keys)),
    )  # fmt: skip
    columns = (lists.partial_count, lists.full_count, *interval, packing.self_M)
    for tensor, dims in (*((x, (0,)) for x in tiled), (lists.partial, (2, 3)), (lists.full, (2, 3))):
        mark_dynamic(tensor, dims)
    for tensor in columns:
        mark_dynamic(tensor, (tensor.dim() - 1,))
    masks = (lists.partial_count, lists.partial, lists.full_count, lists.full)
    with torch.no_grad(), transforms_allowed():
        return compiled_form(key, COMPILER)(*tiled, masks, *interval, packing.self_M, slopes)


@functools.cache
def compiled_form(key: FormKey, compiler: Any) -> Callable[..., Any]:
    """``flex_attention`` compiled once for a layer's features; batches of any size run the same code.

    The block mask is made while compiling; its lists, which the plan holds, are arguments.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    tile, options, asked = (key.query_tile, key.key_tile), kernel_options(key), AuxRequest(lse=True)
    has_groups = key.num_heads != key.num_kv_heads

    def attend(
        q_QMHD: Tensor, k_JNKD: Tensor, v_JNKD: Tensor, lists: tuple[Tensor, ...], first_M: Any, stop_M: Any,
        self_M: Any, slopes_H: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mask_mod, score_mod = _mods(first_M, stop_M, self_M, slopes_H, key.soft_cap)
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q_QMHD, k_JNKD, v_JNKD))
        partial_count, partial, full_count, full = lists
        mask = BlockMask.from_kv_blocks(
            partial_count, partial, full_count, full, BLOCK_SIZE=tile, mask_mod=mask_mod,
            seq_lengths=(q.shape[2], k.shape[2]), compute_q_blocks=False,
        )  # fmt: skip
        out, aux = flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, scale=key.scale, enable_gqa=has_groups,
            return_aux=asked, kernel_options=options,
        )  # fmt: skip
        lse: Any = aux.lse
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    # dynamic=False keeps numbers such as the scale constants; sizes are marked dynamic one by one.
    return torch.compile(with_own_code(attend), backend=compiler, fullgraph=True, dynamic=False)


def _mods(
    first_M: Tensor, stop_M: Tensor, self_M: Tensor, slopes_H: Tensor | None, soft_cap: float
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The mask and the change of logits, of query row ``m`` and key row ``n``."""

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (_at(first_M, m) <= n) & (n < _at(stop_M, m))

    def score_mod(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if soft_cap:
            s = soft_cap * torch.tanh(s / soft_cap)
        return s if slopes_H is None else s - _at(slopes_H, h) * (n - _at(self_M, m)).abs()

    return mask_mod, score_mod


def _at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, which reads the index on the host where no mode of torch's stands between."""
    return torch.ops.aten.index.Tensor(x, [index])


def kernel_options(key: FormKey) -> Any:
    """Sizes of a program's tile whose three stages of keys and values fit the shared memory of an A100.

    Torch has good defaults for some head sizes only, and fails to launch for others.
    """
    padded_head = 1 << (key.head_size - 1).bit_length()
    row = padded_head * key.dtype.itemsize
    queries, keys, warps, stages = next(sizes for most, sizes in _PROGRAMS if row <= most)
    if key.dtype is torch.float32:
        keys = min(keys, 32)
    sizes = {"BLOCK_M": min(queries, key.query_tile), "BLOCK_N": keys}
    return flex_kernel_options({**sizes, "num_warps": warps, "num_stages": stages})


_PROGRAMS = (
    (128, (128, 64, 4, 3)),
    (256, (128, 64, 8, 3)),
    (512, (64, 32, 4, 3)),
    (1024, (32, 16, 4, 2)),
)
"""Bytes of a row of a head up to which to use: queries, keys, warps, stages."""


def math_form(
    params: AttentionParams, packing: Packing, q_MHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *,
    interval: tuple[Tensor, Tensor], slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `run_compiled`, in torch's own ops: all logits of some queries of one request at a time."""
    out_MHD, lse_MH = torch.zeros_like(q_MHD), q_MHD.new_zeros(q_MHD.shape[:2], dtype=torch.float32)
    for queries, keys in packing.spans:
        step = max(1, _MAX_LOGITS // (params.num_heads * (keys.stop - keys.start)))
        sides = (k_NKD[keys], v_NKD[keys])
        for start in range(queries.start, queries.stop, step):
            part = slice(start, min(start + step, queries.stop))
            first, stop, own = (x[part] - keys.start for x in (*interval, packing.self_M))
            out_MHD[part], lse_MH[part] = _in_math(params, q_MHD[part], *sides, first, stop, own, slopes)
    return out_MHD, lse_MH


def _in_math(
    params: AttentionParams, q_MHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, first_M: Tensor, stop_M: Tensor,
    self_M: Tensor, slopes_H: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask_mod, score_mod = _mods(first_M, stop_M, self_M, slopes_H, params.logits_soft_cap)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_MHD, k_LKD, v_LKD))
    out, lse = flex_attention_in_math(q, k, v, score_mod, mask_mod, params.scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)
