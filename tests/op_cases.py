"""The batches that op tests run over, by what each is about."""

from __future__ import annotations

import pytest
import torch

from attnbackend import AttentionSelectorConfig, resolve_backend
from attnbackend.registry import AttentionBackendEnum
from attnbackend.selector import backend_reasons
from attnbackend.testing import AttentionCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE_BACKENDS = ("TORCH_SDPA", "TRITON_ATTN", "CPU_ATTN")

FEATURES = {
    "plain": {},
    "multi_query": {"num_heads": 4, "num_kv_heads": 1},
    "group_of_three": {"num_heads": 9, "num_kv_heads": 3},
    "no_lse": {"lse": False},
    "window": {"sliding_window": 7},
    "window_of_one": {"sliding_window": 1},
    "window_wider_than_all": {"sliding_window": 4096},
    "window_edge_probe": {"sliding_window": 7, "probe": "window_edge"},
    "soft_cap": {"logits_soft_cap": 5.0, "probe": "soft_cap"},
    "alibi": {"use_alibi": True},
    "sinks": {"use_sinks": True},
    "window_cap_and_sinks": {"sliding_window": 9, "logits_soft_cap": 8.0, "use_sinks": True},
    "not_causal": {"causal": False},
    "not_causal_window": {"causal": False, "sliding_window": 7},
    "value_is_head": {"num_heads": 8, "num_kv_heads": 4, "probe": "value_is_head"},
    "scale": {"scale": 0.3},
    "hnd": {"layout": "HND"},
    "layers_interleaved": {"num_layers": 3},
    "hnd_layers_interleaved": {"layout": "HND", "num_layers": 2},
    "keys_before_values": {"kv_outermost": True},
    "strided_tensors": {"strided_tensors": True},
    "block_size_32": {"block_size": 32},
    "block_size_48": {"block_size": 48},
    "head_size_32": {"head_size": 32},
    "head_size_80": {"head_size": 80},
    "head_size_128": {"head_size": 128},
    "head_size_256": {"head_size": 256, "num_heads": 2, "num_kv_heads": 1},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2", "k_scale": 2.0, "v_scale": 0.125},
    "fp8_per_head_scales": {"kv_cache_dtype": "fp8", "k_scale": (0.25, 0.5), "v_scale": (1.0, 0.125)},
    "fp8_hnd_cap": {"kv_cache_dtype": "fp8", "layout": "HND", "logits_soft_cap": 4.0, "k_scale": 0.5},
}  # fmt: skip

BATCHES = {
    "mixed": {"query_lens": (1, 5, 0, 17, 1), "context_lens": (40, 0, 9, 20, 0)},
    "decode": {"query_lens": (1, 1, 1), "context_lens": (0, 33, 70)},
    "one_token": {"query_lens": (1,), "context_lens": (0,)},
    "prefill": {"query_lens": (19, 3), "context_lens": (0, 0)},
    "uniform_of_four": {"query_lens": (4, 4, 4), "context_lens": (12, 28, 3)},
    "padded": {
        "query_lens": (1, 0, 3),
        "context_lens": (16, 0, 15),
        "num_padded_rows": 3,
        "num_padded_tokens": 2,
    },
    "graph_padding_requests": {"query_lens": (1, 1, 1), "context_lens": (20, -1, -1)},
    "empty_row_first": {"query_lens": (0, 2, 0), "context_lens": (5, 30, 0)},
}


def case(feature: str, batch: str = "mixed", **changes: object) -> AttentionCase:
    return AttentionCase(**{**FEATURES[feature], **BATCHES[batch], **changes})  # type: ignore[arg-type]


def dtypes() -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float16, torch.bfloat16)


def require(backend: str, dtype: torch.dtype = torch.float32, device_type: str = DEVICE) -> None:
    """Skips, with the reason, where the backend cannot run on this machine's ``device_type``."""
    if device_type == "cpu" and backend == "TRITON_ATTN" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter computes tl.dot on bfloat16 wrongly; needs a CUDA device")
    config = AttentionSelectorConfig.dense(
        device_type=device_type, head_size=64, num_heads=4, num_kv_heads=2, dtype=torch.float32
    )
    reasons = backend_reasons(backend, config)
    if reasons:
        pytest.skip(f"{backend} on {device_type}: {'; '.join(map(str, reasons))}")


def forward_op(backend: str) -> torch._ops.OpOverload:
    if backend == "agnostic":
        return torch.ops.attnbackend.attention.default
    resolve_backend(backend)
    return getattr(torch.ops.attnbackend, f"{backend.lower()}_forward").default


def update_op(backend: str) -> torch._ops.OpOverload:
    name = f"{backend.lower()}_kv_cache_update"
    if backend in AttentionBackendEnum.__members__:
        resolve_backend(backend)
        if hasattr(torch.ops.attnbackend, name):
            return getattr(torch.ops.attnbackend, name).default
    return torch.ops.attnbackend.kv_cache_update.default
