"""Skipping what a backend does not claim, or cannot do here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbackend import AttentionSelectorConfig
from attnbackend.registry import backend_names
from attnbackend.selector import backend_reasons


def require_features(backend: str, **features: Any) -> None:
    """Skips, with the reason, where a backend does not claim a feature on CPUs, or does not run on this one.

    Args:
        features: fields of a selector's configuration.
    """
    if backend not in backend_names():
        pytest.skip(f"{backend} is not registered")
    config = AttentionSelectorConfig.dense(
        device_type="cpu", head_size=64, num_heads=4, num_kv_heads=2, dtype=torch.float32, **features
    )
    if reasons := backend_reasons(backend, config):
        pytest.skip(f"{backend}: {'; '.join(map(str, reasons))}")
