"""What the attention wrappers hand to their kernels, derived once from the call's arguments.

What does not change from step to step (heads, dtypes, options) is validated and laid out once
and cached; each call adds its tensors, their strides and the sizes of the batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from . import checks
from .bounds import MAX_REACH
from .codec import (
    FINITE_MAX,
    FLOAT8_FORMATS,
    INTERPRETED,
    TRITON_DTYPE,
    kernel_view,
    product_dtype,
    stored_format,
)
from .config import padded_size
from .quantize import output_group

DEVICE_CHECKED = (
    "key_cache",
    "value_cache",
    "output",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "alibi_slopes",
    "sinks",
    "k_scale",
    "v_scale",
    "lse",
    "bidirectional_ranges",
    "output_scale",
    "output_block_scale",
)
_HERE: AbstractContextManager[Any] = nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one: Triton launches on that, whatever it is given."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


@lru_cache(maxsize=64)
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it waits for is done, as from Hopper on."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Plan(NamedTuple):
    """The part of a launch that a layer repeats at each step."""

    product: torch.dtype
    """Dtype of the matrix products."""
    group: int
    """Query heads of one kv head."""
    width: int
    """The larger of the head sizes of K and V."""
    formats: tuple[str, ...] | None
    """How query, caches, output and sinks are stored; None where all are native."""
    constants: dict[str, Any]
    cache_dtypes: tuple[torch.dtype, torch.dtype]
    """Of K and V."""
    has_float8_values: bool
    """Values are float8 that the GPU converts to the products' float16 itself."""


class Launch(NamedTuple):
    """Arguments that the prefill and the decode kernel have in common."""

    plan: Plan
    tokens: int
    rows: int
    heads: int
    kv_heads: int
    value_size: int
    max_keys: int
    """What the block table has room for: its width times the block size."""
    tensors: tuple[Any, ...]
    """query, key_cache, value_cache, output, lse, query_start_loc, seq_lens, block_table,
    alibi_slopes, sinks, k_scale, v_scale, bidirectional_ranges, output_scale, output_block_scale"""
    numbers: tuple[Any, ...]
    """scale, soft_cap, reach, number of ranges, then the strides, that of output_block_scale last"""

    @property
    def ranges(self) -> torch.Tensor | None:
        return self.tensors[12]

    @property
    def reach(self) -> tuple[int, int]:
        """Reach of the mask, and ranges of a row."""
        return self.numbers[2], self.numbers[3]

    @property
    def has_float8_keys(self) -> bool:
        return self.plan.cache_dtypes[0] in FLOAT8_FORMATS

    @property
    def is_alike(self) -> bool:
        """Whether blocks and slots of K and V have the same strides."""
        return bool(self.numbers[6:8] == self.numbers[9:11])

    @property
    def is_signed(self) -> bool:
        """Whether the scale of the scores may be below 0: that of the keys is known on the device alone."""
        return self.numbers[0] < 0 or self.tensors[10] is not None

    def reads_pairs(self, block_m: int) -> bool:
        """Whether values are read as pairs of columns: see `decode_pairs`.

        Tiles of 64 rows take their values from shared memory, where there is nothing to transpose.
        """
        if not self.plan.has_float8_values or block_m >= 64:
            return False
        places = (self.value_size, *self.numbers[9:12], self.tensors[2].data_ptr())
        return not any(place % 2 for place in places)

    @property
    def out_scales(self) -> tuple[Any, Any, int]:
        """output_scale, output_block_scale and its stride."""
        return *self.tensors[13:15], self.numbers[-1]

    @property
    def out_strides(self) -> tuple[int, ...]:
        """Of output, then of the LSE: token and head."""
        return self.numbers[12:16]


class OwnTokens(NamedTuple):
    """Keys and values of the new tokens, as the kernel takes them."""

    key: torch.Tensor | None
    value: torch.Tensor | None
    strides: tuple[int, ...]
    """Token and head of key, then of value."""

    @property
    def is_alike(self) -> bool:
        return self.strides[0] == self.strides[2]


NO_OWN_TOKENS = OwnTokens(None, None, (0, 0, 0, 0))


