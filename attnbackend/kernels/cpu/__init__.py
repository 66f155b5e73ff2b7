"""C++ kernels for the CPU: paged attention and the cache writer.

Compiled on first use with the compiler in $CXX, or g++ or clang++, and kept under
$ATTNBACKEND_CACHE_DIR (default ~/.cache/attnbackend). They use `torch.get_num_threads()` threads
of the OpenMP runtime that torch uses.

Shapes: T tokens, R requests, H query heads, Hk kv heads, D head size, Dv value head size,
B cache blocks, S slots a block, W blocks a request at most.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from attnbackend.kernels.cpu import _checks
from attnbackend.kernels.cpu._build import cached_library
from attnbackend.kernels.cpu._structs import ATTENTION_STRUCT, REFUSAL_STRUCT, WRITE_STRUCT

__all__ = ["cache_write", "paged_attention", "unavailable_reason"]


def _library() -> ctypes.CDLL:
    library = cached_library()
    if isinstance(library, str):
        raise RuntimeError(f"the C++ CPU kernels are unavailable: {library}")
    return library


def _refuse(library: ctypes.CDLL, **limits: int) -> None:
    refusal = ctypes.create_string_buffer(REFUSAL_STRUCT.size)
    library.attnbackend_last_refusal(refusal)
    raise ValueError(_checks.refusal_message(*REFUSAL_STRUCT.unpack(refusal), limits=limits))


def _scale(name: str, scale: Tensor | None, kv_heads: int) -> tuple[int, int]:
    """Address and step of a dequantisation scale; address 0 for none."""
    if scale is None:
        return 0, 0
    return scale.data_ptr(), _checks.scale_step(name, scale, kv_heads)


def _cache_shapes(
    key_cache: Tensor, value_cache: Tensor
) -> tuple[tuple[int, int, int, int], int, int]:
    """The key cache's (B, S, Hk, D), the value head size, and the dtype code of both."""
    _checks.require_rank("key_cache", key_cache, "[B, S, Hk, D]")
    _checks.require_rank("value_cache", value_cache, "[B, S, Hk, Dv]")
    blocks, block_size, kv_heads, head_size = key_cache.shape
    value_size = value_cache.shape[3]
    expected = (blocks, block_size, kv_heads, value_size)
    _checks.require_shape("value_cache", value_cache, expected, "[B, S, Hk, Dv] of key_cache")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache is {key_cache.dtype} and value_cache {value_cache.dtype}; they must agree"
        )
    code = _checks.dtype_code("key_cache", key_cache, _checks.CACHE_CODES)
    return (blocks, block_size, kv_heads, head_size), value_size, code


