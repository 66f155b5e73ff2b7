"""Which provider serves: what is forced, what is installed, what the device wants, what a probe finds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from attnbackend.backends.flash_attn import providers as known
from attnbackend.backends.flash_attn.call import Layer
from attnbackend.backends.flash_attn.probe import problem_of
from attnbackend.backends.flash_attn.providers import Provider
from attnbackend.config import flash_attn_choice

__all__ = ["Candidate", "NoProviderError", "candidates", "installation_problems", "provider_for"]

_VERSIONS = {9: (3, 4, 2), 10: (4, 2), 11: (4, 2)}
"""Major compute capability -> versions, best first; elsewhere 2 alone."""

Candidate = tuple[Provider, str]
"""A provider and what stands against it for a layer."""


class NoProviderError(ValueError):
    """No provider serves a layer."""

    def __init__(self, refused: list[Candidate]) -> None:
        self.refused = refused
        super().__init__("; ".join(f"{provider}: {problem}" for provider, problem in refused) or "none here")


def candidates() -> tuple[Provider, ...]:
    """Providers that are installed for the current device and that the configuration allows, best first.

    Raises:
        ValueError: the configuration names no provider or version that is known.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ()
    return _candidates(flash_attn_choice(), torch.cuda.get_device_capability())


@cache
def _candidates(choice: str | None, capability: tuple[int, int]) -> tuple[Provider, ...]:
    return tuple(p for p in _ordered(choice, capability) if _installation(p, capability) is None)


@cache
def _installation(provider: Provider, capability: tuple[int, int]) -> str | None:
    return provider.problem_of_installation(capability)


def _ordered(choice: str | None, capability: tuple[int, int]) -> list[Provider]:
    allowed = [p for p in known.PROVIDERS if choice is None or choice.casefold() in (p.key, str(p.version))]
    if not allowed:
        keys = ", ".join(p.key for p in known.PROVIDERS)
        raise ValueError(
            f"flash_attn={choice!r} (set_config, or the environment variable ATTNBACKEND_FLASH_ATTN) names "
            f"no provider of FlashAttention; allowed: {keys}, or a version: 2, 3, 4"
        )
    versions = _VERSIONS.get(capability[0], (2,))
    return sorted(allowed, key=lambda p: (*versions, 2, 3, 4).index(p.version))


def installation_problems() -> Iterator[str]:
    """Why each allowed provider is not among the candidates, one line a provider."""
    capability = torch.cuda.get_device_capability()
    for provider in _ordered(flash_attn_choice(), capability):
        if problem := _installation(provider, capability):
            yield f"{provider.key}: {problem}"


def provider_for(layer: Layer) -> Provider:
    """The first candidate that serves a layer, as far as its interface and a probe of it say.

    Raises:
        NoProviderError: none does.
    """
    refused: list[Candidate] = []
    for provider in candidates():
        problem = _stated_problem(provider, layer) or problem_of(provider, layer)
        if problem is None:
            return provider
        refused.append((provider, problem))
    raise NoProviderError(refused)


def _stated_problem(provider: Provider, layer: Layer) -> str | None:
    if layer.kv_dtype is not layer.dtype and not (provider.has_fp8 and layer.kv_dtype is torch.float8_e4m3fn):
        return "takes keys of the query's type" + (" or float8_e4m3fn" if provider.has_fp8 else "")
    if layer.alibi and not provider.has_alibi:
        return "takes no alibi slopes"
    if layer.soft_capped and not provider.has_soft_cap:
        return "takes no soft-cap"
    return None
