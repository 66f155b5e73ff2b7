"""The batches that tests of latent attention's ops run over, by what each is about."""

from __future__ import annotations

import pytest
import torch

from attnbackend import AttentionSelectorConfig, resolve_backend
from attnbackend.selector import backend_reasons
from attnbackend.testing.mla_cases import MLACase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MLA_BACKENDS = ("TORCH_MLA", "CPU_MLA")
SPARSE_BACKENDS = ("TORCH_MLA_SPARSE",)

FEATURES = {
    "plain": {},
    "no_lse": {"lse": False},
    "one_head": {"num_heads": 1},
    "heads_of_20": {"num_heads": 20},
    "scale": {"scale": 0.3},
    "layers_interleaved": {"num_layers": 3},
    "strided_tensors": {"strided_tensors": True},
    "block_size_64": {"block_size": 64},
    "block_size_48": {"block_size": 48},
    "wide_values": {"v_head_dim": 48, "qk_nope_head_dim": 16},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25},
    "fp8_unscaled": {"kv_cache_dtype": "fp8"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2", "k_scale": 2.0},
}  # fmt: skip
PACKED = {
    "kv_cache_dtype": "fp8_ds_mla",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": torch.bfloat16,
}

BATCHES = {
    "mixed": {"query_lens": (1, 1, 5, 0, 17, 1), "context_lens": (40, 0, 0, 9, 20, 33)},
    "prompts_first": {"query_lens": (6, 1, 9), "context_lens": (35, 12, 0)},
    "decode": {"query_lens": (1, 1, 1), "context_lens": (0, 33, 70)},
    "one_token": {"query_lens": (1,), "context_lens": (0,)},
    "prefill": {"query_lens": (19, 3), "context_lens": (0, 0)},
    "uniform_of_four": {"query_lens": (4, 4, 4), "context_lens": (12, 28, 3)},
    "padded": {
        "query_lens": (1, 0, 3), "context_lens": (16, 0, 15), "num_padded_rows": 3, "num_padded_tokens": 2,
    },
    "padded_decode": {
        "query_lens": (1, 1), "context_lens": (16, 5), "num_padded_rows": 2, "num_padded_tokens": 3,
    },
    "graph_padding_requests": {"query_lens": (1, 1, 1), "context_lens": (20, -1, -1)},
    "prompt_without_a_place": {"query_lens": (1, 3), "context_lens": (20, -3)},
    "empty_row_first": {"query_lens": (0, 2, 0), "context_lens": (5, 30, 0)},
}  # fmt: skip


def mla_case(feature: str, batch: str = "mixed", **changes: object) -> MLACase:
    own = PACKED if feature == "packed" else FEATURES[feature]
    return MLACase(**{**own, **BATCHES[batch], **changes})


def require_mla(backend: str, dtype: torch.dtype = torch.float32, **changes: object) -> None:
    """Skips, with the reason, where the backend cannot run on this machine."""
    fields = {
        "device_type": DEVICE, "head_size": 80, "kv_lora_rank": 64, "num_heads": 4, "num_kv_heads": 1,
        "dtype": dtype, "block_size": 16, "use_mla": True, "use_sparse": backend in SPARSE_BACKENDS,
    }  # fmt: skip
    reasons = backend_reasons(backend, AttentionSelectorConfig.dense(**{**fields, **changes}))
    if reasons:
        pytest.skip(f"{backend} on {DEVICE}: {'; '.join(map(str, reasons))}")


def mla_op(backend: str, role: str) -> torch._ops.OpOverload:
    """The op of a backend, or "agnostic", for "forward_mqa", "forward_mixed" or "mla_kv_cache_update"."""
    agnostic = {"forward_mqa": "mla_attention", "forward_mixed": "mla_mixed_attention"}.get(role, role)
    if backend != "agnostic":
        resolve_backend(backend)
        own = getattr(torch.ops.attnbackend, f"{backend.lower()}_{role}", None)
        if own is not None:
            return own.default
    return getattr(torch.ops.attnbackend, agnostic).default
