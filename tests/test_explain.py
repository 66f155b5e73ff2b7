"""The answer to why: one row a backend, with what stands against it and what would change that."""

from __future__ import annotations

import json
import re

import pytest
from toy_backends import config, make_backend

from attnbackend import backend_names, explain, register_backend, registry_scope, set_config
from attnbackend.explanation import BackendVerdict


@pytest.fixture(autouse=True)
def _scope():
    with registry_scope():
        yield


def toy(name, **claims):
    return register_backend()(make_backend(name, **claims))


@pytest.fixture
def cpu_order():
    """Toys in the whole order of a CPU; the second has no library, the third alone has sinks."""
    toy("CPU_ATTN")
    toy("TORCH_SDPA", unavailable_reason=classmethod(lambda cls, device: "no library"))
    toy("FLEX_ATTENTION", supports_sinks=True)


def test_each_known_backend_has_one_row_those_of_the_order_first(cpu_order):
    toy("MY_TOY")
    rows = explain(config()).rows
    names = [row.name for row in rows]
    assert sorted(names) == sorted(backend_names())
    assert names[:3] == ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"]
    assert [row.priority for row in rows[:4]] == [1, 2, 3, None]


def test_verdicts_and_reasons_of_an_automatic_choice(cpu_order):
    toy("MY_TOY", supported_device_types=("cuda",))
    e = explain(config(has_sinks=True))
    assert (e.selected, e.error, e.forced_by) == ("FLEX_ATTENTION", None, None)
    assert "CPU_ATTN, TORCH_SDPA cannot serve" in e.because
    assert e.row("FLEX_ATTENTION").verdict is BackendVerdict.SELECTED
    assert e.row("FLEX_ATTENTION").reasons == ()
    first = e.row("CPU_ATTN")
    assert (first.verdict, first.unavailable) == (BackendVerdict.REFUSED, None)
    assert [reason.field for reason in first.constraints] == ["has_sinks"]
    assert [str(change) for change in first.changes] == ["has_sinks True -> False"]
    second = e.row("TORCH_SDPA")
    assert second.verdict is BackendVerdict.UNAVAILABLE
    assert [reason.field for reason in second.constraints] == ["has_sinks"]
    assert str(second.unavailable) == "unavailable: no library"
    assert len(second.reasons) == 2
    mine = e.row("MY_TOY")
    assert mine.verdict is BackendVerdict.REFUSED
    assert mine.changes == ()


def test_one_that_could_serve_but_comes_later_is_eligible(cpu_order):
    e = explain(config())
    assert e.selected == "CPU_ATTN"
    assert e.row("FLEX_ATTENTION").verdict is BackendVerdict.ELIGIBLE


@pytest.mark.parametrize(
    ("asked", "change"),
    [
        ({"block_size": 8}, "block_size 8 -> 16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2 -> auto"),
        ({"device_type": "mps"}, "device_type mps -> cpu"),
        ({"head_size": 96}, "head_size 96 -> 64"),
    ],
)
def test_changes_name_the_field_that_alone_stands_in_the_way(asked, change):
    toy("MY_TOY")
    assert change in map(str, explain(config(**asked)).row("MY_TOY").changes)


def test_a_member_without_a_class_is_not_imported_and_has_no_reasons():
    row = explain(config()).row("CUSTOM")
    assert row.verdict is BackendVerdict.NOT_IMPLEMENTED
    assert (row.reasons, row.changes, row.op_names) == ((), (), ())


def test_ops_and_class_are_named():
    toy("Named-Toy")
    row = explain(config()).row("Named-Toy")
    assert row.op_names == ("attnbackend::named_toy_forward",)
    assert row.class_path == "toy_backends.ToyBackend"


def test_ops_of_a_backend_with_a_writer_of_its_own_are_both_named():
    from toy_backends import ToyImpl

    class Writer(ToyImpl):
        def kv_cache_update(self, key, value, kv_cache, slot_mapping, tensors):
            pass

    toy("MY_WRITER", impl=Writer)
    assert explain(config()).row("MY_WRITER").op_names == (
        "attnbackend::my_writer_forward",
        "attnbackend::my_writer_kv_cache_update",
    )


def test_a_caller_who_forces_is_named(cpu_order):
    e = explain(config(), backend="FLEX_ATTENTION")
    assert (e.selected, e.forced_name) == ("FLEX_ATTENTION", "FLEX_ATTENTION")
    assert (e.because, e.forced_by) == ("named by the caller", "the caller")
    assert e.row("CPU_ATTN").verdict is BackendVerdict.ELIGIBLE


