"""Triton attention kernels over a paged key/value cache.

The functions are imported on first use, so that `unavailable_reason` answers on a machine
without triton. With `TRITON_INTERPRET=1` in the environment before triton is first imported,
the same kernels run on CPU tensors, for tests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .availability import unavailable_reason

if TYPE_CHECKING:
    from .cache_writer import cache_write
    from .decode import paged_decode_attention
    from .finish import finish_attention
    from .latent_rope_writer import latent_rope_write
    from .latent_rows import gather_latents, write_latents
    from .merge import merge_attention_states, merge_over
    from .mla import mla_attention
    from .mla_config import mla_workspace_size
    from .page_indices import gather_page_indices
    from .paged import paged_attention
    from .quantize import takes_output_groups
    from .rope_writer import rope_cache_write
    from .round_queries import round_queries
    from .splits import decode_num_splits, decode_workspace_size
    from .widen import widen_pages

__all__ = [
    "cache_write",
    "decode_num_splits",
    "decode_workspace_size",
    "finish_attention",
    "gather_latents",
    "gather_page_indices",
    "latent_rope_write",
    "merge_attention_states",
    "merge_over",
    "mla_attention",
    "mla_workspace_size",
    "paged_attention",
    "paged_decode_attention",
    "rope_cache_write",
    "round_queries",
    "takes_output_groups",
    "unavailable_reason",
    "widen_pages",
    "write_latents",
]

_HOME = {
    "cache_write": "cache_writer",
    "decode_num_splits": "splits",
    "decode_workspace_size": "splits",
    "finish_attention": "finish",
    "gather_latents": "latent_rows",
    "gather_page_indices": "page_indices",
    "latent_rope_write": "latent_rope_writer",
    "merge_attention_states": "merge",
    "merge_over": "merge",
    "mla_attention": "mla",
    "mla_workspace_size": "mla_config",
    "paged_attention": "paged",
    "paged_decode_attention": "decode",
    "rope_cache_write": "rope_writer",
    "round_queries": "round_queries",
    "takes_output_groups": "quantize",
    "widen_pages": "widen",
    "write_latents": "latent_rows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