def _cache_strides(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int, int, int, int, int]:
    """Block, slot and head strides of both, in elements."""
    k_stride, v_stride = key_cache.stride(), value_cache.stride()
    _checks.require_last_stride("key_cache", key_cache, k_stride)
    _checks.require_last_stride("value_cache", value_cache, v_stride)
    return (*k_stride[:3], *v_stride[:3])  # type: ignore[return-value]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attention of new tokens over a paged KV cache, written into `output`.

    Args:
        query: [T, H, D] float32, float16 or bfloat16. Outer strides are free here and below.
        key_cache: [B, S, Hk, D], any float dtype of query, float8_e4m3fn or float8_e5m2.
        value_cache: [B, S, Hk, Dv], same dtype as key_cache.
        output: [T, H, Dv] float32, float16 or bfloat16. Every row is written.
        query_start_loc: int32 [R + 1], starts at 0, non-decreasing. Tokens past its end get
            output 0 and lse -inf.
        seq_lens: int32 [R], context plus query tokens. 0: output 0, lse -inf.
        block_table: int32 [R, W]. Only the blocks that hold visible keys are looked at.
        scale: factor of q.k, usually 1 / sqrt(D).
        causal: token i of n sees keys up to seq_len - n + i (bottom-right aligned).
        sliding_window: how many of the latest keys a token sees, itself included.
        logits_soft_cap: c > 0 turns a scaled score s into c * tanh(s / c).
        alibi_slopes: float32 [H]; adds slope * (key position - query position).
        sinks: [H], any float dtype; one more logit in the softmax's denominator.
        k_scale, v_scale: float32, 1 or Hk elements; real value = stored * scale.
        lse: float32 [T, H], receives the natural log of the denominator.

    Raises:
        ValueError: a shape, dtype, stride, number or block id that is not allowed.
        RuntimeError: the kernels cannot be built here (see `unavailable_reason`).
    """
    library = _library()
    _checks.require_cpu(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        block_table=block_table,
    )
    _checks.require_rank("query", query, "[T, H, D]")
    _checks.require_rank("block_table", block_table, "[R, W]")
    tokens, heads, head_size = query.shape
    requests, width = block_table.shape
    cache_shape, value_size, cache_code = _cache_shapes(key_cache, value_cache)
    blocks, block_size, kv_heads, key_size = cache_shape
    if key_size != head_size:
        raise ValueError(f"query has head size {head_size}, key_cache {key_size}; must agree")
    _checks.require_heads(heads, kv_heads, head_size, value_size)
    _checks.require_rules(scale, sliding_window, logits_soft_cap)
    _checks.require_shape("output", output, (tokens, heads, value_size), "[T, H, Dv]")
    _checks.require_vector("query_start_loc", query_start_loc, torch.int32, requests + 1)
    _checks.require_vector("seq_lens", seq_lens, torch.int32, requests)
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table.dtype is {block_table.dtype}; allowed: int32")
    q_stride, o_stride, t_stride = query.stride(), output.stride(), block_table.stride()
    _checks.require_last_stride("query", query, q_stride)
    _checks.require_last_stride("output", output, o_stride)
    _checks.require_last_stride("block_table", block_table, t_stride)
    alibi_address = sinks_address = lse_address = lse_token = lse_head = 0
    if alibi_slopes is not None:
        _checks.require_vector("alibi_slopes", alibi_slopes, torch.float32, heads)
        alibi_address = alibi_slopes.data_ptr()
    if sinks is not None:
        sinks = _checks.float_vector("sinks", sinks, heads)
        sinks_address = sinks.data_ptr()
    if lse is not None:
        _checks.require_cpu(lse=lse)
        _checks.require_shape("lse", lse, (tokens, heads), "[T, H]")
        _checks.dtype_code("lse", lse, {torch.float32: 0})
        lse_address, (lse_token, lse_head) = lse.data_ptr(), lse.stride()
    k_address, k_step = _scale("k_scale", k_scale, kv_heads)
    v_address, v_step = _scale("v_scale", v_scale, kv_heads)
    arguments = ATTENTION_STRUCT.pack(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        output.data_ptr(),
        lse_address,
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        alibi_address,
        sinks_address,
        k_address,
        v_address,
        tokens,
        requests,
        heads,
        kv_heads,
        head_size,
        value_size,
        blocks,
        block_size,
        width,
        q_stride[0],
        q_stride[1],
        *_cache_strides(key_cache, value_cache),
        o_stride[0],
        o_stride[1],
        lse_token,
        lse_head,
        t_stride[0],
        k_step,
        v_step,
        _checks.dtype_code("query", query, _checks.FLOAT_CODES),
        _checks.dtype_code("output", output, _checks.FLOAT_CODES),
        cache_code,
        causal,
        sliding_window or 0,
        torch.get_num_threads(),
        scale,
        logits_soft_cap,
    )
    if library.attnbackend_attention(arguments):
        _refuse(library, tokens=tokens, capacity=width * block_size, blocks=blocks)


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores new keys and values at their slots of a paged KV cache.

    Bit for bit `(x.float() / scale).clamp(-max, max).to(cache dtype)` for the float8 formats, whose
    largest finite value is max, and the same without the clamp for the others. Slots must be
    distinct: of two tokens with one slot, either may be the one that stays.

    Args:
        key: [T, Hk, D] float32, float16 or bfloat16; outer strides are free here and below.
        value: [T, Hk, Dv], same dtype as key.
        key_cache: [B, S, Hk, D] float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        value_cache: [B, S, Hk, Dv], same dtype as key_cache.
        slot_mapping: int64 [T]; block * S + offset, negative: the token is not written.
        k_scale, v_scale: float32, 1 or Hk elements; real value = stored * scale.

    Raises:
        ValueError: a shape, dtype, stride or slot that is not allowed; nothing was written then.
        RuntimeError: the kernels cannot be built here (see `unavailable_reason`).
    """
    library = _library()
    _checks.require_cpu(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    _checks.require_rank("key", key, "[T, Hk, D]")
    cache_shape, value_size, cache_code = _cache_shapes(key_cache, value_cache)
    blocks, block_size, kv_heads, head_size = cache_shape
    tokens = key.shape[0]
    _checks.require_heads(kv_heads, kv_heads, head_size, value_size)
    _checks.require_shape("key", key, (tokens, kv_heads, head_size), "[T, Hk, D]")
    _checks.require_shape("value", value, (tokens, kv_heads, value_size), "[T, Hk, Dv]")
    _checks.require_vector("slot_mapping", slot_mapping, torch.int64, tokens)
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype} and value {value.dtype}; they must agree")
    key_stride, value_stride = key.stride(), value.stride()
    _checks.require_last_stride("key", key, key_stride)
    _checks.require_last_stride("value", value, value_stride)
    k_address, k_step = _scale("k_scale", k_scale, kv_heads)
    v_address, v_step = _scale("v_scale", v_scale, kv_heads)
    arguments = WRITE_STRUCT.pack(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        k_address,
        v_address,
        tokens,
        kv_heads,
        head_size,
        value_size,
        blocks,
        block_size,
        *key_stride[:2],
        *value_stride[:2],
        *_cache_strides(key_cache, value_cache),
        k_step,
        v_step,
        _checks.dtype_code("key", key, _checks.FLOAT_CODES),
        cache_code,
        torch.get_num_threads(),
    )
    if library.attnbackend_cache_write(arguments):
        _refuse(library, slots=blocks * block_size)


def _probe() -> str | None:
    """Runs both kernels on one token: its output is its own value, through a float8 cache."""
    cache_BSHD = torch.zeros(2, 2, 4, 1, 32).to(torch.float8_e4m3fn)
    key_cache, value_cache = cache_BSHD[:, 0], cache_BSHD[:, 1]
    value_THD = torch.linspace(-4, 4, 32).to(torch.float8_e4m3fn).float().view(1, 1, 32)
    output_THD = torch.full_like(value_THD, float("nan"))
    cache_write(value_THD, value_THD, key_cache, value_cache, torch.tensor([5]))
    counts = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.ones(1, 1, dtype=torch.int32)
    # Slot 5 is offset 1 of block 1, so the request has a zero token in front of it.
    paged_attention(
        value_THD,
        key_cache,
        value_cache,
        output_THD,
        counts,
        counts[1:] + 1,
        table,
        scale=1.0,
        sliding_window=1,
    )
    return None if torch.equal(output_THD, value_THD) else "the probe gave a wrong result"


@cache
def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, or None when they built and gave a right answer."""
    library = cached_library()
    return library if isinstance(library, str) else _probe()
