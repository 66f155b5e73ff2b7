"""What a provider really computes, found by running it once on a small batch with poisoned memory.

A library may refuse, write nothing, or ignore an argument without a word: some builds do so for some head
sizes. So each kind of layer runs once a process, its output full of NaN and its cache NaN wherever there is
no key, and is compared with attention written out in float32.

Shape legend: T tokens, N queries of one request, L its keys, H query heads, K key-value heads, D head size,
B blocks, S block_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.backends.flash_attn.call import Descales, FlashCall, Layer, ScheduleRequest, window_of
from attnbackend.backends.flash_attn.providers import Provider

__all__ = ["empty_rows_are_written", "new_tokens_are_read", "problem_of", "sinks_are_native"]

DEVICE = "cuda"
_WINDOW, _CAP, _KV_HEADS, _SPLITS = 9, 2.0, 2, 32
_ERROR = {torch.float8_e4m3fn: 0.2}
"""Largest error allowed, in units of the largest value; 0.02 for 16-bit types. A probe tells right from
wrong; whether a result is as exact as it should be is for tests."""

_FOUND: dict[tuple[str, str, int, Layer], object] = {}


def problem_of(provider: Provider, layer: Layer) -> str | None:
    """What a run of ``provider`` for ``layer`` gave wrong; None when it is right.

    Raises:
        RuntimeError: the layer was not tried before, and a CUDA graph is being captured.
    """
    return _remembered(provider, layer, "problem", _problem)


def empty_rows_are_written(provider: Provider, layer: Layer) -> bool:
    """Whether queries that see no key get zeros, or are left for others to write."""
    return _remembered(provider, layer, "empty rows", _empty_rows_are_written)


def new_tokens_are_read(provider: Provider, layer: Layer) -> bool:
    """Whether keys and values of the new tokens can be given instead of the cache."""
    return _remembered(provider, layer, "new tokens", _new_tokens_are_read)


def sinks_are_native(provider: Provider, layer: Layer) -> bool:
    """Whether the kernel itself adds bfloat16 sinks, right."""
    return provider.native_sinks and _remembered(provider, layer, "sinks", _sinks_are_native)


def _remembered(provider: Provider, layer: Layer, what: str, find):  # type: ignore[no-untyped-def]
    key = (provider.key, what, torch.cuda.current_device() if torch.cuda.is_available() else -1, layer)
    if key not in _FOUND:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{provider} has not served a layer of this kind in this process, and cannot be tried inside "
                "a CUDA graph capture; run the op once before the capture"
            )
        with torch.device("cpu"):  # whatever the default device is
            _FOUND[key] = find(provider, layer)
    return _FOUND[key]


class Request(NamedTuple):
    queries: int
    keys: int


_REQUESTS = (Request(1, 700), Request(5, 45), Request(0, 20), Request(37, 37), Request(1, 3))
"""Decode long enough to be split, speculation, a row without tokens, a prompt, a short one."""
_PROMPT = (Request(150, 171), Request(3, 3))
"""More queries than a tile holds, for which kernels may read pages whole, and the last one half full."""
_EMPTY = (Request(1, 0), Request(4, 2), Request(1, 30), Request(3, 0))


@dataclass(frozen=True)
class Trial:
    """A batch on the device; equal arguments give equal batches."""

    layer: Layer
    requests: tuple[Request, ...] = _REQUESTS
    window: int = _WINDOW
    """Of a layer with one; one beyond all keys is none to a library, which takes another kernel then."""
    device: str = field(default_factory=lambda: DEVICE)

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(7)

    @cached_property
    def heads(self) -> int:
        return _KV_HEADS * self.layer.group

    @cached_property
    def starts(self) -> Tensor:
        lengths = torch.tensor([0, *(r.queries for r in self.requests)], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @cached_property
    def lens(self) -> Tensor:
        return torch.tensor([r.keys for r in self.requests], dtype=torch.int32, device=self.device)

    @cached_property
    def query(self) -> Tensor:
        tokens = sum(r.queries for r in self.requests)
        return self._normal(tokens, self.heads).to(self.layer.dtype).to(self._query_dtype)

    @property
    def _query_dtype(self) -> torch.dtype:
        return self.layer.kv_dtype if self.layer.kv_dtype.itemsize == 1 else self.layer.dtype

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.layer.head_size, generator=self.generator).to(self.device)

    @cached_property
    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each request, [L, K, D], as stored."""

        def stored(length: int) -> Tensor:
            return self._normal(length, _KV_HEADS).to(self.layer.kv_dtype)

        return [(stored(r.keys), stored(r.keys)) for r in self.requests]

    @cached_property
    def table(self) -> Tensor:
        width = max(-(-r.keys // self.layer.block_size) for r in self.requests)
        order = torch.randperm(width * len(self.requests), generator=self.generator) + 1
        return order.to(torch.int32).view(len(self.requests), width).to(self.device)

    @cached_property
    def cache(self) -> Tensor:
        """[B, 2, S, K, D], NaN where there is no key, but behind the last one where pages are clean."""
        size, dtype = self.layer.block_size, self.layer.kv_dtype
        shape = (self.table.numel() + 1, 2, size, _KV_HEADS, self.layer.head_size)
        cache = torch.full(shape, math.nan, device=self.device).to(dtype)
        for row, sides in zip(self.table.tolist(), self.sequences, strict=True):
            for side, x_LKD in enumerate(sides):
                for page, part in zip(row, x_LKD.split(size), strict=False):
                    if self.layer.clean_pages:
                        cache[page, side] = 0
                    cache[page, side, : len(part)] = part
        return cache

    @cached_property
    def descales(self) -> Descales | None:
        if self.layer.kv_dtype.itemsize > 1:
            return None
        ones = torch.ones(len(self.requests), _KV_HEADS, device=self.device)
        return Descales(ones, 0.5 * ones, 2.0 * ones)

    @cached_property
    def slopes(self) -> Tensor | None:
        return torch.linspace(0.1, 0.4, self.heads, device=self.device) if self.layer.alibi else None

    @cached_property
    def scale(self) -> float:
        """Logits of a spread that the cap and a window that is ignored would show in."""
        return 1.5 / math.sqrt(self.layer.head_size)

    def call(self, provider: Provider, *, num_splits: int = 0, scheduled: bool = False) -> FlashCall:
        layer, window = self.layer, self.window if self.layer.windowed else None
        dtype = layer.dtype if layer.kv_dtype.itemsize > 1 else torch.bfloat16
        key_cache, value_cache = self.cache.unbind(1)
        call = FlashCall(
            query=self.query, key=key_cache, value=value_cache,
            output=torch.full(self.query.shape, math.nan, dtype=dtype, device=self.device),
            query_start_loc=self.starts, seq_lens=self.lens, block_table=self.table,
            max_query_len=max(r.queries for r in self.requests),
            max_seq_len=max(1, *(r.keys for r in self.requests)), scale=self.scale, causal=layer.causal,
            window=window_of(window, layer.causal), soft_cap=_CAP if layer.soft_capped else 0.0,
            alibi_slopes=self.slopes, descales=self.descales, num_splits=num_splits,
        )  # fmt: skip
        return call._replace(schedule=self._schedule(provider, call)) if scheduled else call

    def _schedule(self, provider: Provider, call: FlashCall) -> Tensor:
        return provider.schedule(
            ScheduleRequest(
                call.query_start_loc, call.seq_lens, call.max_query_len, call.max_seq_len, self.heads,
                _KV_HEADS, self.layer.head_size, call.query.dtype, self.layer.block_size, call.causal,
                call.window, call.soft_cap, call.num_splits,
            )
        )  # fmt: skip

    def expected(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] and natural LSE [T, H] in float32."""
        queries = self.query.float().split([r.queries for r in self.requests])
        pairs = [self._attend(q, *kv, sinks) for q, kv in zip(queries, self.sequences, strict=True)]
        return torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs])

    def _attend(self, q_NHD: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = (1.0, 1.0) if self.descales is None else (0.5, 2.0)
        k_HLD, v_HLD = (
            (x.float() * factor).repeat_interleave(self.layer.group, 1).transpose(0, 1)
            for x, factor in zip((k, v), scales, strict=True)
        )
        s_HNL = q_NHD.transpose(0, 1) @ k_HLD.transpose(1, 2) * self.scale
        if self.layer.soft_capped:
            s_HNL = _CAP * torch.tanh(s_HNL / _CAP)
        distance_NL = self._distance(len(q_NHD), k.shape[0])
        if self.slopes is not None:
            s_HNL = s_HNL - self.slopes.view(-1, 1, 1) * distance_NL.abs()
        s_HNL = s_HNL.masked_fill(~self._visible(distance_NL), -torch.inf)
        lse_HN = s_HNL.logsumexp(-1)
        if sinks is not None:
            lse_HN = torch.logaddexp(lse_HN, sinks.float().view(-1, 1).expand_as(lse_HN))
        p_HNL = (s_HNL - lse_HN.masked_fill(lse_HN == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return (p_HNL @ v_HLD).transpose(0, 1), lse_HN.transpose(0, 1)

    def _distance(self, queries: int, keys: int) -> Tensor:
        query_N = torch.arange(queries, device=self.device) + (keys - queries)
        return torch.arange(keys, device=self.device) - query_N.unsqueeze(1)

    def _visible(self, distance_NL: Tensor) -> Tensor:
        seen = distance_NL <= 0 if self.layer.causal else torch.ones_like(distance_NL, dtype=torch.bool)
        return seen & (distance_NL > -self.window) if self.layer.windowed else seen


def _calls(trial: Trial, provider: Provider) -> Iterator[tuple[str, FlashCall]]:
    """The ways in which the backend calls a provider."""
    yield "as it is", trial.call(provider, num_splits=1 if provider.splits else 0)
    if provider.splits:
        yield f"in up to {_SPLITS} splits", trial.call(provider, num_splits=_SPLITS)
    if provider.schedules:
        yield "with a schedule made ahead", trial.call(provider, num_splits=_SPLITS, scheduled=True)


def _problem(provider: Provider, layer: Layer) -> str | None:
    trials = [Trial(layer), Trial(layer, _PROMPT)]
    trials += [Trial(layer, _PROMPT, window=1000)] * layer.windowed
    for trial in trials:
        tried = _tried(provider, _calls(trial, provider), trial.expected(), layer)
        if found := next(filter(None, tried), None):
            return found
    return _problem_of_empty_rows(provider, layer)


def _problem_of_empty_rows(provider: Provider, layer: Layer) -> str | None:
    """What it gives for queries without keys does not matter, but it must take them."""
    try:
        _empty_rows_are_written(provider, layer)
    except _REFUSALS as error:
        return f"takes no requests without keys: {_first_line(error)}"
    return None


def _tried(
    provider: Provider, calls: Iterator[tuple[str, FlashCall]], expected: tuple[Tensor, Tensor], layer: Layer
) -> Iterator[str | None]:
    try:
        for how, call in calls:
            lse = provider.attend(call)
            problem = _difference(call.output, lse, expected, layer)
            yield problem and f"{problem} ({how})"
    except _REFUSALS as error:
        yield _first_line(error)


_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, ImportError)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _difference(
    output: Tensor, lse: Tensor | None, expected: tuple[Tensor, Tensor], layer: Layer
) -> str | None:  # fmt: skip
    if lse is None:
        return "gives no LSE"
    if bool(output.isnan().all()):
        return "writes nothing"
    for what, x, exact in zip(("output", "LSE"), (output, lse), expected, strict=True):
        if x.shape != exact.shape:
            return f"{what} of shape {tuple(x.shape)} instead of {tuple(exact.shape)}"
        allowed = _ERROR.get(layer.kv_dtype, 0.02) * max(1.0, float(exact.abs().max()))
        error = float((x.float() - exact).abs().nan_to_num(nan=math.inf).max())
        if not error <= allowed:
            return f"{what} off by {error:.3g}, where {allowed:.3g} is rounding"
    return None


def _empty_rows_are_written(provider: Provider, layer: Layer) -> bool:
    trial = Trial(layer, _EMPTY)
    exact, _ = trial.expected()
    outputs: list[Tensor] = []
    for _, call in _calls(trial, provider):
        provider.attend(call)
        outputs.append(call.output)
    unseen = (exact == 0).all(-1).all(-1)
    return all(bool((output[unseen] == 0).all() & output.isfinite().all()) for output in outputs)


def _new_tokens_are_read(provider: Provider, layer: Layer) -> bool:
    if not provider.reads_new_tokens or layer.kv_dtype is not layer.dtype:
        return False
    trial = Trial(layer, (Request(0, 0), Request(150, 150), Request(0, 0), Request(37, 37)))
    key, value = (torch.cat(sides) for sides in zip(*trial.sequences, strict=True))
    call = trial.call(provider, num_splits=1 if provider.splits else 0)
    call = call._replace(key=key, value=value, block_table=None)
    return next(_tried(provider, iter([("", call)]), trial.expected(), layer)) is None


def _sinks_are_native(provider: Provider, layer: Layer) -> bool:
    trial = Trial(layer)
    sinks = torch.linspace(-1.0, 4.0, trial.heads, device=trial.device).to(torch.bfloat16)
    calls = ((how, call._replace(sinks=sinks)) for how, call in _calls(trial, provider))
    return not any(_tried(provider, calls, trial.expected(sinks), layer))
