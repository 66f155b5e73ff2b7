"""Attention of absorbed queries to a latent cache: checks, choice of kernel, launch.

Legend: T tokens, Q requests, H heads, B blocks, S block size, W table width, K selected keys of a token,
L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import mla_hopper_launch as hopper
from .checks import QUERY_DTYPES, check_device, check_metadata, check_same_device, check_vector, fail, names
from .codec import FLOAT8_FORMATS, INTERPRETED, TRITON_DTYPE, kernel_view, stored_format
from .config import TileConfig, padded_size
from .latent_cache import LatentCache, latent_cache
from .launch import on_device_of
from .mla_config import MIN_SPLIT_KEYS, mla_num_splits, mla_tile, mla_workspace_size
from .mla_decode import mla_decode_kernel
from .mla_rows import tile_count
from .partials import MERGE_STEP, merge_tokens_kernel
from .splits import processor_count

WHERE = "mla_attention"
_DEVICE_CHECKED = (
    "query_rope", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table", "lse",
    "topk_indices", "k_scale", "workspace",
)  # fmt: skip


class MLACall(NamedTuple):
    """One validated call."""

    query_latent: torch.Tensor
    query_rope: torch.Tensor
    cache: LatentCache
    output: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scale: float
    lse: torch.Tensor | None
    topk_indices: torch.Tensor | None
    k_scale: torch.Tensor | None
    block_size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """T, H, L, R."""
        tokens, heads, rank = self.query_latent.shape
        return tokens, heads, rank, self.query_rope.shape[2]

    @property
    def max_keys(self) -> int:
        """The most keys that a token can see."""
        if self.topk_indices is not None:
            return self.topk_indices.shape[1]
        return self.block_table.shape[1] * self.block_size


def mla_attention(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    lse: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    tile: TileConfig | None = None,
) -> None:
    """Causal attention of all heads to one key a token, whose latent is the value too.

    query_latent [T, H, L], query_rope [T, H, R] and output [T, H, L]: float32, float16 or bfloat16, last
    stride 1; kv_cache [B, S, L + R] of those types or float8_e4m3fn, float8_e5m2, or uint8 [B, S, 656] with
    packed rows (512 float8_e4m3fn, 4 float32 scales, 64 bfloat16), any block and slot strides;
    query_start_loc [Q + 1], seq_lens [Q] (context plus query) and block_table [Q, W]: int32; k_scale
    float32 [1], real row = stored * k_scale; lse float32 [T, H], written as natural logarithms.

    The mask is aligned bottom-right. topk_indices int32 [T, K]: positions that a token attends to, none
    twice; those below 0 and behind the token are passed over. Every row of output is written: zeros (and
    -inf in lse) where there is no key, and for tokens past query_start_loc[Q].

    num_splits: parts that the keys of each tile are cut into; None takes `mla_num_splits` of the shapes and
    the device, so a captured graph keeps it. workspace: contiguous float32 of at least
    `mla_workspace_size` elements, overwritten; None allocates. tile: sizes for the kernel of all devices,
    which then serves; None chooses, and where it can, the kernel for Hopper GPUs.

    Raises ValueError for shapes, dtypes or options outside of these.
    """
    call = checked_call(
        query_latent, query_rope, kv_cache, output, query_start_loc, seq_lens, block_table, scale, lse,
        topk_indices, k_scale, workspace,
    )  # fmt: skip
    if call.shape[0] == 0:
        return
    use_hopper = tile is None and hopper.problem(call) is None
    product = _product_dtype(call)
    tile = tile or mla_tile(product, call.shape[2], call.shape[1], query_latent.device)
    rows = hopper.ROWS if use_hopper else tile.block_m
    tiles = _tiles(call, rows)
    if num_splits is None:
        processors = processor_count(query_latent.device)
        num_splits = mla_num_splits(_busy_tiles(call, tiles, rows), call.max_keys, processors)
    partial = _partial_buffer(call, num_splits, workspace)
    with on_device_of(query_latent):
        if use_hopper:
            hopper.launch(call, tiles, num_splits, partial)
        else:
            _launch(call, product, tile, tiles, num_splits, partial)
        if partial is not None:
            _merge(call, num_splits, partial)


def _tiles(call: MLACall, rows: int) -> int:
    tokens, heads, _, _ = call.shape
    if call.topk_indices is not None:
        heads = -(-heads // rows) * rows
    return tile_count(tokens, call.seq_lens.shape[0], heads, rows)


def _busy_tiles(call: MLACall, tiles: int, rows: int) -> int:
    """Tiles that have rows, where no request lacks tokens and none has more than a tile and its share."""
    tokens, heads, _, _ = call.shape
    return min(tiles, max(call.seq_lens.shape[0], -(-tokens * heads // rows)))


def _product_dtype(call: MLACall) -> torch.dtype:
    """Of the matrix products: the query's, or float32 where 16 bits would lose something."""
    query = call.query_latent.dtype
    stored = {d for d in call.cache.dtypes if d not in FLOAT8_FORMATS} if call.cache.scales is None else set()
    if len(stored | {query}) > 1 or (INTERPRETED and query == torch.bfloat16):
        return torch.float32
    return query


