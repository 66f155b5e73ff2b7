"""When `mla_hopper` serves a call, and its launch.

Legend: B blocks, S block size, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .codec import INTERPRETED
from .mla_config import MIN_SPLIT_KEYS

if TYPE_CHECKING:
    from .mla import MLACall

RANK, ROPE, ROWS, KEYS = 512, 64, 64, 64
"""The sizes whose accumulators and buffers fill the registers and the shared memory of a Hopper GPU."""
LOG2_E = 1.4426950408889634
_MAX_ROWS = 2**31


@lru_cache(maxsize=64)
def device_problem(device: torch.device) -> str | None:
    """Why no call on a device is served, or None."""
    if INTERPRETED or device.type != "cuda":
        return "it is compiled for CUDA devices"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"compute capability is {capability}; it needs 9.x"
    try:
        from . import mla_hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton has no Gluon as of 3.6: {error}"
    return None


def problem(call: MLACall) -> str | None:
    """Why the kernel does not serve a call, or None."""
    query, cache = call.query_latent, call.cache
    reason = device_problem(query.device)
    if reason is not None:
        return reason
    if call.shape[2:] != (RANK, ROPE):
        return f"ranks are {call.shape[2:]}; it needs {(RANK, ROPE)}"
    if query.dtype == torch.float32 or cache.dtypes != (query.dtype, query.dtype):
        return f"query and cache are {query.dtype} and {cache.dtypes}; it needs one type of 16 bits"
    if call.topk_indices is not None or call.scale <= 0:
        return "it takes no selected tokens and no scale of 0 or less"
    if call.block_size % KEYS:
        return f"block_size is {call.block_size}; it needs multiples of {KEYS}"
    return _layout_problem(call)


def _layout_problem(call: MLACall) -> str | None:
    """The cache must be a matrix of rows that are 16-byte aligned."""
    block, slot = call.cache.strides[:2]
    if block % slot or slot % 8 or call.cache.latent.data_ptr() % 16:
        return f"strides {(block, slot)} of blocks and rows do not make an aligned matrix"
    if _matrix_rows(call) >= _MAX_ROWS:
        return "the cache has 2^31 rows or more"
    return None


def _matrix_rows(call: MLACall) -> int:
    """Rows of the matrix that starts at the cache's first row and steps by its row stride."""
    block, slot = call.cache.strides[:2]
    return (call.cache.latent.shape[0] - 1) * (block // slot) + call.block_size


@lru_cache(maxsize=8)
def _block_layouts(dtype: torch.dtype) -> tuple[Any, Any]:
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    sizes = [KEYS, RANK // 2], [KEYS, ROPE]
    half, rope = (gl.NVMMASharedLayout.get_default_for(size, element) for size in sizes)
    return half, rope


def launch(call: MLACall, tiles: int, num_splits: int, partial: torch.Tensor | None) -> None:
    """Write output and LSE, or with `partial` the parts of them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .mla_hopper import VALUE_REGISTERS, mla_hopper_kernel

    block, slot = call.cache.strides[:2]
    shape, strides = [_matrix_rows(call), RANK + ROPE], [slot, 1]
    half, rope = _block_layouts(call.query_latent.dtype)
    latent = call.cache.latent
    descriptors = (
        TensorDescriptor(latent, shape, strides, [KEYS, RANK // 2], half),
        TensorDescriptor(latent, shape, strides, [KEYS, ROPE], rope),
    )
    tokens, heads, _, _ = call.shape
    lse = (0, 0) if call.lse is None else call.lse.stride()
    mla_hopper_kernel[(tiles, num_splits)](
        *descriptors, call.query_latent, call.query_rope, call.output, call.lse, partial,
        call.query_start_loc, call.seq_lens, call.block_table, call.k_scale, call.scale * LOG2_E,
        *call.query_latent.stride()[:2], *call.query_rope.stride()[:2], *call.output.stride()[:2], *lse,
        call.block_table.stride(0), block // slot, tokens, call.seq_lens.shape[0], num_splits,
        H=heads, S=call.block_size, L=RANK, R=ROPE, MIN_STEPS=MIN_SPLIT_KEYS // KEYS,
        VALUE_REGS=VALUE_REGISTERS, num_warps=4,
    )  # fmt: skip
