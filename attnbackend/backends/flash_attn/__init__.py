"""`FLASH_ATTN`, and what its parts are called."""

from __future__ import annotations

from attnbackend.backends.flash_attn.backend import FlashAttentionBackend
from attnbackend.backends.flash_attn.impl import FlashAttentionImpl
from attnbackend.backends.flash_attn.planning import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

__all__ = [
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
]
