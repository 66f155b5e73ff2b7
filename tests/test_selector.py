"""Which backend serves a configuration, who may force one, and when a choice is made anew."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toy_backends import config, make_backend

from attnbackend import (
    AttentionBackendEnum,
    AttentionSelectorConfig,
    AttentionType,
    KVCacheLayout,
    clear_override,
    get_attn_backend,
    register_backend,
    registry_scope,
    select_backend,
    set_config,
)
from attnbackend.platforms import backend_priorities
from attnbackend.selector import backend_reasons, backend_verdict
from attnbackend.types import Unavailable


@pytest.fixture(autouse=True)
def _scope():
    with registry_scope():
        yield


def toys(*names, **claims):
    return [register_backend()(make_backend(name, **claims)) for name in names]


def fill_order(device_type, capability=None, use_mla=False, **claims_of):
    """A toy under each name of a platform's dense order, with claims for some."""
    asked = config(device_type=device_type, compute_capability=capability)
    from attnbackend.platforms import Platform

    order = backend_priorities(Platform(device_type, capability), use_mla=False)
    for name in order:
        if "+" in name:  # made of the two that it names
            continue
        register_backend(name)(make_backend(name, **claims_of.get(name, {})))
    return asked, order


# Automatic choice


@pytest.mark.parametrize(
    ("device_type", "capability", "first"),
    [
        ("cuda", (8, 0), "FLASH_ATTN"),
        ("cuda", (9, 0), "FLASH_ATTN+TRITON_ATTN"),
        ("cuda", (10, 0), "FLASHINFER"),
        ("cuda", (12, 0), "FLASH_ATTN"),
        ("xpu", None, "FLASH_ATTN"),
        ("cpu", None, "CPU_ATTN"),
    ],
)
def test_the_first_of_the_order_that_can_serve_is_chosen(device_type, capability, first):
    asked, order = fill_order(device_type, capability)
    assert select_backend(asked).name == first == order[0]


def test_rocm_has_an_order_of_its_own(monkeypatch):
    toys("ROCM_ATTN", "FLASH_ATTN")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert select_backend(config(device_type="cuda")).name == "ROCM_ATTN"
    monkeypatch.setattr(torch.version, "hip", None)
    assert select_backend(config(device_type="cuda")).name == "FLASH_ATTN"


def test_those_that_cannot_serve_are_passed_over_and_named():
    unavailable = {"unavailable_reason": classmethod(lambda cls, device: "no library")}
    asked, _ = fill_order(
        "cuda", (9, 0), FLASH_ATTN={"min_compute_capability": (10, 0)}, TRITON_ATTN=unavailable
    )
    chosen = select_backend(asked)
    assert chosen.name == "FLASHINFER"
    assert chosen.because == (
        "the first that can serve in the order for cuda; FLASH_ATTN+TRITON_ATTN, FLASH_ATTN, TRITON_ATTN "
        "cannot serve"
    )


def test_two_that_cannot_share_a_cache_are_passed_over_together():
    shape = {"get_kv_cache_shape": staticmethod(lambda *args: (1, 2, 3))}
    asked, _ = fill_order("cuda", (9, 0), TRITON_ATTN=shape)
    assert select_backend(asked).name == "FLASH_ATTN"
    with pytest.raises(ValueError, match=r"FLASH_ATTN\+TRITON_ATTN.*cannot be composed"):
        select_backend(asked, backend="FLASH_ATTN+TRITON_ATTN")


def test_prompts_over_float8_caches_are_flash_attention_s_though_it_reads_none(monkeypatch):
    monkeypatch.setattr("attnbackend.kernels.triton.unavailable_reason", lambda device: None)
    asked, order = fill_order("cuda", (9, 0), FLASH_ATTN={"supported_kv_cache_dtypes": ("auto",)})
    assert select_backend(dataclasses.replace(asked, kv_cache_dtype="fp8")).name == order[0]