def _launch(
    call: MLACall, product: torch.dtype, tile: TileConfig, tiles: int, num_splits: int,
    partial: torch.Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, rank, rope_size = call.shape
    indices, selected = call.topk_indices, 0
    if indices is not None:
        selected = indices.shape[1]
    query_format, out_format = _formats(call)
    mla_decode_kernel[(tiles, num_splits)](
        kernel_view(call.query_latent, query_format), kernel_view(call.query_rope, query_format),
        call.cache.latent, call.cache.rope, call.cache.scales, kernel_view(call.output, out_format), call.lse,
        call.query_start_loc, call.seq_lens, call.block_table, indices, call.k_scale, partial, call.scale,
        *_strides(call), tokens, call.seq_lens.shape[0], selected, num_splits,
        H=heads, S=call.block_size, L=rank, R=rope_size, L_PAD=padded_size(rank),
        R_PAD=padded_size(rope_size), DOT=TRITON_DTYPE[product],
        PRECISE=call.query_latent.dtype == torch.float32, Q_FMT=query_format,
        L_FMT=call.cache.formats[0], R_FMT=call.cache.formats[1], OUT_FMT=out_format,
        M=tile.block_m, N=tile.block_n, MIN_KEYS=MIN_SPLIT_KEYS,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _strides(call: MLACall) -> tuple[int, ...]:
    """In the order of the kernel's arguments."""
    lse = (0, 0) if call.lse is None else call.lse.stride()
    indices = 0 if call.topk_indices is None else call.topk_indices.stride(0)
    return (
        *call.query_latent.stride()[:2], *call.query_rope.stride()[:2], *call.cache.strides,
        *call.output.stride()[:2], *lse, call.block_table.stride(0), indices,
    )  # fmt: skip


def _formats(call: MLACall) -> tuple[str, str]:
    """How queries and output are stored."""
    device = call.output.device
    return stored_format(call.query_latent.dtype, device), stored_format(call.output.dtype, device)


def _merge(call: MLACall, num_splits: int, partial: torch.Tensor) -> None:
    tokens, heads, rank, _ = call.shape
    lse_strides = (0, 0) if call.lse is None else call.lse.stride()
    out_format = _formats(call)[1]
    merge_tokens_kernel[(heads, tokens)](
        partial, kernel_view(call.output, out_format), call.lse, None, None, 0, *call.output.stride()[:2],
        *lse_strides, num_splits, out_format, 0, 0, rank, padded_size(rank), MERGE_STEP,
        call.query_latent.dtype == torch.float32, num_warps=4,
    )  # fmt: skip


def _partial_buffer(call: MLACall, num_splits: int, workspace: torch.Tensor | None) -> torch.Tensor | None:
    tokens, heads, rank, _ = call.shape
    if num_splits < 1:
        fail(WHERE, "num_splits", num_splits, "None, or at least 1")
    needed = mla_workspace_size(tokens, heads, rank, num_splits)
    if needed == 0:
        return None
    if workspace is None:
        return torch.empty(needed, dtype=torch.float32, device=call.output.device)
    fits = workspace.numel() >= needed and workspace.is_contiguous()
    if workspace.dtype != torch.float32 or not fits:
        found = f"{tuple(workspace.shape)} of {workspace.dtype}, strides {workspace.stride()}"
        fail(WHERE, "workspace", found, f"contiguous torch.float32, {needed} elements or more")
    return workspace


def checked_call(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None,
    topk_indices: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> MLACall:
    """A call of `mla_attention`; ValueError for what no kernel takes."""
    check_device(WHERE, query_latent)
    others = (
        query_rope, kv_cache, output, query_start_loc, seq_lens, block_table, lse, topk_indices, k_scale,
        workspace,
    )  # fmt: skip
    check_same_device(WHERE, query_latent, _DEVICE_CHECKED, others)
    _check_rows(query_latent, query_rope, output)
    tokens, heads, rank = query_latent.shape
    check_metadata(WHERE, query_start_loc, seq_lens, block_table)
    for name, tensor in (
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
        ("block_table", block_table),
    ):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            fail(WHERE, f"last stride of {name}", tensor.stride(-1), "1")
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != (tokens, heads)):
        fail(WHERE, "lse", f"{tuple(lse.shape)} of {lse.dtype}", f"torch.float32 of shape {(tokens, heads)}")
    if k_scale is not None:
        check_vector(WHERE, "k_scale", k_scale, (torch.float32,), (1,))
    if topk_indices is not None:
        _check_indices(topk_indices, tokens)
    cache = latent_cache(WHERE, kv_cache, rank, query_rope.shape[2])
    if cache.scales is not None and k_scale is not None:
        fail(WHERE, "k_scale", "given", "None, since packed rows have scales of their own")
    return MLACall(
        query_latent, query_rope, cache, output, query_start_loc, seq_lens, block_table, float(scale), lse,
        topk_indices, k_scale, kv_cache.shape[1],
    )  # fmt: skip


def _check_rows(query_latent: torch.Tensor, query_rope: torch.Tensor, output: torch.Tensor) -> None:
    """ValueError unless the three agree, and are of types and strides that a kernel takes."""
    named = (("query_latent", query_latent), ("query_rope", query_rope), ("output", output))
    for name, tensor in named:
        if tensor.dim() != 3 or tensor.stride(2) != 1:
            found = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            fail(WHERE, name, found, "3 dimensions, the last of stride 1")
        if tensor.dtype not in QUERY_DTYPES:
            fail(WHERE, f"{name}.dtype", tensor.dtype, names(QUERY_DTYPES))
    if query_rope.shape[:2] != query_latent.shape[:2] or query_rope.dtype != query_latent.dtype:
        found = f"{tuple(query_rope.shape)} of {query_rope.dtype}"
        fail(
            WHERE, "query_rope", found, f"tokens, heads and type of query_latent, {tuple(query_latent.shape)}"
        )
    if output.shape != query_latent.shape:
        fail(WHERE, "output.shape", tuple(output.shape), f"that of query_latent, {tuple(query_latent.shape)}")
    for name, size in (("kv_lora_rank", query_latent.shape[2]), ("qk_rope_head_dim", query_rope.shape[2])):
        if size % 8 or not 8 <= size <= 1024:
            fail(WHERE, name, size, "multiples of 8 from 8 to 1024")


def _check_indices(topk_indices: torch.Tensor, tokens: int) -> None:
    shape = topk_indices.shape
    fits = topk_indices.dim() == 2 and shape[0] == tokens and topk_indices.stride(1) == 1
    if topk_indices.dtype != torch.int32 or not fits:
        found = f"{tuple(shape)} of {topk_indices.dtype}, strides {topk_indices.stride()}"
        fail(WHERE, "topk_indices", found, f"torch.int32 [{tokens}, K], last stride 1")
