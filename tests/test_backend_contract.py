"""What a backend class must have, may claim, and cannot get away with."""

from __future__ import annotations

import pytest
import torch
from toy_backends import EVERYTHING, ToyBuilder, ToyImpl, ToyMLAImpl, config, make_backend

from attnbackend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionParams,
    AttentionType,
    KVCacheDims,
    KVCacheLayout,
    LSEBase,
    MLAAttentionImpl,
    MultipleOf,
    Reason,
    register_backend,
    registry_scope,
)
from attnbackend.validation import configuration_reasons, single_changes

CORE = ("get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape")


def params(**changes):
    plain = {
        "num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32,
        "kv_cache_dtype": "auto", "block_size": 16, "device_type": "cpu", "scale": 0.125,
    }  # fmt: skip
    return AttentionParams(**{**plain, **changes})


@pytest.mark.parametrize("method", CORE)
def test_a_class_without_a_core_method_fails_at_its_statement(method):
    with pytest.raises(TypeError, match=rf"ToyBackend lacks {method}\(\)"):
        make_backend(without=(method,))


def test_all_missing_methods_are_named_at_once():
    with pytest.raises(TypeError, match=r"get_name.*get_impl_cls.*get_builder_cls.*get_kv_cache"):

        class Bare(AttentionBackend):
            pass


def test_an_abstract_base_may_lack_methods_and_its_complete_child_stands():
    base = make_backend(without=("get_name",), abstract=True)

    class Child(base):
        @staticmethod
        def get_name():
            return "CHILD"

    assert Child.get_name() == "CHILD"


def test_a_child_of_an_abstract_base_is_checked_too():
    base = make_backend(without=("get_name",), abstract=True)
    with pytest.raises(TypeError, match=r"lacks get_name\(\)"):

        class Child(base):
            pass


@pytest.mark.parametrize(
    ("claim", "near"),
    [
        ("supports_sink", "supports_sinks"),
        ("supported_dtype", "supported_dtypes"),
        ("is_mamba", ""),
    ],
)
def test_a_claim_that_does_not_exist_is_refused(claim, near):
    with pytest.raises(TypeError, match=rf"claims {claim}.*{near}"):
        make_backend(**{claim: True})


def test_a_claim_written_as_a_method_is_refused_since_a_method_is_always_true():
    with pytest.raises(TypeError, match=r"is_mla is .*True or False"):
        make_backend(is_mla=classmethod(lambda cls: False))


def refused_at_registration(backend, match):
    with registry_scope(), pytest.raises(TypeError, match=match):
        register_backend()(backend)


def test_an_impl_without_forward_fails_at_registration():
    class NoForward(AttentionImpl):
        pass

    refused_at_registration(make_backend(impl=NoForward), r"NoForward lacks forward\(\)")


def test_an_mla_impl_without_its_methods_fails_at_registration():
    class NoMha(MLAAttentionImpl):
        def forward_mqa(self, *args):
            pass

    backend = make_backend(impl=NoMha, is_mla=True)
    refused_at_registration(backend, r"NoMha lacks forward_mha\(\)")


def test_a_builder_without_build_fails_at_registration():
    class NoBuild(AttentionMetadataBuilder):
        pass

    refused_at_registration(make_backend(builder=NoBuild), r"NoBuild lacks build\(\)")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"impl": ToyMLAImpl}, r"ToyMLAImpl is not a subclass of AttentionImpl \(is_mla=False\)"),
        ({"impl": ToyImpl, "is_mla": True}, "ToyImpl is not a subclass of MLAAttentionImpl"),
        ({"builder": ToyImpl}, "ToyImpl is not a subclass of AttentionMetadataBuilder"),
        ({"impl": object()}, "TOY is not a subclass of AttentionImpl"),
    ],
)
def test_parts_of_the_wrong_kind_fail_at_registration(parts, match):
    refused_at_registration(make_backend(**parts), match)


@pytest.mark.parametrize(
    ("claims", "match"),
    [
        ({"supported_device_types": "cpu"}, r"supported_device_types='cpu' is no tuple; write \('cpu',\)"),
        ({"supported_head_sizes": 64}, r"supported_head_sizes=64 is no tuple; write \(64,\)"),
    ],
)
def test_claims_that_are_no_tuples_fail_at_registration(claims, match):
    refused_at_registration(make_backend(**claims), match)


class ImplThatGivesLSE(ToyImpl):
    can_return_lse_for_decode = True


