"""`FLASHINFER`, and what its parts are called."""

from __future__ import annotations

from attnbackend.backends.flashinfer.backend import FlashInferBackend
from attnbackend.backends.flashinfer.impl import FlashInferImpl
from attnbackend.backends.flashinfer.planning import FlashInferMetadata, FlashInferMetadataBuilder

__all__ = ["FlashInferBackend", "FlashInferImpl", "FlashInferMetadata", "FlashInferMetadataBuilder"]