def test_a_third_party_name_is_never_chosen_unasked():
    toys("AAA_TOY")
    assert select_backend(config()).name in ("CPU_ATTN", "TORCH_SDPA")


def test_when_none_can_serve_all_are_listed_with_their_reasons():
    toys("CPU_ATTN", supports_sinks=True)
    toys("TORCH_SDPA", supported_head_sizes=(128,))
    toys("FLEX_ATTENTION", supported_head_sizes=(64,))
    with pytest.raises(ValueError, match="no attention backend can serve") as caught:
        select_backend(config(has_sinks=True, head_size=96))
    text = str(caught.value)
    assert "head_size=96 num_heads=8" in text
    assert "CPU_ATTN: head_size=96 (allowed: 64, 128)" in text
    assert "TORCH_SDPA: head_size=96 (allowed: 128); has_sinks=True (allowed: False" in text


def test_a_device_without_an_order_says_so():
    with pytest.raises(ValueError, match="no order is known for device_type='mps'"):
        select_backend(config(device_type="mps"))


def test_latent_attention_is_served_by_latent_backends_alone():
    assert select_backend(config(use_mla=True, num_kv_heads=1)).backend.is_mla
    with pytest.raises(ValueError, match=r"'CPU_ATTN'.*cannot serve.*\n  use_mla=True \(allowed: False"):
        select_backend(config(use_mla=True, num_kv_heads=1), backend="CPU_ATTN")
    with pytest.raises(ValueError, match=r"'TORCH_MLA'.*cannot serve.*\n  use_mla=False \(allowed: True"):
        select_backend(config(), backend="TORCH_MLA")


# Forced choice


def test_the_caller_stands_above_the_configuration_above_the_environment(monkeypatch):
    a, b, c = toys("TOY_A", "TOY_B", "TOY_C")
    monkeypatch.setenv("ATTNBACKEND", "TOY_A")
    assert select_backend(config()).backend is a
    with set_config(backend="TOY_B"):
        assert select_backend(config()).backend is b
        chosen = select_backend(config(), backend="TOY_C")
        assert chosen.backend is c
        assert chosen.because == "named by the caller"
        assert get_attn_backend(config(), backend="TOY_C") is c
    assert "ATTNBACKEND" in select_backend(config()).because


def test_a_member_may_be_named():
    named = select_backend(config(), backend=AttentionBackendEnum.TORCH_SDPA)
    assert named.name == "TORCH_SDPA"


def test_a_named_backend_that_cannot_serve_raises_with_all_reasons():
    toys("TOY_D", unavailable_reason=classmethod(lambda cls, device: f"no driver for {device}"))
    refused = "backend 'TOY_D', named by the caller, cannot serve"
    with pytest.raises(ValueError, match=refused) as e:
        select_backend(config(head_size=80, has_alibi=True, num_heads=7), backend="TOY_D")
    lines = str(e.value).splitlines()[1:]
    assert lines == [
        "  head_size=80 (allowed: 64, 128)",
        "  has_alibi=True (allowed: False, since TOY_D has no supports_alibi)",
        "  num_heads=7 (allowed: multiples of num_kv_heads=2)",
        "  unavailable: no driver for cpu",
    ]


def test_a_named_backend_whose_class_cannot_be_imported_is_a_value_error_with_the_cause():
    register_backend("TOY_E", "no_such_module.Toy")
    with pytest.raises(ValueError, match=r"'TOY_E'.*(?s:.*)ModuleNotFoundError: No module named"):
        select_backend(config(), backend="TOY_E")


@pytest.mark.parametrize("name", ["CUSTOM", "MAMBA_CUSTOM"])
def test_a_named_member_without_a_class_says_what_to_do(name):
    with pytest.raises(ValueError, match=f"'{name}', named by the caller: .*not implemented; regis"):
        select_backend(config(), backend=name)


# The environment


