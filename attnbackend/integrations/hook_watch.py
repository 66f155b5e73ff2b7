"""Forward hooks of a served model's modules once those are compiled: Dynamo does not look at them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from attnbackend._torch_compat import forward_hooks, hooks_made, remove_forward_hook

__all__ = ["HookWatch"]

_HAS_CAPTURING = "_output_capturing_hooks_installed"


class HookWatch:
    """Tells whether hooks came or went since this was made.

    Hooks by which transformers hands out hidden states have no part in a step, and Dynamo cannot trace them:
    they are taken away, and transformers adds them again when it wants them.

    Args:
        model: the model.
        modules: those of its modules whose calls are compiled.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module] = ()) -> None:
        self._model, self._modules = model, tuple(dict.fromkeys(modules))
        if self._modules:
            _take_capturing(model)
        self._made, self._known = hooks_made(), _hooks_of(self._modules)

    def changed(self) -> nn.Module | None:
        """A module whose hooks are others now; None: there is none."""
        made, looked_at = hooks_made(), tuple(self._known)
        if made != self._made and self._modules:
            _take_capturing(self._model)
            looked_at = self._modules
        if (now := _hooks_of(looked_at)) == self._known:
            self._made = made
            return None
        return next(m for m in self._modules if now.get(m) != self._known.get(m))


def _hooks_of(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[int, ...]]:
    return {module: tuple(hooks) for module in modules if (hooks := forward_hooks(module))}


def _take_capturing(model: nn.Module) -> None:
    for module in model.modules():
        for key, hook in forward_hooks(module).items():
            if _is_capturing(hook):
                remove_forward_hook(module, key)
        if getattr(module, _HAS_CAPTURING, False):
            setattr(module, _HAS_CAPTURING, False)


def _is_capturing(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
