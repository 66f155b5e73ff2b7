"""What latent backends over libraries have in common: claims, finding out by trying, rows that have no key.

Shape legend: T tokens, Q requests, H heads, N keys of a request, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnbackend.backends.host_lengths import BatchFacts
from attnbackend.backends.mla.common import MLACommonBackend, MLACommonMetadataBuilder
from attnbackend.backends.mla.triton_rows import TritonLatentRows
from attnbackend.impl import AttentionParams, MLADims, MLATensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.ops.binding import LN_2
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import LSEBase, MultipleOf, Reason

__all__ = ["RANK", "REFUSALS", "ROPE", "LibraryMLABackend", "LibraryRows", "import_problem"]

RANK, ROPE = 512, 64
_ERROR = 0.02
"""Largest error allowed, of outputs in units of the largest value: right or wrong, no more."""
REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, ImportError, OSError)
"""What a library raises of a call that it does not take."""


def import_problem(module: str, names: tuple[str, ...] = ()) -> str | None:
    """Why a library's module cannot be used: it is missing, does not load, or lacks ``names``."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    missing = [name for name in names if not hasattr(found, name)]
    return f"{module} lacks {', '.join(missing)}" if missing else None


class LibraryRows(TritonLatentRows):
    """Implementations that call a kernel, then write what it leaves to do."""

    def finish(
        self, output: Tensor, lse: Tensor | None, batch: CommonAttentionMetadata, tensors: MLATensors,
        facts: BatchFacts | None = None,
    ) -> None:  # fmt: skip
        """Zeros and -inf where no key is seen; the kernel's LSE [T, H], if it is wanted, to its place.

        Nothing is launched where the batch's facts, and what was found about the kernel, leave nothing to do.
        """
        if tensors.lse is None and facts is not None and self._is_whole(output, facts):
            return
        from attnbackend.kernels import triton

        triton.finish_attention(
            output, lse, tensors.lse, batch.query_start_loc, batch.seq_lens, causal=True, base_2=self.base_2
        )

    def _is_whole(self, output: Tensor, facts: BatchFacts) -> bool:
        """Whether the kernel has written every row as it must be."""
        p = self.params
        kind = type(self), p.dtype, p.block_size, p.num_heads, output.device.index
        return facts.covered_tokens >= len(output) and (not facts.may_see_no_key or kind in _WRITES_ZEROS)

    base_2: ClassVar[bool] = False
    """The kernel's LSE is of base 2."""


class LibraryMLABackend(MLACommonBackend, abstract=True):
    """NVIDIA GPUs, rows of 512 + 64 in 16 bits; what is claimed is tried once before it is served."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    supported_head_sizes = (RANK + ROPE,)
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(16),)
    supported_device_types = ("cuda",)
    min_compute_capability = (9, 0)
    latent_sizes = ((RANK, ROPE),)
    lse_base = LSEBase.E
    packed_dtypes: ClassVar[tuple[str, ...]] = ()
    """Types of caches other than the query's that are served."""

    @classmethod
    def library_problem(cls) -> str | None:
        """Why the library cannot be used."""
        raise NotImplementedError

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch finds none"
        from attnbackend.kernels import triton

        return cls.library_problem() or triton.unavailable_reason("cuda")

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        reasons = super().supports_combination(config)
        allowed = ("auto", str(config.dtype).removeprefix("torch."), *cls.packed_dtypes)
        if config.kv_cache_dtype not in allowed:
            reasons.append(Reason("kv_cache_dtype", config.kv_cache_dtype, ", ".join(allowed)))
        if reasons or config.device_type != "cuda" or cls.unavailable_reason("cuda") is not None:
            return reasons
        if config.compute_capability != torch.cuda.get_device_capability() or not _is_sound(cls, config):
            return reasons
        problem = problem_of(cls, config.dtype, config.block_size or 64, config.num_heads)
        return (
            [Reason("dtype, block_size, num_heads", _asked(config), f"others; found: {problem}")]
            if problem
            else []
        )


def _asked(config: AttentionSelectorConfig) -> str:
    return f"{config.dtype}, {config.block_size}, {config.num_heads}"


