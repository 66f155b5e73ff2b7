"""Latent attention misused: what is wrong, its value, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_op_cases import mla_case

import attnbackend
from attnbackend import (
    AttentionCGSupport,
    AttentionParams,
    AttentionSelectorConfig,
    FullAttentionSpec,
    MLAAttentionSpec,
    MLADims,
    kv_cache_geometry,
    resolve_backend,
    select_backend,
    set_config,
)
from attnbackend.backends.mla.common import MLACommonMetadataBuilder
from attnbackend.backends.mla.prefill import MLA_PREFILLS, MLAPrefillConfig, select_mla_prefill
from attnbackend.backends.mla.torch_mla import TorchMLASparseImpl
from attnbackend.kv_cache import AttentionSpec
from attnbackend.mla_cache import mla_row_width
from attnbackend.ops import mla_attention, mla_kv_cache_update, mla_mixed_attention
from attnbackend.testing import AttentionCase, make_batch, op_kwargs, op_positional
from attnbackend.testing.mla_batches import (
    MLABatch,
    make_mla_batch,
    mixed_arguments,
    mqa_arguments,
    update_arguments,
)


def batch(**changes: Any) -> MLABatch:
    return make_mla_batch(mla_case("plain", "decode", **changes))


def mqa(made: MLABatch, **changes: Any) -> None:
    names = (
        "query_latent", "query_rope", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table",
    )  # fmt: skip
    positional, keyword = mqa_arguments(made)
    given = dict(zip(names, positional, strict=True))
    given |= {name: changes.pop(name) for name in names if name in changes}
    mla_attention(*given.values(), **(keyword | changes))


def mixed(made: MLABatch, **changes: Any) -> None:
    names = (
        "query", "kv_c", "k_pe", "kv_cache", "kv_b_weight", "output", "query_start_loc", "seq_lens",
        "block_table",
    )  # fmt: skip
    positional, keyword = mixed_arguments(made)
    given = dict(zip(names, positional, strict=True)) | changes
    mla_mixed_attention(*given.values(), **keyword)


def update(made: MLABatch, **changes: Any) -> None:
    names = ("kv_c", "k_pe", "kv_cache", "slot_mapping")
    positional, keyword = update_arguments(made)
    given = dict(zip(names, positional, strict=True))
    given |= {name: changes.pop(name) for name in names if name in changes}
    mla_kv_cache_update(*given.values(), **(keyword | changes))


def _bits(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


FAULTS: dict[str, tuple[Callable[[MLABatch], Any], str]] = {
    "a cache of the wrong width": (
        lambda b: mqa(b, kv_cache=torch.zeros(9, 16, 96)),
        r"shape of kv_cache is \(9, 16, 96\); expected \(num_blocks, block_size, 80\): kv_lora_rank \+",
    ),
    "a cache of keys and values": (
        lambda b: mqa(b, kv_cache=torch.zeros(9, 2, 16, 1, 80)), r"shape of kv_cache is \(9, 2, 16, 1, 80\)",
    ),
    "a query of another rank than the output": (
        lambda b: mqa(b, output=torch.zeros(3, 4, 32)),
        r"shape of output is \(3, 4, 32\); expected \(T, 4, 64\)",
    ),
    "a rotated part of fewer heads": (
        lambda b: mqa(b, query_rope=torch.zeros(3, 2, 16)), r"shape of query_rope is \(3, 2, 16\)",
    ),
    "heads and elements in one dimension": (
        lambda b: mqa(b, query_latent=torch.zeros(3, 256)),
        r"shape of query_latent is \(3, 256\); expected \(num_tokens, num_heads, kv_lora_rank\)",
    ),
    "a latent of another rank than the weight": (
        lambda b: mixed(b, kv_b_weight=torch.zeros(4, 56, 32)),
        r"shape of kv_b_weight is \(4, 56, 32\); expected \(4, qk_nope_head_dim \+ v_head_dim, 64\)",
    ),
    "a weight that leaves no values": (
        lambda b: mixed(b, kv_b_weight=torch.zeros(4, 32, 64)), "more rows a head in kv_b_weight than what",
    ),
    "an output as wide as the keys": (
        lambda b: mixed(b, output=torch.zeros(3, 4, 48)),
        r"shape of output is \(3, 4, 48\); expected \(T, 4, 24\)",
    ),
    "rows of fewer tokens": (
        lambda b: mixed(b, k_pe=torch.zeros(2, 16)), "rows of k_pe is 2; expected 3, as query",
    ),
    "a scale for a cache that has none": (
        lambda b: mqa(b, k_scale=torch.ones(1)),
        "k_scale is given; expected None, since kv_cache_dtype='auto'",
    ),
    "a packed cache of other sizes": (
        lambda b: mqa(b, kv_cache=_bits(9, 16, 656), kv_cache_dtype="fp8_ds_mla"),
        r"head_size=80 with kv_cache_dtype='fp8_ds_mla'; its rows hold a latent of 512",
    ),
    "a write of another width": (
        lambda b: update(b, kv_c=torch.zeros(3, 60)), r"expected \(num_blocks, block_size, 76\)",
    ),
    "32-bit slots": (
        lambda b: update(b, slot_mapping=torch.zeros(3, dtype=torch.int32)),
        "dtype of slot_mapping is torch.int32",
    ),
    "positions in 64 bits": (
        lambda b: mqa(b, topk_indices=torch.zeros(3, 4, dtype=torch.int64)),
        "dtype of topk_indices is torch.int64",
    ),
    "an infinite factor": (lambda b: mqa(b, scale=float("inf")), "scale is inf; expected a finite"),
    "lengths with gaps": (
        lambda b: mqa(b, seq_lens=torch.stack([b.seq_lens] * 2, -1)[:, 0]),
        "last stride of seq_lens is 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_call_says_what_is_wrong(what: str) -> None:
    call, message = FAULTS[what]
    with pytest.raises(ValueError, match=message):
        call(batch())


def test_a_latent_backend_is_refused_for_dense_attention() -> None:
    made = make_batch(AttentionCase(query_lens=(1,), context_lens=(5,)))
    with set_config(backend="TORCH_MLA"), pytest.raises(ValueError, match=r"use_mla=False \(allowed: True"):
        attnbackend.attention(*op_positional(made), **op_kwargs(made))


def test_a_dense_backend_is_refused_for_latent_attention() -> None:
    with set_config(backend="TORCH_SDPA"), pytest.raises(ValueError, match=r"use_mla=True \(allowed: False"):
        mqa(batch())


def test_selected_tokens_ask_for_a_sparse_backend_and_the_reverse() -> None:
    for name, top_k, reason in (
        ("TORCH_MLA", 4, "use_sparse=True"),
        ("TORCH_MLA_SPARSE", None, "use_sparse=False"),
    ):
        with set_config(backend=name), pytest.raises(ValueError, match=reason):
            mqa(batch(top_k=top_k))


def test_a_sparse_implementation_has_no_attention_to_prompts() -> None:
    dims = MLADims(kv_lora_rank=64, qk_rope_head_dim=16)
    params = AttentionParams(
        num_heads=4, num_kv_heads=1, head_size=80, dtype=torch.float32, kv_cache_dtype="auto", block_size=16,
        device_type="cpu", scale=1.0, mla=dims,
    )  # fmt: skip
    with pytest.raises(
        TypeError, match=r"has no forward_mha\(\): a sparse latent backend.*forward_mqa with topk"
    ):
        TorchMLASparseImpl(params).forward_mha()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"has_alibi": True}, "has_alibi=True (allowed: False"),
        ({"sliding_window": 128}, "sliding_window=128 (allowed: None"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 (allowed: 0.0"),
        ({"causal": False}, "causal=False (allowed: True"),
        ({"kv_lora_rank": 576}, "kv_lora_rank=576 (allowed: 1 to 575, a part of head_size)"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 (allowed: 1: all heads read one latent)"),
    ],
)
def test_what_latent_attention_never_has_is_refused_when_a_backend_is_selected(
    asked: Any, reason: str
) -> None:
    fields: dict[str, Any] = {
        "device_type": "cpu", "head_size": 576, "kv_lora_rank": 512, "num_heads": 16, "num_kv_heads": 1,
        "dtype": torch.float32, "use_mla": True,
    }  # fmt: skip
    assert select_backend(AttentionSelectorConfig.dense(**fields)).backend.is_mla
    with pytest.raises(ValueError, match="no attention backend can serve") as refused:
        select_backend(AttentionSelectorConfig.dense(**(fields | asked)))
    assert f"TORCH_MLA: {reason}" in str(refused.value)


def test_in_debug_mode_rows_outside_of_the_cache_are_found() -> None:
    made = batch()
    made.block_table[1, 0] = 99
    with set_config(debug=True), pytest.raises(ValueError, match=r"block_table\[1, 0\] is 99; expected 0 to"):
        mqa(made)
    made = batch()
    made.slot_mapping[2] = 10_000
    with set_config(debug=True), pytest.raises(ValueError, match=r"slot_mapping\[2\] is 10000; expected -1"):
        update(made)


@pytest.mark.parametrize(
    ("dtype", "name", "width", "page_bytes"),
    [
        (torch.bfloat16, "auto", 576, 64 * 576 * 2),
        (torch.bfloat16, "fp8", 576, 64 * 576),
        (torch.bfloat16, "fp8_ds_mla", 656, 64 * 656),
    ],
)
def test_shape_and_page_bytes_follow_from_the_row_s_width(
    dtype: torch.dtype, name: str, width: int, page_bytes: int
) -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=dtype, kv_cache_dtype=name)
    geometry = kv_cache_geometry(resolve_backend("TORCH_MLA"), spec, 10)
    assert mla_row_width(576, name) == width
    assert geometry.shape == (10, 64, width)
    assert geometry.page_size_bytes == page_bytes


def prefill_config() -> MLAPrefillConfig:
    return MLAPrefillConfig(
        device_type="cpu", compute_capability=None, num_heads=16, qk_head_dim=192, v_head_dim=128,
        dtype=torch.float32,
    )  # fmt: skip


def test_the_library_for_prompts_is_chosen_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_mla_prefill(prefill_config()).name in MLA_PREFILLS
    with set_config(mla_prefill="TORCH"):
        assert select_mla_prefill(prefill_config()).name == "TORCH"
    monkeypatch.setenv("ATTNBACKEND_MLA_PREFILL", "torch")
    assert select_mla_prefill(prefill_config()).name == "TORCH"


def test_an_unknown_library_for_prompts_and_one_that_cannot_serve_are_refused() -> None:
    with (
        set_config(mla_prefill="CUDNN"),
        pytest.raises(ValueError, match=r"'CUDNN' is unknown; allowed: FLASH_ATTN"),
    ):
        select_mla_prefill(prefill_config())
    with (
        set_config(mla_prefill="FLASH_ATTN"),
        pytest.raises(ValueError, match=r"(?s)FLASH_ATTN: unavailable|device_type"),
    ):
        select_mla_prefill(prefill_config())


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_workspace_without_a_token_is_refused(tokens: int) -> None:
    with (
        set_config(mla_context_tokens=tokens),
        pytest.raises(ValueError, match=rf"mla_context_tokens={tokens} "),
    ):
        mixed(make_mla_batch(mla_case("plain")))


def test_in_debug_mode_a_position_that_is_selected_twice_is_found() -> None:
    made = batch(top_k=4)
    made.topk_indices[1] = torch.tensor([7, -1, 3, -1])
    with set_config(debug=True):
        mqa(made)
    made.topk_indices[2] = torch.tensor([3, 7, 1, 3])
    with (
        set_config(debug=True),
        pytest.raises(ValueError, match=r"topk_indices\[2\] is 3 twice; expected each"),
    ):
        mqa(made)


@pytest.mark.parametrize(
    ("starts_q", "starts_k", "message"),
    [
        ((0, 5), (0, 9), r"cu_seqlens_k\[-1\] is 9; expected at most 5, the rows of key"),
        ((0, 9), (0, 5), r"cu_seqlens_q\[-1\] is 9; expected at most 5, the rows of query"),
        ((0, 3, 2), (0, 3, 5), r"cu_seqlens_q\[2\] is 2; expected no less than"),
        ((0, 5), (1, 5), r"cu_seqlens_k\[0\] is 1; expected 0"),
    ],
)
def test_in_debug_mode_sequences_outside_of_their_rows_are_found(
    starts_q: tuple[int, ...], starts_k: tuple[int, ...], message: str
) -> None:
    resolve_backend("TORCH_MLA")
    starts = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    query, value = torch.zeros(5, 2, 24), torch.zeros(5, 2, 16)
    with set_config(debug=True), pytest.raises(ValueError, match=message):
        torch.ops.attnbackend.torch_mla_forward_mha(query, query, value, value.clone(), *starts, scale=0.2)


def test_a_builder_that_cuts_prompts_on_the_host_cannot_claim_graphs_of_any_batch() -> None:
    with pytest.raises(
        TypeError, match=r"Bold claims cudagraph_support=ALWAYS with reorder_batch_threshold=1:"
    ):

        class Bold(MLACommonMetadataBuilder):
            cudagraph_support = AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(
    ("name", "spec"), [("TORCH_MLA", FullAttentionSpec), ("TORCH_SDPA", MLAAttentionSpec)]
)
def test_a_cache_of_the_other_kind_of_attention_is_refused(name: str, spec: type[AttentionSpec]) -> None:
    kept = spec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=rf"{name} keeps .* and {spec.__name__} is of .*; take a backend with"
    ):
        kv_cache_geometry(resolve_backend(name), kept, 4)