@pytest.mark.parametrize(
    ("claims", "match"),
    [
        ({"lse_base": "2"}, "lse_base='2' is not an LSEBase; say LSEBase.E"),
        ({"lse_base": 2}, "lse_base=2 is not an LSEBase"),
        ({"lse_base": True}, "lse_base=True is not an LSEBase"),
        ({"supports_lse": classmethod(lambda cls: True)}, "gives an LSE but declares no lse_base"),
        ({"impl": ImplThatGivesLSE}, "gives an LSE but declares no lse_base"),
    ],
)
def test_an_lse_without_a_valid_base_is_refused_at_registration(claims, match):
    refused_at_registration(make_backend(**claims), match)


@pytest.mark.parametrize("base", [LSEBase.E, LSEBase.TWO])
def test_an_lse_with_a_declared_base_is_taken(base):
    with registry_scope():
        backend = register_backend()(make_backend("TOY_LSE", impl=ImplThatGivesLSE, lse_base=base))
        assert backend.supports_lse()
        assert backend.validate_configuration(config(needs_lse=True)) == []


def test_forward_of_a_latent_implementation_says_what_to_call():
    impl = ToyMLAImpl(params())
    with pytest.raises(TypeError, match=r"ToyMLAImpl has no forward\(\).*latent.*forward_mqa"):
        impl.forward(torch.ones(1))


@pytest.mark.parametrize("method", ["forward_mqa", "forward_mha"])
def test_latent_methods_of_a_standard_implementation_say_what_to_call(method):
    impl = ToyImpl(params())
    with pytest.raises(TypeError, match=rf"ToyImpl has no {method}\(\).*standard.*Call forward"):
        getattr(impl, method)()


def test_parameters_are_passed_by_name_and_unknown_ones_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        params(softcap=3.0)


def test_claims_default_to_no():
    bare = make_backend(without=tuple(EVERYTHING))
    flags = [n for n in dir(AttentionBackend) if isinstance(getattr(AttentionBackend, n), bool)]
    assert len(flags) >= 12
    assert not any(getattr(bare, name) for name in flags)
    fields = {reason.field for reason in bare.validate_configuration(config())}
    assert fields == {"device_type", "head_size", "dtype", "block_size"}


def test_the_default_shape_parses_back():
    backend = make_backend()
    shape = backend.get_kv_cache_shape(10, 16, 8, 64)
    assert backend.parse_kv_cache_shape(shape) == KVCacheDims(10, 16, 8, 64)


# Validation: each rule, with one configuration that it rejects.

CLAIMS = {"min_compute_capability": (8, 0), "max_group_size": 4}
REJECTED = {
    "device_type": ("mps", "cpu, cuda, xpu"),
    "compute_capability": ((7, 5), "at least (8, 0)"),
    "use_mla": (True, "False"),
    "use_sparse": (True, "False"),
    "head_size": (80, "64, 128"),
    "dtype": (torch.float64, "float32, float16, bfloat16"),
    "kv_cache_dtype": ("int4", "auto, fp8"),
    "block_size": (8, "multiples of 16"),
    "kv_cache_layout": (KVCacheLayout.HND, "NHD"),
    "attn_type": (AttentionType.ENCODER, "decoder"),
    "causal": (False, "True, since TOY has no supports_non_causal"),
    "sliding_window": (7, "None, since TOY has no supports_sliding_window"),
    "attention_chunk_size": (64, "None, since TOY has no supports_attention_chunks"),
    "logits_soft_cap": (30.0, "0.0, since TOY has no supports_logits_soft_cap"),
    "has_alibi": (True, "False, since TOY has no supports_alibi"),
    "has_sinks": (True, "False, since TOY has no supports_sinks"),
    "has_bidirectional_ranges": (True, "False, since TOY has no supports_bidirectional_ranges"),
    "needs_lse": (True, "False, since TOY declares no lse_base"),
    "has_query_scale": (True, "False, since TOY has no supports_query_scale"),
    "has_quantized_query": (True, "False, since TOY has no supports_quantized_query"),
    "has_output_scale": (True, "False, since TOY has no supports_output_scale"),
    "has_output_block_scale": (True, "False, since TOY has no supports_output_block_scale"),
    "per_head_quant_scales": (True, "False, since TOY has no supports_per_head_quant_scales"),
}


def nhd_only():
    return make_backend(supported_layouts=(KVCacheLayout.NHD,), **CLAIMS)


@pytest.mark.parametrize("field", REJECTED)
def test_what_is_not_claimed_is_refused_with_value_and_allowed(field):
    value, allowed = REJECTED[field]
    reasons = nhd_only().validate_configuration(config(**{field: value}))
    assert reasons == [Reason(field, value, allowed)]


