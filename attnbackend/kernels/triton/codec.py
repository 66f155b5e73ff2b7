"""Reading and writing of stored number formats inside kernels.

A tensor is "native" where Triton's own conversions are right for it. Elsewhere a kernel is
given the bits as integers and converts them itself, exactly: bfloat16 and float8 in the
interpreter (which truncates, or rounds ties up), and float8 on a GPU without instructions for
it (compute capability below 8.9).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

FLOAT8_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FINITE_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite values, as `torch.finfo(dtype).max` gives them."""

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _probe(count: tl.tensor) -> None:
    for _ in range(count):
        pass


INTERPRETED: bool = not isinstance(_probe, triton.JITFunction)
"""Whether this process's kernels run in the interpreter (decided when triton.jit ran)."""


@lru_cache(maxsize=1)
def interpreter_problem() -> str | None:
    """Why the interpreter cannot run a loop: that of triton 3.6 does not, with numpy 2.4."""
    try:
        _probe[(1,)](1)
    except triton.runtime.errors.InterpreterError as error:
        versions = f"triton {triton.__version__} with numpy {np.__version__}"
        return f"the interpreter of {versions} fails: {error}"
    return None


@lru_cache(maxsize=64)
def stored_format(dtype: torch.dtype, device: torch.device) -> str:
    """ "native", or the name of the format whose bits the kernels convert themselves."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return "bf16"
    if dtype in FLOAT8_FORMATS and not _has_float8(device):
        return FLOAT8_FORMATS[dtype]
    return "native"


def _has_float8(device: torch.device) -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


def kernel_view(tensor: torch.Tensor, fmt: str) -> torch.Tensor:
    """The tensor as a kernel takes it: itself, or its bits as integers of the same size."""
    if fmt == "native":
        return tensor
    return tensor.view(torch.int16 if fmt == "bf16" else torch.uint8)


@lru_cache(maxsize=64)
def product_dtype(query: torch.dtype, key: torch.dtype, value: torch.dtype) -> torch.dtype:
    """Dtype of the matrix products: the query's, or float32 where 16 bits would lose something.

    float8 values are exact in every query dtype, and are converted to float16 in one instruction: a
    bfloat16 query is fitted to its range by `load_query`. float16 and bfloat16 do not hold each other.
    """
    dtypes = {query} | {d for d in (key, value) if d not in FLOAT8_FORMATS}
    if len(dtypes) > 1 or (INTERPRETED and query == torch.bfloat16):
        return torch.float32
    only_float8 = key in FLOAT8_FORMATS and value in FLOAT8_FORMATS
    return torch.float16 if only_float8 and query == torch.bfloat16 else query


@triton.jit
def decode(x: tl.tensor, FMT: tl.constexpr) -> tl.tensor:
    """Stored values as floating point: unchanged where native, else exactly converted."""
    if FMT == "bf16":
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if FMT == "e5m2":
        # The upper half of a float16: same exponent.
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FMT == "e4m3":
        # Shifted into a float16's fields the value is 2^8 too small (biases 7 and 15).
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return x


@triton.jit
def decode_pairs(x: tl.tensor, FLOAT8: tl.constexpr) -> tl.tensor:
    """(low, high) float16 values of the two float8 bytes in each int16. GPUs of compute capability 8.9.

    Matrix products want values of neighbouring keys in one register, and nothing transposes single
    bytes: loaded as 16 bits, two columns at a time, they are transposed on their way from shared memory.
    """
    if FLOAT8 == tl.float8e5:  # noqa: SIM300 (a constexpr compares from the left)
        low, high = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted; .reg .b16 lows, highs;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lows, highs}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def encode(x: tl.tensor, DTYPE: tl.constexpr, FMT: tl.constexpr) -> tl.tensor:
    """float32 values in a stored format, rounded to nearest even, as torch's `.to` does.

    DTYPE is the element type of the destination pointer. float8 formats do not saturate here:
    clamp first.
    """
    if FMT == "bf16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        rounded = tl.where(x != x, tl.full(x.shape, 0x7FC0, tl.uint16), rounded)
        return rounded.to(tl.int16, bitcast=True)
    if FMT == "e5m2":
        return _encode_float8(x, 2, 15)
    if FMT == "e4m3":
        return _encode_float8(x, 3, 7)
    return x.to(DTYPE)


@triton.jit
def _encode_float8(x: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    DROP: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (DROP - 1)) - 1) + ((size >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    # Adding 2^(23 - k) leaves a float32 with the unit 2^-k, that of the format's subnormals,
    # so the addition itself rounds to them; the low bits then count units.
    MAGIC_EXPONENT: tl.constexpr = 23 + 1 - BIAS - MANTISSA
    MAGIC_BITS: tl.constexpr = (127 + MAGIC_EXPONENT) << 23
    magic = tl.full(x.shape, MAGIC_BITS, tl.uint32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - MAGIC_BITS
    code = tl.where(size < ((127 + 1 - BIAS) << 23), small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)