def test_the_configuration_and_the_environment_that_force_are_named(cpu_order, monkeypatch):
    monkeypatch.setenv("ATTNBACKEND", "flex_attention")
    e = explain(config())
    assert (e.selected, e.forced_name) == ("FLEX_ATTENTION", "flex_attention")
    assert "ATTNBACKEND" in e.forced_by
    with set_config(backend="CPU_ATTN"):
        assert "set_config" in explain(config()).forced_by


@pytest.mark.parametrize(
    ("asked", "backend", "error"),
    [
        ({"has_sinks": True}, "CPU_ATTN", "has_sinks=True"),
        ({}, "CPU_ATN", "did you mean CPU_ATTN"),
        ({"device_type": "mps"}, None, "no order is known"),
        ({"head_size": 96}, None, "head_size=96"),
    ],
)
def test_a_failed_selection_is_part_of_the_explanation(cpu_order, asked, backend, error):
    e = explain(config(**asked), backend=backend)
    assert (e.selected, e.because) == (None, None)
    assert error in e.error
    assert all(row.verdict is not BackendVerdict.SELECTED for row in e.rows)
    assert "selected:   none" in str(e)


def test_a_backend_at_fault_does_not_hide_the_others(cpu_order):
    def probe(cls, device_type):
        raise ZeroDivisionError("its own fault")

    toy("MY_FAULTY", unavailable_reason=classmethod(probe))
    register_backend("MY_LOST", "no_such_module.Toy")
    e = explain(config())
    assert e.selected == "CPU_ATTN"
    faulty = e.row("MY_FAULTY")
    assert faulty.verdict is BackendVerdict.UNAVAILABLE
    assert "ZeroDivisionError: its own fault" in str(faulty.unavailable)
    assert "No module named 'no_such_module'" in str(e.row("MY_LOST").unavailable)
    assert "ZeroDivisionError" in explain(config(), backend="MY_FAULTY").error


def test_explaining_changes_nothing(cpu_order):
    from attnbackend.registry import registry_generation

    before = registry_generation()
    first, second = explain(config()), explain(config())
    assert first == second
    assert registry_generation() == before


def test_the_dict_is_json_and_says_the_same(cpu_order):
    e = explain(config(has_sinks=True, block_size=8, compute_capability=(9, 0)))
    d = json.loads(json.dumps(e.to_dict(), allow_nan=False))
    assert d == e.to_dict()
    assert d["config"]["dtype"] == "float32"
    assert d["config"]["compute_capability"] == [9, 0]
    assert (d["selected"], d["error"]) == (None, e.error)
    assert [row["name"] for row in d["backends"]] == [row.name for row in e.rows]
    first = d["backends"][0]
    assert (first["name"], first["verdict"], first["priority"]) == ("CPU_ATTN", "refused", 1)
    assert first["constraints"][0] == {
        "field": "block_size", "value": 8, "allowed": "multiples of 16",
        "text": "block_size=8 (allowed: multiples of 16)",
    }  # fmt: skip
    flex = d["backends"][2]
    assert flex["changes"] == [{"field": "block_size", "old": 8, "new": 16, "text": "block_size 8 -> 16"}]
    assert d["backends"][1]["unavailable"]["value"] == "no library"


def test_the_table_is_aligned_and_complete(cpu_order):
    register_backend("CPU_ATTN", "no_such_module.Toy", override=True)
    text = str(explain(config(has_sinks=True, block_size=8), backend=None))
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    (header,) = [line for line in lines if line.startswith("order")]
    place = {name: header.index(name) for name in ("backend", "verdict", "why")}
    (flex,) = [line for line in lines if re.search("FLEX_ATTENTION +refused", line)]
    assert flex[: place["backend"]].strip() == "3"
    assert flex[place["backend"] :].startswith("FLEX_ATTENTION")
    assert flex[place["verdict"] :].startswith("refused")
    assert flex[place["why"] :] == "block_size=8 (allowed: multiples of 16)"
    following = lines[lines.index(flex) + 1]
    assert following == " " * place["why"] + "would accept block_size 8 -> 16"
    assert "unavailable: ModuleNotFoundError: No module named 'no_such_module'" in text
    assert any(line.startswith("not implemented:") and "FLASH_ATTN" in line for line in lines)
    assert not any("not implemented" in line and "CPU_ATTN" in line for line in lines)
