"""What is called in the place of a served model's layers once they are compiled.

Shape legend: T tokens, R rows that are wanted, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnbackend._torch_compat import run_module, set_compiled_call
from attnbackend.forward_context import get_forward_context
from attnbackend.integrations.latent_attention import BATCH
from attnbackend.layers.paged import BatchTensors

__all__ = ["CompiledEnd", "CompiledLayer", "LastLayer", "run_and_pick", "why_not_picked"]

_FEWEST = 2
"""Rows that are picked at least: torch compiles a size of one apart from others."""


@dataclass
class CompiledLayer:
    """Called in a layer's place: compiled in served batches, as it is when the model is used by itself."""

    run: Callable[..., Any]
    layer: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run if self._is_served(kwargs) else run_module
        return run(self.layer, *args, **kwargs)

    def _is_served(self, kwargs: Mapping[str, Any]) -> bool:
        return isinstance(kwargs.get(BATCH), BatchTensors)


class CompiledEnd(CompiledLayer):
    """The same for a module that is not told about the batch."""

    def _is_served(self, kwargs: Mapping[str, Any]) -> bool:
        return get_forward_context() is not None


@dataclass
class LastLayer(CompiledLayer):
    """The last layer, which gives the rows alone that `picking` tells it, where those are told."""

    run_and_pick: Callable[..., Any]
    rows_R: Tensor | None = None

    @contextmanager
    def picking(self, rows_R: Tensor, num_tokens: int) -> Iterator[Tensor | None]:
        """Gives what is still to be picked of the model's result; None: nothing.

        Where most rows are wanted, as of decodes, they are picked behind the layer: what the others compiled
        serves it then.
        """
        if num_tokens < 2 * max(len(rows_R), _FEWEST):
            yield rows_R
            return
        self.rows_R = rows_R
        try:
            yield None
        finally:
            self.rows_R = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (rows_R := self.rows_R) is None:
            return super().__call__(*args, **kwargs)
        count = len(rows_R)
        if count < _FEWEST:
            with torch.inference_mode(False):  # torch compiles for tensors of inference apart from others.
                rows_R = torch.cat([rows_R, rows_R.new_zeros(_FEWEST - count)])
        result = self.run_and_pick(self.layer, rows_R, *args, **kwargs)
        return _of_hidden(result, lambda hidden_1RH: hidden_1RH[:, :count])


def run_and_pick(module: nn.Module, rows_R: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Some rows of what a layer gives; to be compiled."""
    return _of_hidden(run_module(module, *args, **kwargs), lambda x_1TH: x_1TH.index_select(1, rows_R))


def _of_hidden(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """What a layer gives, with another hidden state: that is all, or what stands first."""
    if isinstance(result, Tensor):
        return function(result)
    return (function(result[0]), *result[1:])


def why_not_picked(
    layers: Sequence[nn.Module], logits_of: Callable[[Tensor, Tensor | None], Tensor], device: torch.device
) -> str | None:
    """Why the last layer may not give some rows alone; None: all that follows goes row by row.

    It is tried on made-up rows: no layer runs.

    Args:
        layers: those of the model, in order, called as they are.
        logits_of: runs the model on tokens [T] and picks rows of its result; None: it has no others.
        device: where the model is.
    """
    tokens_T, rows_R = (torch.tensor(x, device=device) for x in ([0, 1, 0, 1, 0], [3, 1]))
    trial = _Trial(layers, len(tokens_T))
    try:
        with torch.no_grad(), trial:
            whole_RV = logits_of(tokens_T, rows_R)
            trial.rows_R = rows_R
            picked_RV = logits_of(tokens_T, None)
    except Exception as error:  # whatever it is: the layer then gives all rows, as it did before
        return f"{type(error).__name__}: {error}"
    if trial.called != [*layers, *layers]:
        return "its layers do not run once each, in order"
    if picked_RV.shape != whole_RV.shape or not _are_close(picked_RV, whole_RV):
        return "what follows the last layer does not go row by row"
    return None


class _Trial:
    """Within its ``with`` block layers hand on what they are given, and the last gives made-up rows."""

    def __init__(self, layers: Sequence[nn.Module], num_tokens: int) -> None:
        self.layers, self.num_tokens = layers, num_tokens
        self.rows_R: Tensor | None = None
        """Of the last layer, which are to be given; None: all."""
        self.called: list[nn.Module] = []

    def __enter__(self) -> None:
        for layer in self.layers:
            set_compiled_call(layer, partial(self._stand_in, layer))

    def __exit__(self, *exception: object) -> None:
        for layer in self.layers:
            set_compiled_call(layer, None)

    def _stand_in(self, layer: nn.Module, hidden_1TH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.called.append(layer)
        if layer is not self.layers[-1]:
            return hidden_1TH
        if hidden_1TH.shape[:2] != (1, self.num_tokens):
            raise ValueError(f"rows are no tokens of {list(hidden_1TH.shape)}")
        generator = torch.Generator("cpu").manual_seed(0)
        made_up = torch.randn(hidden_1TH.shape, generator=generator, device="cpu").to(hidden_1TH)
        return made_up if self.rows_R is None else made_up.index_select(1, self.rows_R)


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Up to how products are rounded."""
    return bool((a - b).abs().max() <= 0.02 * a.abs().max())