def own_tokens(where: str, launch: Launch, key: torch.Tensor, value: torch.Tensor) -> OwnTokens:
    """`NO_OWN_TOKENS` where the cache holds them in another form.

    ValueError where the shapes are not of the tokens' own key and value.
    """
    constants = launch.plan.constants
    for name, tensor, width in (("key", key, constants["D"]), ("value", value, constants["DV"])):
        shape = (launch.tokens, launch.kv_heads, width)
        if tensor.shape != shape:
            checks.fail(where, f"{name}.shape", tuple(tensor.shape), str(shape))
    in_form = (key.dtype, value.dtype) == launch.plan.cache_dtypes
    if constants["PRECISE"] or not in_form or key.stride(-1) != 1 or value.stride(-1) != 1:
        return NO_OWN_TOKENS
    checks.check_same_device(where, launch.tensors[0], ("key", "value"), (key, value))
    views = kernel_view(key, constants["K_FMT"]), kernel_view(value, constants["V_FMT"])
    return OwnTokens(*views, (*key.stride()[:2], *value.stride()[:2]))


@lru_cache(maxsize=4096)
def make_plan(
    where: str,
    heads: int,
    head_size: int,
    key_shape: torch.Size,
    value_shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    sink_dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    logits_soft_cap: float,
    out_group: int,
) -> Plan:
    """Validate and lay out what a layer repeats. `dtypes`: query, key, value cache, output.

    Shapes [blocks, block size, kv heads, head size], or [kv heads, head size] with no cache.
    """
    checks.check_dtypes(where, *dtypes)
    checks.check_heads(where, heads, head_size, key_shape, value_shape)
    checks.check_masks(where, sliding_window, attention_chunk_size, logits_soft_cap)
    kv_heads, value_size = value_shape[-2:]
    paged = len(value_shape) == 4
    product = product_dtype(*dtypes[:3])
    formats = tuple(stored_format(dtype, device) for dtype in (*dtypes, sink_dtype))
    constants = {
        "CAUSAL": bool(causal),
        "REACH": _reach_name(sliding_window, attention_chunk_size, two_sided=not (causal or paged)),
        "HAS_CAP": logits_soft_cap > 0,
        "GROUP": heads // kv_heads,
        "S": value_shape[1] if paged else 0,
        "D": head_size,
        "DV": value_size,
        "D_PAD": padded_size(head_size),
        "DV_PAD": padded_size(value_size),
        "DOT": TRITON_DTYPE[product],
        "PRECISE": dtypes[0] == torch.float32,
        "OUT_LIMIT": FINITE_MAX.get(dtypes[3], 0.0),
        "OUT_GROUP": out_group,
        **dict(zip(("Q_FMT", "K_FMT", "V_FMT", "OUT_FMT", "SINK_FMT"), formats, strict=True)),
    }
    unusual = formats if set(formats) != {"native"} else None
    width = max(head_size, value_size)
    by_pairs = product == torch.float16 and dtypes[2] in FLOAT8_FORMATS and formats[2] == "native"
    return Plan(product, heads // kv_heads, width, unusual, constants, dtypes[1:3], by_pairs)


def _reach_name(window: int | None, chunk: int | None, *, two_sided: bool) -> str:
    """REACH of `bounds`."""
    if window is not None:
        return "both sides" if two_sided else "window"
    return "all" if chunk is None else "chunk"


def prepare(
    where: str, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor | None, scale: float,
    causal: bool, sliding_window: int | None, attention_chunk_size: int | None, logits_soft_cap: float,
    alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None, bidirectional_ranges: torch.Tensor | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, lse: torch.Tensor | None,
    output_scale: torch.Tensor | None, output_block_scale: torch.Tensor | None,
    key_start_loc: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """Validate a call and lay out its arguments. ValueError for what the kernels cannot do.

    block_table None: key_cache and value_cache are the tokens' own key and value [T, Hk, D], or with
    key_start_loc, which then takes the table's place, keys and values of the rows.
    """
    checks.check_device(where, query)
    checks.check_same_device(
        where, query, DEVICE_CHECKED,
        (key_cache, value_cache, output, query_start_loc, seq_lens, block_table,
         alibi_slopes, sinks, k_scale, v_scale, lse, bidirectional_ranges, output_scale,
         output_block_scale),
    )  # fmt: skip
    q, k, v, out, table_row = _checked_strides(
        where, query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table
    )
    tokens, heads, head_size = query.shape
    key_shape, value_shape = key_cache.shape, value_cache.shape
    if key_start_loc is not None:
        checks.check_key_starts(where, key_start_loc, seq_lens, block_table)
    if block_table is None:
        checks.check_own_keys(where, tokens if key_start_loc is None else None, key_shape, value_shape)
        key_shape, value_shape = key_shape[1:], value_shape[1:]
    plan = make_plan(
        where, heads, head_size, key_shape, value_shape,
        (query.dtype, key_cache.dtype, value_cache.dtype, output.dtype),
        torch.float32 if sinks is None else sinks.dtype,
        query.device, causal, sliding_window, attention_chunk_size, logits_soft_cap,
        output_group(where, output, output_scale, output_block_scale),
    )  # fmt: skip
    kv_heads, value_size = value_shape[-2:]
    if output.shape != (shape := (tokens, heads, value_size)):
        checks.fail(where, "output.shape", tuple(output.shape), str(shape))
    checks.check_metadata(where, query_start_loc, seq_lens, block_table)
    checks.check_extras(where, tokens, heads, alibi_slopes, sinks, lse)
    rows = seq_lens.shape[0]
    num_ranges = checks.count_ranges(where, bidirectional_ranges, rows, causal and block_table is not None)
    numbers = (
        float(scale), float(logits_soft_cap),  # ints would become compile-time constants
        min(sliding_window or attention_chunk_size or 0, MAX_REACH), num_ranges, *q, *k, *v, *out,
        *((0, 0) if lse is None else lse.stride()), table_row,
        checks.scale_stride(where, "k_scale", k_scale, kv_heads),
        checks.scale_stride(where, "v_scale", v_scale, kv_heads),
        0 if output_block_scale is None else output_block_scale.stride(0),
    )  # fmt: skip
    named_tensors = (query, key_cache, value_cache, output, sinks)
    if plan.formats is not None:
        named_tensors = _views(named_tensors, plan.formats)
    *four, sinks = named_tensors
    metadata = query_start_loc, seq_lens, block_table if key_start_loc is None else key_start_loc
    tensors = (
        *four, lse, *metadata, alibi_slopes, sinks, k_scale, v_scale, bidirectional_ranges, output_scale,
        output_block_scale,
    )  # fmt: skip
    max_keys = key_cache.shape[0] if block_table is None else block_table.shape[1] * value_shape[1]
    return Launch(plan, tokens, rows, heads, kv_heads, value_size, max_keys, tensors, numbers)


def _checked_strides(
    where: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """All strides but the last of query, caches and output, and the table's; blocks have 0 with no cache.

    ValueError unless each tensor has the dimensions of its role, and a last stride of 1.
    """
    q, k, v, out = query.stride(), key_cache.stride(), value_cache.stride(), output.stride()
    lens, starts = seq_lens.stride(), query_start_loc.stride()
    table: tuple[int, ...] = (0, 1) if block_table is None else block_table.stride()
    if block_table is None:
        k, v = (0, *k), (0, *v)
    dims = len(q), len(k), len(v), len(out), len(table), len(lens), len(starts)
    last = q[-1:], k[-1:], v[-1:], out[-1:], table[-1:], lens[-1:], starts[-1:]
    if dims != (3, 4, 4, 3, 2, 1, 1) or any(stride != (1,) for stride in last):
        named = {
            "query": query, "key_cache": key_cache, "value_cache": value_cache, "output": output,
            "seq_lens": seq_lens, "query_start_loc": query_start_loc,
        } | ({} if block_table is None else {"block_table": block_table})  # fmt: skip
        checks.check_dimensions(where, named, 3 if block_table is None else 4)
    return q[:2], k[:3], v[:3], out[:2], table[0]


def _views(tensors: tuple[Any, ...], formats: tuple[str, ...]) -> Any:
    pairs = zip(tensors, formats, strict=True)
    return tuple(t if t is None else kernel_view(t, fmt) for t, fmt in pairs)
