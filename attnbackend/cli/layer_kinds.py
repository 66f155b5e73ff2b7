"""The distinct kinds of attention layer in a model, found without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnbackend.cli.errors import UserError
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["LayerKind", "layer_kinds"]


@dataclass(frozen=True)
class LayerKind:
    """Layers that ask the same of a backend.

    Attributes:
        layers: their names in the model, in order; empty for a layer that somebody described.
        config: what they ask for.
    """

    layers: tuple[str, ...]
    config: AttentionSelectorConfig

    @property
    def title(self) -> str:
        """Such as ``2 layers: model.layers.0.self_attn, model.layers.1.self_attn``."""
        shown = ", ".join(self.layers[:3]) + (", ..." if len(self.layers) > 3 else "")
        return f"{len(self.layers)} layer{'s' if len(self.layers) != 1 else ''}: {shown}"


def layer_kinds(path: Path, changes: dict[str, Any]) -> list[LayerKind]:
    """Kinds of the model's layers, in the order in which they first come.

    The model is built without storage and run on one token with attention that notes what it is
    asked for, so the answer is the model code's own and not a reading of config fields.

    Args:
        path: as `load_model` takes it.
        changes: fields of the configurations to set, such as device_type and dtype.

    Raises:
        UserError: the model's attention cannot be found out that way.
        FileNotFoundError, ValueError, ImportError: as `load_model`.
    """
    grouped: dict[AttentionSelectorConfig, list[str]] = {}
    for name, config in _recorded(path).items():
        grouped.setdefault(replace(config, **changes), []).append(name)
    return [LayerKind(tuple(names), config) for config, names in grouped.items()]


def _recorded(path: Path) -> dict[str, AttentionSelectorConfig]:
    from attnbackend.integrations.loading import load_model_config

    config = load_model_config(path)
    try:
        layers = _run_without_storage(config)
    except Exception as error:  # the model's own code runs, and anything may come of that
        detail = " ".join(str(error).split())[:300]
        raise UserError(
            f"the attention layers of {path} ({config.model_type}) could not be found out "
            f"({type(error).__name__}: {detail}); describe a layer with --head-size and the like"
        ) from error
    return {name: layer.config for name, layer in layers.items()}


def _run_without_storage(config: Any) -> dict[str, Any]:
    """Recorded in bfloat16 whatever is asked for: some experts have no other without storage."""
    from transformers import AutoModelForCausalLM

    from attnbackend.integrations.transformers import TransformersModel

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return dict(TransformersModel(model).attention_layers())