def _is_sound(cls: type[LibraryMLABackend], config: AttentionSelectorConfig) -> bool:
    return (
        cls.supports_dtype(config.dtype)
        and cls.supports_head_size(config.head_size)
        and (config.block_size is None or cls.supports_block_size(config.block_size))
    )


# --- finding out by trying ---------------------------------------------------------------

_FOUND: dict[tuple[Any, ...], str | None] = {}
_WRITES_ZEROS: set[tuple[Any, ...]] = set()
"""Kinds of implementations and layers whose kernel itself writes zeros where no key is seen."""


class _Request(NamedTuple):
    queries: int
    keys: int


_REQUESTS = (
    _Request(1, 700),
    _Request(3, 45),
    _Request(0, 20),
    _Request(1, 3),
    _Request(1, 0),
    _Request(4, 2),
)
"""Long enough to be split, several tokens, no token, few keys, none, fewer keys than tokens."""
_MANY = 24
"""Times that these fill a device, so that none is split."""


def problem_of(
    backend: type[LibraryMLABackend],
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    device: str = "cuda",
) -> str | None:
    """What a run of the backend on a small batch gave wrong; None when it is right. It runs once a process.

    Raises:
        RuntimeError: such a layer was not tried before, and a CUDA graph is being captured.
    """
    index = torch.cuda.current_device() if device == "cuda" else -1
    key = (backend, dtype, block_size, num_heads, index)
    if key not in _FOUND:
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{backend.get_name()} has not served a layer of this kind in this process, and cannot be "
                "tried inside a CUDA graph capture; run the op once before the capture"
            )
        with torch.device("cpu"):  # whatever the default device is
            _FOUND[key] = _tried(backend, dtype, block_size, num_heads, device)
    return _FOUND[key]


def _tried(
    backend: type[LibraryMLABackend], dtype: torch.dtype, block_size: int, num_heads: int, device: str
) -> str | None:
    params = AttentionParams(
        num_heads=num_heads, num_kv_heads=1, head_size=RANK + ROPE, scale=(RANK + ROPE) ** -0.5, dtype=dtype,
        kv_cache_dtype="auto", block_size=block_size, device_type=device,
        mla=MLADims(kv_lora_rank=RANK, qk_rope_head_dim=ROPE),
    )  # fmt: skip
    few, many = (_Trial(backend, params, requests, device) for requests in (_REQUESTS, _REQUESTS[1:] * _MANY))
    found = few.problem()
    if found is None and few.problem(bare=True) is None and many.problem(bare=True) is None:
        index = torch.cuda.current_device() if device == "cuda" else None
        _WRITES_ZEROS.add((backend.get_impl_cls(), dtype, block_size, num_heads, index))
    return found


@dataclass(frozen=True)
class _Trial:
    """A run on requests whose unused memory is NaN."""

    backend: type[LibraryMLABackend]
    params: AttentionParams
    requests: tuple[_Request, ...]
    device: str

    def problem(self, *, bare: bool = False) -> str | None:
        """What it gave wrong; with `bare` without what `finish` writes, and the output alone."""
        rng, dtype = torch.Generator().manual_seed(7), self.params.dtype
        shape = sum(r.queries for r in self.requests), self.params.num_heads
        query = torch.randn(*shape, RANK + ROPE, generator=rng).to(self.device, dtype)
        rows = [torch.randn(r.keys, RANK + ROPE, generator=rng).to(self.device, dtype) for r in self.requests]
        output = torch.full((*shape, RANK), math.nan, dtype=dtype, device=self.device)
        lse = torch.full(shape, math.nan, device=self.device)
        try:
            self._run(query, rows, output, None if bare else lse)
        except REFUSALS as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        exact, exact_lse = _expected(query, rows, [r.queries for r in self.requests], self.params.scale)
        if self.backend.lse_base is LSEBase.TWO:
            lse *= LN_2
        return _difference(output, exact_lse if bare else lse, exact, exact_lse)

    def _run(self, query: Tensor, rows: list[Tensor], output: Tensor, lse: Tensor | None) -> None:
        common, cache = _paged(rows, self.requests, self.params.block_size, self.device)
        builder = self.backend.get_builder_cls()(
            self.params, spec_of(self.params), None, torch.device(self.device)
        )
        assert isinstance(builder, MLACommonMetadataBuilder)
        plan: Any = builder.build_decode(common)
        if lse is None:
            plan = replace(plan, facts=BatchFacts(len(query), False, False))
        impl: Any = self.backend.get_impl_cls()(self.params)
        chosen = _all_keys(self.requests, self.device) if self.backend.is_sparse else None
        tensors = MLATensors(lse=lse, topk_indices=chosen)
        impl.forward_mqa(query[..., :RANK], query[..., RANK:], cache, plan, output, tensors)


