"""What the Triton kernels refuse, and how they are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_batches import (  # noqa: F401
    BF16,
    CUDA,
    DECODE,
    DEVICE,
    F16,
    F32,
    MIXED,
    SINKS,
    SLOPES,
    Options,
    make_batch,
    poison,
    pytestmark,
    run,
    triton,
    zeros,
)

from attnbackend.kernels.triton import (
    cache_write,
    merge_attention_states,
    paged_attention,
    paged_decode_attention,
    unavailable_reason,
)
from attnbackend.kernels.triton.config import (
    tile_config,
)

# --- what is refused ---------------------------------------------------------------------

SPLITS_OF: dict[Any, dict[str, int]] = {paged_decode_attention: {"num_splits": 2}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"alibi_slopes": SLOPES[:3]}, "alibi_slopes"),
        ({"sinks": SINKS.double()}, "sinks"),
        ({"k_scale": torch.ones(3, device=DEVICE)}, "k_scale"),
        ({"v_scale": torch.ones(1, device=DEVICE, dtype=F16)}, "v_scale"),
        ({"lse": torch.zeros(9, 4, device=DEVICE, dtype=F16)}, "lse"),
    ],
)
def test_an_option_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    batch = make_batch(MIXED)
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch.tensors(torch.empty_like(batch.query)), scale=1.0, **change)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query", zeros(11, 4, 32, dtype=torch.float64), "query.dtype is torch.float64"),
        ("query", zeros(11, 3, 32), "query heads is 3"),
        ("query", zeros(11, 4, 36)[..., :36], "head size"),
        ("key_cache", zeros(3, 8, 2, 32), "value_cache.shape"),
        ("seq_lens", zeros(6, dtype=torch.int64), r"seq_lens\.dtype is torch\.int64"),
        ("query_start_loc", zeros(6, dtype=torch.int32), "query_start_loc is 6"),
        ("block_table", zeros(5, 3, dtype=torch.int32), "rows of block_table is 5"),
        ("block_table", zeros(6, 6, dtype=torch.int32)[:, ::2], "last stride of block_table is 2"),
        ("query_start_loc", zeros(7, 1, dtype=torch.int32), "query_start_loc.shape"),
        ("query", zeros(11, 4, 64)[..., ::2], "last stride of query is 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    batch = make_batch(MIXED)
    setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch.tensors(zeros(11, 4, 32)), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key_cache", "query_start_loc", "seq_lens", "block_table"])
def test_a_tensor_on_another_device_is_refused_by_name(name: str) -> None:
    batch = make_batch(DECODE)
    setattr(batch, name, getattr(batch, name).cpu())
    for kernel in (paged_attention, paged_decode_attention):
        with pytest.raises(ValueError, match=f"device of {name} is cpu; allowed: cuda:0"):
            run(kernel, batch, Options())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "k_scale", "lse", "workspace"])
def test_an_optional_tensor_on_another_device_is_refused_by_name(name: str) -> None:
    batch = make_batch(DECODE)
    output = torch.empty_like(batch.query)
    sizes = {"k_scale": (1,), "lse": batch.query.shape[:2], "workspace": (9999,)}
    given = {"num_splits": 2, name: torch.zeros(sizes.get(name, (4,)))}
    with pytest.raises(ValueError, match=f"device of {name} is cpu"):
        paged_decode_attention(*batch.tensors(output), scale=1.0, **given)


@pytest.mark.gpu
def test_writers_and_merges_refuse_another_device_by_name() -> None:
    new, cache = torch.zeros(3, 2, 32), torch.zeros(2, 16, 2, 32, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="device of slot_mapping is cpu"):
        cache_write(new.to(DEVICE), new.to(DEVICE), cache, cache, slots)
    with pytest.raises(ValueError, match="device is cpu"):
        cache_write(new, new, cache, cache, slots)
    state, lse = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="device of lse_b is cpu"):
        merge_attention_states(state, lse, state, lse.cpu(), state, lse)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
def test_a_launch_follows_its_tensors_to_a_device_that_is_not_current(kernel: Any) -> None:
    batch = make_batch(DECODE)
    right, _ = run(kernel, batch, Options(), **SPLITS_OF.get(kernel, {}))
    there = tuple(x.to("cuda:1") for x in batch.tensors(poison(tuple(right.shape), F16)))
    kernel(*there, scale=Options().scale, **SPLITS_OF.get(kernel, {}))
    assert torch.cuda.current_device() == 0
    assert torch.equal(there[3].cpu(), right.cpu())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_splits": 0}, "num_splits is 0"),
        ({"num_splits": 2, "workspace": zeros(10, dtype=F32)}, "workspace is .* 544 elements"),
        ({"num_splits": 2, "workspace": zeros(9999)}, "workspace"),
    ],
)
def test_splits_that_do_not_fit_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(paged_decode_attention, make_batch([(1, 2), (1, 2)]), Options(), **extra)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_row_of_two_tokens_in_a_decode_batch_does_not_pass_for_one(num_splits: int) -> None:
    batch = make_batch([(2, 20), (0, 0), (1, 9)])
    out, lse = run(paged_decode_attention, batch, Options(), num_splits=num_splits)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert not out[2].isnan().any()


def test_more_tokens_than_rows_is_not_a_decode_batch() -> None:
    with pytest.raises(ValueError, match="number of tokens is 3"):
        run(paged_decode_attention, make_batch([(2, 2), (1, 2)]), Options())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping"),
        ({"value": torch.zeros(3, 1, 32)}, "value.shape"),
        ({"key": torch.zeros(3, 2, 32, dtype=torch.float64)}, "key.dtype"),
        ({"k_scale": torch.ones(5)}, "k_scale"),
    ],
)
def test_a_cache_write_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    cache = torch.zeros(2, 2, 16, 2, 32, device=DEVICE)
    new = torch.zeros(3, 2, 32, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    arguments = {"key": new, "value": new, "key_cache": cache[:, 0], "value_cache": cache[:, 1],
                 "slot_mapping": slots, **{k: v.to(DEVICE) for k, v in change.items()}}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cache_write(**arguments)


def test_a_merge_that_does_not_fit_is_refused() -> None:
    x, lse = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"out_b\.shape"):
        merge_attention_states(x, lse, x[:1], lse, x, lse)
    with pytest.raises(ValueError, match="lse_b"):
        merge_attention_states(x, lse, x, lse.half(), x, lse)


# --- launches ----------------------------------------------------------------------------


def test_availability_gives_a_reason() -> None:
    assert unavailable_reason(DEVICE) is None
    assert "mps" in str(unavailable_reason("mps"))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "short", "decode"])
def test_tiles_are_powers_of_two_that_hold_the_group(kind: Any, dtype: torch.dtype) -> None:
    for group in (1, 3, 8, 24, 128):
        for size in (32, 80, 128, 192, 256):
            tile = tile_config(dtype, size, group, kind)
            for extent in (tile.block_m, tile.block_n):
                assert extent >= 16
                assert extent & (extent - 1) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="the interpreter compiles nothing")
def test_lengths_do_not_compile_anew() -> None:
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    for tokens, length in ((17, 33), (32, 48), (33, 160), (48, 161), (64, 75)):
        if tokens == 32:
            triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(str(info))
        try:
            run(paged_attention, make_batch([(tokens, tokens + length)]), Options())
            rows = [(1, length)] * tokens
            run(paged_decode_attention, make_batch(rows), Options(), num_splits=2)
        finally:
            if tokens != 32:
                triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []
