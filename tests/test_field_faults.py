"""Faults that people met in comparable systems, each with a small input and the right value.

Where a fault was reported is said beside its test. Those of registry, selection and cache layout are in
``test_registry.py``, ``test_selector.py`` and ``test_kv_cache.py``; those of compilation in
``test_compile.py``, ``test_fx_passes.py`` and ``test_torch_compat.py``; those of CUDA graphs in
``test_field_faults_graphs.py``.

Shape legend: T tokens, L keys, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import DENSE_BACKENDS, DEVICE, forward_op, require
from torch import Tensor

from attnbackend import merge_attn_states
from attnbackend.testing import plain_torch_attention, reference_attention

D, BLOCK = 32, 16
NAN = float("nan")
backends = pytest.mark.parametrize("backend", DENSE_BACKENDS)


def attend(
    backend: str, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, *, seq_len: int | None = None,
    dtype: torch.dtype = torch.float32, elsewhere: float = NAN, with_lse: bool = True, **features: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One request whose keys lie in blocks 2, 1, 3, ... of a cache of ``elsewhere`` beside them.

    Without an LSE, NaN comes back for it.
    """
    require(backend)
    length = len(k_LKD) if seq_len is None else seq_len
    pages = max(1, -(-len(k_LKD) // BLOCK))
    cache = torch.full((pages + 2, 2, BLOCK, k_LKD.shape[1], D), elsewhere).to(dtype)
    order = torch.tensor([2, 1, *range(3, pages + 2)])[:pages]
    for j in range(len(k_LKD)):
        cache[order[j // BLOCK], 0, j % BLOCK] = k_LKD[j].to(dtype)
        cache[order[j // BLOCK], 1, j % BLOCK] = v_LKD[j].to(dtype)
    output, lse = torch.full_like(q_THD, NAN), torch.full(q_THD.shape[:2], NAN)
    int32 = {"dtype": torch.int32, "device": DEVICE}
    output, lse = output.to(DEVICE), lse.to(DEVICE)
    forward_op(backend)(
        q_THD.to(DEVICE), None, None, cache.to(DEVICE), output,
        torch.tensor([0, len(q_THD)], **int32), torch.tensor([length], **int32),
        order[None].to(**int32), lse=lse if with_lse else None, **{"scale": 1.0, **features},
    )  # fmt: skip
    return output.cpu(), lse.cpu()


def rows(*values: float, heads: int = 1) -> Tensor:
    """[len(values), heads, D] with each value in the first element and zeros after it."""
    x = torch.zeros(len(values), heads, D)
    x[:, :, 0] = torch.tensor(values).unsqueeze(1)
    return x


def counting(length: int) -> Tensor:
    """Values j = 0, 1, 2, ... in every element."""
    return torch.arange(length, dtype=torch.float32).view(-1, 1, 1).expand(length, 1, D).contiguous()


@backends
@pytest.mark.parametrize("queries", [8, 1], ids=["prefill", "decode"])
def test_a_window_counts_the_token_itself(backend: str, queries: int) -> None:
    """transformers #39408: FlashAttention's own argument counts keys to the left only."""
    out, _ = attend(backend, torch.zeros(queries, 1, D), torch.zeros(8, 1, D), counting(8), sliding_window=4)
    torch.testing.assert_close(out[-1, 0], torch.full((D,), 5.5))


@backends
@pytest.mark.parametrize(("scale", "expected"), [(1.0, 0.731059), (0.1, 0.681700)])
def test_the_cap_is_applied_after_the_scale(backend: str, scale: float, expected: float) -> None:
    """sglang #33915: a cap given when running was accepted and ignored."""
    out, _ = attend(backend, rows(1), rows(10, 0), rows(1, 0), scale=scale, logits_soft_cap=1.0)
    assert math.isclose(float(out[0, 0, 0]), expected, abs_tol=1e-6)


@backends
@pytest.mark.parametrize("with_lse", [True, False])
def test_layers_with_other_masks_do_not_lend_them_to_each_other(backend: str, with_lse: bool) -> None:
    """sglang #33915: caps and windows are set when a kernel is planned, and one plan served all layers."""
    layers = [
        ({"logits_soft_cap": 1.0}, 0.731059), ({}, 0.999955), ({"logits_soft_cap": 2.0}, 0.880778),
        ({"sliding_window": 1}, 0.0), ({"logits_soft_cap": 1.0}, 0.731059),
    ]  # fmt: skip
    for features, expected in layers:
        out, _ = attend(backend, rows(1), rows(10, 0), rows(1, 0), with_lse=with_lse, **features)
        assert math.isclose(float(out[0, 0, 0]), expected, abs_tol=1e-6)


@backends
@pytest.mark.parametrize("queries", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("others", ["lse", "alibi", "none"])
def test_both_cache_scales_are_applied_on_every_path(backend: str, queries: int, others: str) -> None:
    """flashinfer #4979: scales were applied only where another optional tensor was given."""
    one = torch.ones(1, device=DEVICE)
    extras = {"alibi_slopes": one * 0} if others == "alibi" else {}
    out, _ = attend(
        backend, rows(*[1.0] * queries), rows(4, 0), rows(2, 0), dtype=torch.float8_e4m3fn,
        with_lse=others == "lse", kv_cache_dtype="fp8_e4m3", k_scale=one * 0.25, v_scale=one * 0.5, **extras,
    )  # fmt: skip
    assert math.isclose(float(out[-1, 0, 0]), 0.731059, abs_tol=1e-6)


@backends
@pytest.mark.parametrize("queries", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("elsewhere", [NAN, math.inf])
def test_what_lies_behind_the_last_key_does_not_matter(backend: str, queries: int, elsewhere: float) -> None:
    """flash-attention #1745: probability 0 times NaN is NaN, and so is 0 times infinity."""
    ones = torch.ones(queries, 1, D)
    out, lse = attend(backend, ones, ones, ones, scale=1 / D, elsewhere=elsewhere)
    torch.testing.assert_close(out, ones)
    torch.testing.assert_close(lse[:, 0], 1 + torch.arange(1.0, queries + 1).log())


@backends
def test_sequences_without_tokens_among_decodes(backend: str) -> None:
    """flash-attention #1537: a fast path reshaped by the number of sequences."""
    require(backend)
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(2, 9, 64, generator=g), torch.randn(5, 2, BLOCK, 3, 64, generator=g)
    starts, lens = torch.tensor([0, 0, 1, 1, 2]).int(), torch.tensor([0, 3, 0, 5]).int()
    args = (q, cache, starts, lens, torch.tensor([[0], [1], [2], [4]]).int())
    exact, _ = reference_attention(*args, scale=0.125)
    yardstick, _ = plain_torch_attention(*args, scale=0.125)
    q, cache, starts, lens, table = (x.to(DEVICE) for x in args)
    output = torch.full_like(q, NAN)
    forward_op(backend)(q, None, None, cache, output, starts, lens, table, scale=0.125)
    error, allowed = ((x.cpu().double() - exact).abs().max() for x in (output, yardstick))
    assert float(error) <= 2 * float(allowed) + 2**-24


@backends
def test_a_query_that_sees_no_key_gives_zeros_not_a_mean(backend: str) -> None:
    """pytorch #103749: a finite minimum as mask makes all keys equal; -inf gives NaN on some kernels."""
    out, lse = attend(backend, torch.zeros(3, 1, D), torch.zeros(2, 1, D), counting(2))
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 0.5]
    assert float(lse[0, 0]) == -math.inf
    torch.testing.assert_close(lse[1:, 0], torch.tensor([0.0, math.log(2)]))


@backends
@pytest.mark.parametrize(("queries", "expected"), [(1, [2.0]), (2, [1.5, 2.0])])
def test_causality_is_aligned_to_the_last_key(backend: str, queries: int, expected: list[float]) -> None:
    """pytorch #144858: is_causal of torch's own function is aligned to the first key."""
    out, _ = attend(backend, torch.zeros(queries, 1, D), torch.zeros(5, 1, D), counting(5))
    torch.testing.assert_close(out[:, 0, 0], torch.tensor(expected))


@backends
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (28, 4), (5, 1)])
@pytest.mark.parametrize("queries", [1, 3], ids=["decode", "prefill"])
def test_each_head_reads_its_own_key_value_head(
    backend: str, heads: int, kv_heads: int, queries: int
) -> None:
    """FreeToken #177: tiles of 16 heads straddled key-value heads."""
    v = torch.arange(kv_heads, dtype=torch.float32).view(1, -1, 1).expand(4, kv_heads, D).contiguous()
    out, _ = attend(backend, torch.zeros(queries, heads, D), torch.zeros(4, kv_heads, D), v)
    expected = (torch.arange(heads) // (heads // kv_heads)).float()
    torch.testing.assert_close(out[:, :, 0], expected.expand(queries, -1))


@backends
def test_padding_leaves_nothing_stale_for_a_later_maximum(backend: str) -> None:
    """vllm #37442: stale NaN in padded rows entered the scale of a later quantisation."""
    require(backend)
    cache = torch.ones(3, 2, BLOCK, 1, D, device=DEVICE)
    output = torch.full((4, 1, D), NAN, device=DEVICE)
    int32 = {"dtype": torch.int32, "device": DEVICE}
    forward_op(backend)(
        torch.ones(4, 1, D, device=DEVICE), None, None, cache, output, torch.tensor([0, 1, 1], **int32),
        torch.tensor([1, 0], **int32), torch.tensor([[1], [0]], **int32), scale=1.0,
    )  # fmt: skip
    assert float(output.abs().max()) == 1.0
    assert bool((output[1:] == 0).all())


def test_merging_with_the_empty_state_is_the_identity_bit_for_bit() -> None:
    """flashinfer #4054: the naive formula gives NaN for two empty states."""
    g = torch.Generator().manual_seed(0)
    x, lse = torch.randn(3, 2, 8, generator=g), torch.randn(3, 2, generator=g)
    empty, nothing = torch.zeros_like(x), torch.full_like(lse, -math.inf)
    for merged in (merge_attn_states(empty, nothing, x, lse), merge_attn_states(x, lse, empty, nothing)):
        assert torch.equal(merged[0], x)
        assert torch.equal(merged[1], lse)
    both, both_lse = merge_attn_states(empty, nothing, empty, nothing)
    assert torch.equal(both, empty)
    assert torch.equal(both_lse, nothing)


def test_states_are_weighted_by_natural_exponentials() -> None:
    """vllm #47079: base-2 LSEs, merged as natural ones, gave 0.17009."""
    out, lse = merge_attn_states(
        torch.ones(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.full((1, 1), math.log(3))
    )
    assert math.isclose(float(out), 0.25, abs_tol=1e-7)
    assert math.isclose(float(lse), math.log(4), abs_tol=1e-6)


def test_states_with_different_strides_merge_alike() -> None:
    """A merge read both of its inputs with the strides of the first."""
    g = torch.Generator().manual_seed(0)
    a, lse_a, lse_b = torch.randn(2, 3, 128, generator=g), torch.randn(2, 3), torch.randn(2, 3)
    b = torch.randn(2, 3, 192, generator=g)[..., :128]
    expected = merge_attn_states(a, lse_a, b.contiguous(), lse_b)
    for actual in (merge_attn_states(a, lse_a, b, lse_b), merge_attn_states(b, lse_b, a, lse_a)):
        torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="differ in shape"):
        merge_attn_states(a, lse_a, b[:1], lse_b[:1])


@backends
def test_merged_chunks_equal_one_pass(backend: str) -> None:
    """Context in three chunks, merged by LSE."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, D, generator=g) for n in (1, 48, 48))
    whole, whole_lse = attend(backend, q, k, v, scale=0.2)
    parts = [attend(backend, q, k[i : i + 16], v[i : i + 16], scale=0.2) for i in (0, 16, 32)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_attn_states(out, lse, *part)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-6)


def test_an_undeclared_write_fails_opcheck_and_is_dropped_by_the_compiler(fresh_compiler: None) -> None:
    """flash-attention #148 (vllm's fork): cache arguments were declared read-only."""
    library = torch.library.Library("fieldfaults", "FRAGMENT")
    library.define("liar(Tensor x, Tensor c) -> Tensor")
    library.impl("liar", lambda x, c: (c.add_(1), x.clone())[1], "CompositeExplicitAutograd")
    torch.library.register_fake("fieldfaults::liar", lambda x, c: torch.empty_like(x), lib=library)
    op = torch.ops.fieldfaults.liar.default

    def total(x: Tensor, c: Tensor) -> Tensor:
        op(x, c)
        return c.sum()

    with pytest.raises(Exception, match="test_schema"):
        torch.library.opcheck(op, (torch.ones(4), torch.zeros(4)))
    assert float(total(torch.ones(4), torch.zeros(4))) == 4.0
    assert float(torch.compile(total, backend="aot_eager")(torch.ones(4), torch.zeros(4))) == 0.0


def test_no_op_returns_anything_so_no_fake_can_have_wrong_strides() -> None:
    """vllm #58182: a fake kept the query's strides where the kernel returned a contiguous tensor."""
    from attnbackend.ops import backend_op_names

    for backend in DENSE_BACKENDS:
        forward_op(backend)
    for name in ("attention", "kv_cache_update", *backend_op_names()):
        assert not getattr(torch.ops.attnbackend, name).default._schema.returns


def test_growing_lengths_compile_at_most_twice(fresh_compiler: None) -> None:
    """quack #150: a guard on the longest sequence recompiled at every new value."""
    from toy_models import make_stack, random_batch

    import attnbackend

    stack = make_stack(num_layers=1)
    compiled = attnbackend.compile(stack, compiler="eager", fullgraph=True)
    for tokens in range(60, 70):
        compiled(*random_batch(tokens, num_tokens=tokens))
    assert compiled.attnbackend_compiler.num_graphs <= 2