def _all_keys(requests: tuple[_Request, ...], device: str) -> Tensor:
    """Selections int32 [T, N] of every key that a query may see, and of those behind it."""
    keys = torch.cat([torch.full((r.queries,), r.keys) for r in requests]).unsqueeze(1)
    place = torch.arange(int(keys.max()))
    return torch.where(place < keys, place, -1).to(device, torch.int32)


def _paged(
    rows: list[Tensor], requests: tuple[_Request, ...], block_size: int, device: str
) -> tuple[CommonAttentionMetadata, Tensor]:
    """The batch of the requests, and a cache of their rows that is NaN where there is no key."""
    width = max(-(-len(r) // block_size) for r in rows)
    order = torch.randperm(width * len(rows), generator=torch.Generator().manual_seed(8)) + 1
    table = order.to(torch.int32).view(len(rows), width)
    cache = torch.full(
        (table.numel() + 1, block_size, RANK + ROPE), math.nan, dtype=rows[0].dtype, device=device
    )
    for pages, row in zip(table.tolist(), rows, strict=True):
        for page, part in zip(pages, row.split(block_size), strict=False):
            cache[page, : len(part)] = part
    starts = torch.tensor([0, *(r.queries for r in requests)]).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([r.keys for r in requests], dtype=torch.int32)
    common = CommonAttentionMetadata.from_tensors(
        starts.to(device),
        lens.to(device),
        table.to(device),
        num_tokens=int(starts[-1]),
        block_size=block_size,
    )
    return common, cache


def _expected(query: Tensor, rows: list[Tensor], counts: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Output [T, H, L] and natural LSE [T, H] in float32."""
    outputs, lses = [], []
    queries = query.float().split(counts)
    for q_THW, rows_NW in zip(queries, rows, strict=True):
        k = rows_NW.float()
        scores = torch.einsum("thw,nw->thn", q_THW, k) * scale
        own = torch.arange(len(q_THW), device=k.device) + len(k) - len(q_THW)
        unseen = torch.arange(len(k), device=k.device) > own.unsqueeze(1)
        scores = scores.masked_fill(unseen.unsqueeze(1), -math.inf)
        lse = scores.logsumexp(-1) if len(k) else scores.new_full(scores.shape[:2], -math.inf)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        outputs.append(torch.einsum("thn,nl->thl", weights, k[:, :RANK]))
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses)


def _difference(output: Tensor, lse: Tensor, exact_output: Tensor, exact_lse: Tensor) -> str | None:
    if bool(output.isnan().all()):
        return "it writes nothing"
    if bool(output.isnan().any() | lse.isnan().any()):
        return (
            "results are NaN in places: it left them unwritten, or read memory behind a sequence's last key"
        )
    if not torch.equal(lse == -math.inf, exact_lse == -math.inf):
        return "the LSE is not -inf exactly where no key is seen"
    for what, x, exact in (("output", output, exact_output), ("LSE", lse, exact_lse)):
        x, exact = (y.float().nan_to_num(nan=math.inf, neginf=0.0) for y in (x, exact))
        allowed = _ERROR * (max(1.0, float(exact.abs().max())) if what == "output" else 1.0)
        error = float((x - exact).abs().max())
        if not error <= allowed:
            return f"the {what} is off by {error:.3g}, where {allowed:.3g} is rounding"
    return None
