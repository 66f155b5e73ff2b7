"""Whether the C++ kernels build here and give a right answer."""

from __future__ import annotations

from functools import cache

import torch

from attnbackend.kernels.cpu._attention import paged_attention
from attnbackend.kernels.cpu._build import cached_library
from attnbackend.kernels.cpu._cache_write import cache_write


def _wrong_result() -> str | None:
    """Runs both kernels on one token, whose output is its own value, through a float8 cache."""
    cache_B2SHD = torch.full((2, 2, 4, 1, 32), float("nan")).to(torch.float8_e4m3fn)
    key_cache, value_cache = cache_B2SHD[:, 0], cache_B2SHD[:, 1]
    value_THD = torch.linspace(-4, 4, 32).to(torch.float8_e4m3fn).float().view(1, 1, 32)
    output_THD = torch.full_like(value_THD, float("nan"))
    cache_write(value_THD, value_THD, key_cache, value_cache, torch.tensor([4]))
    starts, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    paged_attention(value_THD, key_cache, value_cache, output_THD, starts, one, one.view(1, 1), scale=1.0)
    if torch.equal(output_THD, value_THD):
        return None
    return f"a probe of one token gave {output_THD.flatten()[:4].tolist()}..., not its own value"


@cache
def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, or None: they were built, run once and were right.

    Reasons are: not Linux or macOS, no compiler, a failed build (with the end of the compiler's
    message), a library that does not load, a wrong result. Found out once a process.
    """
    library = cached_library()
    with torch.device("cpu"):  # whatever the default device is
        return library if isinstance(library, str) else _wrong_result()
