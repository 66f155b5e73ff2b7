"""Modules for people who write models."""

from __future__ import annotations

from attnbackend.layers.attention import Attention
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend

__all__ = ["Attention", "BatchTensors", "BoundLayer", "write_and_attend"]