@pytest.mark.parametrize("value", ["FLASH_ATTN", "flash_attn", " FLASH_ATTN ", "Flash_Attn\n"])
def test_case_and_space_do_not_matter_in_the_environment(monkeypatch, value):
    (mine,) = toys("FLASH_ATTN")
    monkeypatch.setenv("ATTNBACKEND", value)
    chosen = select_backend(config())
    assert (chosen.name, chosen.backend) == ("FLASH_ATTN", mine)


@pytest.mark.parametrize("value", ["my_toy-2", "MY_TOY-2", "My_Toy-2"])
def test_the_environment_finds_names_that_are_not_upper_case(monkeypatch, value):
    toys("my_toy-2")
    monkeypatch.setenv("ATTNBACKEND", value)
    assert select_backend(config()).name == "my_toy-2"


def test_a_typo_in_the_environment_is_an_error_with_the_nearest_name(monkeypatch):
    toys("FLASH_ATTN")
    monkeypatch.setenv("ATTNBACKEND", "FLSH_ATTN")
    meant = r"unknown.*'FLSH_ATTN'; did you mean FLASH_ATTN.*Allowed: .*TORCH_SDPA"
    with pytest.raises(ValueError, match=rf"variable ATTNBACKEND: {meant}"):
        select_backend(config())


@pytest.mark.parametrize("value", ["", "   "])
def test_an_empty_environment_is_an_unset_one(monkeypatch, value):
    unset = select_backend(config())
    monkeypatch.setenv("ATTNBACKEND", value)
    assert select_backend(config()) == unset


def test_a_valid_name_in_the_environment_that_cannot_serve_is_not_replaced(monkeypatch):
    toys("FLASH_ATTN", supported_device_types=("cuda",))
    monkeypatch.setenv("ATTNBACKEND", "flash_attn")
    with pytest.raises(ValueError, match=r"'flash_attn'.*cannot serve(?s:.*)device_type=cpu"):
        select_backend(config())


@pytest.mark.parametrize(("named", "configured"), [("torch_sdpa", None), (None, "torch_sdpa")])
def test_case_matters_for_names_in_code(named, configured):
    unknown = "unknown attention backend 'torch_sdpa'; did you mean TORCH_SDPA"
    with set_config(backend=configured), pytest.raises(ValueError, match=unknown):
        select_backend(config(), backend=named)


# A choice is made anew when what it rests on changes


def test_a_changed_environment_or_registry_takes_effect_at_once(monkeypatch):
    automatic = select_backend(config())
    (b,) = toys("TOY_B")
    assert select_backend(config()) == automatic
    monkeypatch.setenv("ATTNBACKEND", "TOY_B")
    assert select_backend(config()).backend is b
    override = register_backend(override=True)(make_backend("TOY_B"))
    assert select_backend(config()).backend is override
    monkeypatch.delenv("ATTNBACKEND")
    assert select_backend(config()) == automatic
    mine = register_backend(automatic.name)(make_backend(automatic.name))
    assert select_backend(config()).backend is mine
    clear_override(automatic.name)
    assert select_backend(config()).backend is automatic.backend


def test_equal_configurations_are_chosen_for_once():
    probes = []
    toys("CPU_ATTN", unavailable_reason=classmethod(lambda cls, device: probes.append(device)))
    first = select_backend(config())
    assert select_backend(config()) is first
    assert probes == ["cpu"]
    select_backend(config(head_size=128))
    assert len(probes) == 2


def test_a_refusal_is_not_remembered():
    missing = ["no library"]
    probe = classmethod(lambda cls, device: missing[0] if missing else None)
    toys("TOY_F", unavailable_reason=probe)
    with pytest.raises(ValueError, match="no library"):
        select_backend(config(), backend="TOY_F")
    missing.clear()
    assert select_backend(config(), backend="TOY_F").name == "TOY_F"


# Probes


def raising(error):
    def probe(cls, device_type):
        raise error

    return classmethod(probe)


