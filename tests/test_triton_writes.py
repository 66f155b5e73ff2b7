"""The Triton kernels that write caches and merge attention states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_batches import (  # noqa: F401
    BF16,
    DEVICE,
    E4M3,
    E5M2,
    F16,
    F32,
    FLOAT8,
    INF,
    NAN,
    Options,
    assert_close,
    dense_attention,
    make_cache,
    poison,
    pytestmark,
)

from attnbackend.kernels.triton import (
    cache_write,
    merge_attention_states,
)

# --- writing the cache -------------------------------------------------------------------


AWKWARD = [0.0, -0.0, 1.0, 1.0625, 1.1875, -1.3125, 447.0, 464.0, 1e4, -6e4, INF, -INF, NAN,
           2**-6, 2**-7, 2**-9, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 2**-14, 2**-16, 1.5 * 2**-16,
           2.5 * 2**-16, 2**-17, 1e-30, 57344.0, 61440.0, 3.3, -0.007, 0.1, 17.0, 19.0]  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None and x.dtype == dtype:
        return x
    x = x.float() if scale is None else x.float() / scale[:, None]
    if scale is not None or dtype in FLOAT8:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


@pytest.mark.parametrize("scale", [None, [1.0], [0.3, 7.0]], ids=str)
@pytest.mark.parametrize("cache_dtype", [F32, F16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_cache_write_stores_what_torch_would(
    dtype: torch.dtype, cache_dtype: torch.dtype, scale: Any
) -> None:
    rng = torch.Generator().manual_seed(1)
    key = torch.randn(4, 2, 32, generator=rng) * 20
    key[0] = torch.tensor(AWKWARD)
    key = key.to(DEVICE, dtype)
    scales = None if scale is None else torch.tensor(scale, dtype=F32, device=DEVICE)
    cache = make_cache("HND", 3, 16, 2, 32, cache_dtype)
    slots = torch.tensor([17, -1, 47, 0], device=DEVICE)
    before = cache.clone()
    cache_write(key, key * 0.5, cache[:, 0], cache[:, 1], slots, k_scale=scales, v_scale=scales)
    for token, slot in ((0, 17), (2, 47), (3, 0)):
        for part, new in ((0, key), (1, key * 0.5)):
            before[slot // 16, part, slot % 16] = stored(new[token], cache_dtype, scales)
    same = bits(cache) == bits(before)
    both_nan = (cache.float().isnan() & before.float().isnan()).contiguous()
    assert (same.view(*both_nan.shape, -1).all(-1) | both_nan).all()


@pytest.mark.parametrize("layout", ["NHD", "HND", "layers interleaved"])
def test_cache_write_of_unequal_head_sizes_and_strides(layout: str) -> None:
    cache = make_cache(layout, 3, 48, 3, 96, F16)
    k_BSHD, v_BSHD = cache[:, 0][..., :40], cache[:, 1]
    key = torch.randn(3, 5, 40, device=DEVICE, dtype=F16).transpose(0, 1)
    value = torch.randn(5, 3, 200, device=DEVICE, dtype=F16)[..., :96]
    slots = torch.tensor([143, -1, 0, 48, 95], device=DEVICE)
    cache_write(key, value, k_BSHD, v_BSHD, slots)
    written = torch.zeros(3, 48, dtype=torch.bool, device=DEVICE)
    for token, slot in ((0, 143), (2, 0), (3, 48), (4, 95)):
        written[slot // 48, slot % 48] = True
        assert torch.equal(k_BSHD[slot // 48, slot % 48], key[token])
        assert torch.equal(v_BSHD[slot // 48, slot % 48], value[token])
    assert cache[:, 0][..., 40:].isnan().all()
    assert k_BSHD[~written].isnan().all()
    assert v_BSHD[~written].isnan().all()


# --- merging states ----------------------------------------------------------------------


def merged(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = poison(tuple(out_a.shape), out_a.dtype), poison(tuple(lse_a.shape), F32)
    merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def test_merging_two_empty_states_is_empty() -> None:
    zeros = torch.zeros(1, 1, 2, device=DEVICE)
    empty = torch.full((1, 1), -INF, device=DEVICE)
    out, lse = merged(zeros, empty, zeros, empty)
    assert torch.equal(out, zeros)
    assert torch.equal(lse, empty)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rest", [0.0, NAN])
def test_the_empty_state_is_the_identity_bit_for_bit(dtype: torch.dtype, rest: float) -> None:
    x = torch.randn(3, 5, 40, device=DEVICE).to(dtype)
    x[0, 0, :2] = torch.tensor([-0.0, 1e-7])
    lse_x = torch.randn(3, 5, device=DEVICE) * 30
    nothing, empty = torch.full_like(x, rest), torch.full_like(lse_x, -INF)
    for states in ((x, lse_x, nothing, empty), (nothing, empty, x, lse_x)):
        out, lse = merged(*states)
        assert torch.equal(bits(out), bits(x))
        assert torch.equal(bits(lse), bits(lse_x))


def test_merge_of_known_weights() -> None:
    one, zero = torch.ones(1, 1, 8, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE)
    lse_a = torch.zeros(1, 1, device=DEVICE)
    out, lse = merged(one, lse_a, zero, torch.full_like(lse_a, math.log(3)))
    assert out.flatten().tolist() == pytest.approx([0.25] * 8)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("strided", ["a", "b", "both, and the result"])
def test_each_state_is_read_with_its_own_strides(strided: str) -> None:
    a, b = (torch.randn(2, 3, 128, device=DEVICE) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 3, device=DEVICE) for _ in range(2))
    right, right_lse = merged(a, lse_a, b, lse_b)
    padded = [torch.full((2, 3, 192), NAN, device=DEVICE)[..., :128].copy_(x) for x in (a, b)]
    turned = lse_a.t().contiguous().t()
    if strided == "a":
        out, lse = merged(padded[0], turned, b, lse_b)
    elif strided == "b":
        out, lse = merged(a, lse_a, padded[1], lse_b)
    else:
        out = torch.full((128, 2, 3), NAN, device=DEVICE).permute(1, 2, 0)
        lse = torch.full((3, 2), NAN, device=DEVICE).t()
        merge_attention_states(padded[0], turned, padded[1], lse_b, out, lse)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


def test_merge_of_two_halves_is_attention_over_all_keys() -> None:
    rng = torch.Generator().manual_seed(3)
    q = torch.randn(3, 4, 32, generator=rng, dtype=torch.float64).to(DEVICE)
    k, v = (torch.randn(20, 4, 32, generator=rng, dtype=torch.float64).to(DEVICE) for _ in "kv")
    options = Options(causal=False)
    whole, whole_lse = dense_attention(q, k, v, options)
    halves = [dense_attention(q, k[s], v[s], options) for s in (slice(7), slice(7, 20))]
    (out_a, lse_a), (out_b, lse_b) = [[x.float() for x in half] for half in halves]
    out, lse = merged(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, whole.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse.float(), rtol=1e-6, atol=1e-6)
