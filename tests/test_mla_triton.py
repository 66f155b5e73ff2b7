"""TRITON_MLA, TRITON_MLA_SPARSE and the TRITON library for prompts, through their ops."""

from __future__ import annotations

import pytest
import torch
from mla_op_cases import DEVICE, mla_case, mla_op, require_mla

from attnbackend import AttentionCGSupport, resolve_backend, set_config
from attnbackend.testing import assert_within_rule
from attnbackend.testing.conformance import check_backend
from attnbackend.testing.mla_batches import (
    expected_mla_cache,
    make_mla_batch,
    mixed_arguments,
    mqa_arguments,
    update_arguments,
)
from attnbackend.testing.mla_judgement import assert_mixed_within_rule, assert_mqa_within_rule
from attnbackend.testing.reference_mla import plain_torch_mla, reference_mla

MLA, SPARSE = "TRITON_MLA", "TRITON_MLA_SPARSE"
CASES = [
    ("plain", "mixed"),
    ("no_lse", "decode"),
    ("heads_of_20", "uniform_of_four"),
    ("scale", "prompts_first"),
    ("layers_interleaved", "padded"),
    ("strided_tensors", "padded_decode"),
    ("block_size_48", "prompt_without_a_place"),
    ("fp8_e4m3", "graph_padding_requests"),
    ("fp8_e5m2", "empty_row_first"),
    ("packed", "decode"),
]


def made_for(backend: str, feature: str, batch: str, **changes: object):  # type: ignore[no-untyped-def]
    case = mla_case(feature, batch, **changes)
    require_mla(backend, case.dtype, use_sparse=backend == SPARSE)
    return make_mla_batch(case, DEVICE)


@pytest.mark.parametrize(("feature", "batch"), CASES)
def test_queries_on_latents_are_right(feature: str, batch: str) -> None:
    made = made_for(MLA, feature, batch)
    positional, keyword = mqa_arguments(made)
    mla_op(MLA, "forward_mqa")(*positional, **keyword)
    assert_mqa_within_rule(made)


@pytest.mark.parametrize(
    ("feature", "batch"), [("plain", "mixed"), ("packed", "decode"), ("fp8_e4m3", "padded")]
)
def test_selected_tokens_alone_are_seen(feature: str, batch: str) -> None:
    made = made_for(SPARSE, feature, batch, top_k=8)
    positional, keyword = mqa_arguments(made)
    mla_op(SPARSE, "forward_mqa")(*positional, **keyword)
    assert_mqa_within_rule(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_whole_steps_are_right(dtype: torch.dtype) -> None:
    """A prompt of 17 tokens with a context in chunks beside rows on the latent cache."""
    made = made_for(MLA, "plain", "mixed", dtype=dtype)
    positional, keyword = mixed_arguments(made)
    with set_config(mla_context_tokens=32, mla_prefill="TRITON"):
        mla_op(MLA, "forward_mixed")(*positional, **keyword)
    assert_mixed_within_rule(made)


@pytest.mark.parametrize("feature", ["plain", "layers_interleaved", "fp8_e4m3", "packed"])
def test_cache_writes_leave_the_right_bits(feature: str) -> None:
    made = made_for(MLA, feature, "padded", new_tokens_written=False)
    right = expected_mla_cache(made)
    positional, keyword = update_arguments(made)
    mla_op(MLA, "mla_kv_cache_update")(*positional, **keyword)
    assert torch.equal(*(x.cpu().contiguous().view(torch.uint8) for x in (made.kv_cache, right)))


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_with_keys_of_their_own_are_right(causal: bool) -> None:
    """Sequences without queries, without keys, with fewer keys than queries, and padding behind the last."""
    require_mla(MLA)
    generator = torch.Generator().manual_seed(0)
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 3, 3, 8, 12], [0, 7, 9, 9, 11])
    )
    query, key = (torch.randn(n, 4, 48, generator=generator).to(DEVICE) for n in (14, 11))
    value = torch.randn(11, 4, 56, generator=generator).to(DEVICE)[..., 32:]
    output, lse = (
        torch.full((14, 4, 24), torch.nan, device=DEVICE),
        torch.full((14, 4), torch.nan, device=DEVICE),
    )
    resolve_backend(MLA)
    with set_config(mla_prefill="TRITON"):
        torch.ops.attnbackend.triton_mla_forward_mha(
            query, key, value, output, cu_q, cu_k, scale=0.2, lse=lse, causal=causal
        )
    plain, exact = (
        attend.mha(query, key, value, cu_q, cu_k, scale=0.2, causal=causal)
        for attend in (plain_torch_mla, reference_mla)
    )
    for what, got, e, p in zip(("output", "lse"), (output, lse), exact, plain, strict=True):
        assert_within_rule(got, e, p, what=what)


@pytest.mark.parametrize(
    ("backend", "role", "arguments"),
    [
        (MLA, "forward_mqa", mqa_arguments),
        (SPARSE, "forward_mqa", mqa_arguments),
        (MLA, "mla_kv_cache_update", update_arguments),
    ],
)
def test_opcheck(backend, role, arguments) -> None:  # type: ignore[no-untyped-def]
    changes = {"top_k": 8} if backend == SPARSE else {}
    positional, keyword = arguments(made_for(backend, "plain", "padded", **changes))
    torch.library.opcheck(mla_op(backend, role), positional, keyword)


def test_what_graphs_may_hold() -> None:
    levels = [resolve_backend(name).get_builder_cls().cudagraph_support for name in (MLA, SPARSE)]
    assert levels == [AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS]


@pytest.mark.parametrize(("backend", "batch"), [(MLA, "uniform_of_four"), (SPARSE, "mixed")])
def test_a_planned_call_waits_for_nothing(backend: str, batch: str) -> None:
    made_for(backend, "plain", batch, top_k=8 if backend == SPARSE else None)
    check_backend(backend, device=DEVICE, only=["plan"], case=f"plain-{batch}").assert_ok()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 60, "head_size": 76}, "kv_lora_rank=60"),
        ({"block_size": 24}, "block_size=24"),
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
    ],
)
def test_what_is_refused(changes: dict[str, int], words: str) -> None:
    from attnbackend import AttentionSelectorConfig
    from attnbackend.selector import backend_reasons

    fields = {
        "device_type": DEVICE, "head_size": 80, "kv_lora_rank": 64, "num_heads": 4, "num_kv_heads": 1,
        "dtype": torch.float16, "block_size": 16, "use_mla": True,
    } | changes  # fmt: skip
    reasons = backend_reasons(MLA, AttentionSelectorConfig.dense(**fields))
    assert any(words in str(reason) for reason in reasons), reasons