def test_every_field_but_the_counts_has_a_rejecting_case():
    counts = {"num_heads", "num_kv_heads", "kv_lora_rank"}
    assert set(vars(config())) - counts == set(REJECTED)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [
        (8, 3, "multiples of num_kv_heads=3"),
        (9, 2, "multiples of num_kv_heads=2"),
        (2, 8, "multiples of num_kv_heads=8"),
        (16, 2, "up to 8, 4 for each of num_kv_heads=2"),
    ],
)
def test_head_counts_that_do_not_divide_or_exceed_the_group_are_refused(heads, kv_heads, allowed):
    reasons = nhd_only().validate_configuration(config(num_heads=heads, num_kv_heads=kv_heads))
    assert reasons == [Reason("num_heads", heads, allowed)]


def test_what_is_claimed_is_accepted():
    flags = [n for n in dir(AttentionBackend) if n.startswith("supports_")]
    claims = {n: True for n in flags if isinstance(getattr(AttentionBackend, n), bool)}
    backend = make_backend(**claims, lse_base=LSEBase.E)
    asked = {
        "causal": False, "sliding_window": 7, "logits_soft_cap": 30.0, "has_alibi": True,
        "has_sinks": True, "needs_lse": True, "has_query_scale": True, "has_output_scale": True,
        "has_quantized_query": True,
        "has_output_block_scale": True, "per_head_quant_scales": True, "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert backend.validate_configuration(config(**asked)) == []


def test_all_reasons_come_at_once_and_combinations_last():
    backend = make_backend(
        supports_combination=classmethod(lambda cls, config: [Reason("pair", "a+b", "a or b")])
    )
    reasons = backend.validate_configuration(config(head_size=80, has_sinks=True, num_heads=7))
    assert [reason.field for reason in reasons] == ["head_size", "has_sinks", "num_heads", "pair"]


def test_undecided_block_size_and_layout_rule_nothing_out():
    undecided = config(block_size=None, kv_cache_layout=None)
    assert make_backend().validate_configuration(undecided) == []


def test_an_overridden_check_is_named_instead_of_a_list_that_it_does_not_use():
    backend = make_backend(supports_head_size=classmethod(lambda cls, size: size == 96))
    (reason,) = backend.validate_configuration(config(head_size=64))
    assert reason.allowed == "what TOY.supports_head_size() accepts"
    assert backend.validate_configuration(config(head_size=96)) == []


def test_a_state_space_backend_serves_no_attention_layer():
    (reason,) = make_backend(is_ssm=True).validate_configuration(config())
    assert "state-space" in str(reason)


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({}, []),
        ({"block_size": 8}, ["block_size 8 -> 16"]),
        ({"block_size": 40}, ["block_size 40 -> 32", "block_size 40 -> 48"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, [
            "kv_cache_dtype fp8_e5m2 -> auto", "kv_cache_dtype fp8_e5m2 -> fp8",
        ]),
        ({"device_type": "mps"}, [f"device_type mps -> {d}" for d in ("cpu", "cuda", "xpu")]),
        ({"head_size": 80}, ["head_size 80 -> 64", "head_size 80 -> 128"]),
        ({"has_sinks": True}, ["has_sinks True -> False"]),
        ({"sliding_window": 7}, ["sliding_window 7 -> None"]),
        ({"compute_capability": (7, 5)}, ["compute_capability (7, 5) -> (8, 0)"]),
        ({"use_mla": True}, ["use_mla True -> False"]),
        ({"has_sinks": True, "block_size": 8}, []),
        ({"num_heads": 7}, []),
    ],
)  # fmt: skip
def test_single_changes_are_those_that_alone_suffice(asked, changes):
    backend = make_backend(**CLAIMS)
    assert [str(change) for change in single_changes(backend, config(**asked))] == changes


def test_single_changes_also_lift_a_combination():
    def no_sinks_with_fp8(cls, config):
        clash = config.has_sinks and config.kv_cache_dtype == "fp8"
        return [Reason("has_sinks", True, "False with fp8")] if clash else []

    backend = make_backend(supports_sinks=True, supports_combination=classmethod(no_sinks_with_fp8))
    changes = single_changes(backend, config(has_sinks=True, kv_cache_dtype="fp8"))
    assert {str(c) for c in changes} == {"kv_cache_dtype fp8 -> auto", "has_sinks True -> False"}


def test_sizes_of_a_limited_range_are_tried_at_its_ends():
    backend = make_backend(supported_head_sizes=(MultipleOf(8, 32, 256),))
    assert [c.new for c in single_changes(backend, config(head_size=300))] == [256]
    assert [c.new for c in single_changes(backend, config(head_size=20))] == [32]


def test_the_builder_of_a_toy_is_complete():
    assert configuration_reasons(make_backend(builder=ToyBuilder), config()) == []