@pytest.mark.parametrize("error", [ImportError("no lib.so"), OSError("bad ELF")])
def test_an_import_or_os_error_of_a_probe_means_unavailable_and_keeps_the_constraints(error):
    toys("TOY_G", unavailable_reason=raising(error))
    constraints, unavailable, cls = backend_verdict("TOY_G", config(head_size=80))
    assert [reason.field for reason in constraints] == ["head_size"]
    assert unavailable == Unavailable(value=f"{type(error).__name__}: {error}")
    assert cls is not None
    assert backend_reasons("TOY_G", config()) == [unavailable]


def test_any_other_error_of_a_probe_propagates():
    toys("TOY_H", unavailable_reason=raising(ZeroDivisionError("its own fault")))
    with pytest.raises(ZeroDivisionError, match="its own fault"):
        select_backend(config(), backend="TOY_H")


def test_a_probe_sees_real_tensors_while_a_model_is_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def probe(cls, device_type):
        return None if torch.ones(2).sum().item() == 2.0 else "cannot add"

    toys("TOY_I", unavailable_reason=classmethod(probe))
    with FakeTensorMode():
        assert select_backend(config(), backend="TOY_I").name == "TOY_I"


# The configuration


def test_no_field_of_a_configuration_has_a_default():
    fields = dataclasses.fields(AttentionSelectorConfig)
    assert all(f.default is f.default_factory is dataclasses.MISSING for f in fields)
    with pytest.raises(TypeError, match="missing"):
        AttentionSelectorConfig(device_type="cpu")


def test_dense_states_each_field_once_and_refuses_unknown_ones():
    asked = config()
    assert dataclasses.replace(asked, causal=False) == config(causal=False)
    with pytest.raises(TypeError, match="has_sink"):
        config(has_sink=True)
    with pytest.raises(TypeError, match="num_kv_heads"):
        AttentionSelectorConfig.dense(device_type="cpu", head_size=64, num_heads=8, dtype=torch.float32)


def test_dense_detects_the_capability_unless_it_is_given(monkeypatch):
    sizes = {"head_size": 64, "num_heads": 8, "num_kv_heads": 2, "dtype": torch.float32}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    dense = AttentionSelectorConfig.dense
    assert dense(device_type="cuda", **sizes).compute_capability == (9, 0)
    assert dense(device_type="cpu", **sizes).compute_capability is None
    given = dense(device_type="cuda", compute_capability=None, **sizes)
    assert given.compute_capability is None


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"head_size": 0}, ValueError, "head_size=0 must be at least 1"),
        ({"num_heads": -1}, ValueError, "num_heads=-1"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0"),
        ({"block_size": 0}, ValueError, "block_size=0"),
        ({"sliding_window": 0}, ValueError, "sliding_window=0"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap=-1.0"),
        ({"logits_soft_cap": float("nan")}, ValueError, "logits_soft_cap=nan"),
        ({"logits_soft_cap": float("inf")}, ValueError, "logits_soft_cap=inf"),
        ({"attn_type": "cross"}, ValueError, "attn_type='cross' is unknown; allowed: decoder"),
        ({"kv_cache_layout": "DHN"}, ValueError, "'DHN' is not a valid KVCacheLayout"),
        ({"dtype": "bfloat16"}, TypeError, "dtype='bfloat16' must be a torch.dtype"),
    ],
)
def test_a_configuration_that_nothing_could_serve_is_refused_at_once(changes, error, match):
    with pytest.raises(error, match=match):
        config(**changes)


def test_strings_stand_for_members_of_the_enums():
    asked = config(attn_type="encoder", kv_cache_layout="HND")
    assert asked.attn_type is AttentionType.ENCODER
    assert asked.kv_cache_layout is KVCacheLayout.HND
    assert asked == config(attn_type=AttentionType.ENCODER, kv_cache_layout=KVCacheLayout.HND)


def test_a_configuration_prints_what_it_asks_for():
    assert str(config(causal=False, has_sinks=True, kv_cache_dtype="fp8")) == (
        "device_type=cpu head_size=64 num_heads=8 num_kv_heads=2 dtype=float32 kv_cache_dtype=fp8 "
        "block_size=16 has_sinks=True causal=False"
    )
