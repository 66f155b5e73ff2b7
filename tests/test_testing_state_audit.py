"""The audit must catch three liars that pass opcheck, and let an honest op pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbackend.testing import AllowedArgument, AllowedWrite, AuditLedger, Fault, audit_op

HIDDEN = torch.zeros(4)
WORKSPACES = {"main": torch.zeros(4)}
NAMESPACE = "attnbackend_audit_test"

SCHEMAS = {
    "honest": "(Tensor x, Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
    "hidden_write": "(Tensor x, Tensor(a!) out) -> ()",
    "hidden_write_in_dict": "(Tensor x, Tensor(a!) out) -> ()",
    "undeclared_write": "(Tensor x, Tensor(a!) out, Tensor cache) -> ()",
    "writes_when_given": "(Tensor x, Tensor(a!) out, Tensor? lse=None) -> ()",
    "over_declared": "(Tensor x, Tensor(a!) out, Tensor(b!) cache) -> ()",
    "past_the_end": "(Tensor x, Tensor(a!) out) -> ()",
    "returns_argument": "(Tensor x) -> Tensor",
    "declares_return": "(Tensor(a) x) -> Tensor(a)",
    "returns_hidden": "(Tensor x) -> Tensor",
    "takes_list": "(Tensor[] xs, Tensor(a!)[] outs) -> ()",
    "resizes": "(Tensor x) -> ()",
}


def honest(x: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    out.copy_(x + 1)
    if lse is not None:
        lse.copy_(x.sum(-1))


def hidden_write(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    HIDDEN.add_(1)


def hidden_write_in_dict(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    WORKSPACES["main"].add_(1)


def undeclared_write(x: Tensor, out: Tensor, cache: Tensor) -> None:
    out.copy_(x)
    cache[0] = 7.0


def writes_when_given(x: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    honest(x, out, lse)


def over_declared(x: Tensor, out: Tensor, cache: Tensor) -> None:
    out.copy_(x)


def past_the_end(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(7.0)


def returns_argument(x: Tensor) -> Tensor:
    return x[:1]


def returns_hidden(x: Tensor) -> Tensor:
    return HIDDEN[:2]


def takes_list(xs: list[Tensor], outs: list[Tensor]) -> None:
    for x, out in zip(xs, outs, strict=True):
        out.copy_(x + 1)


def resizes(x: Tensor) -> None:
    x.untyped_storage().resize_(400)


@pytest.fixture(autouse=True, scope="module")
def toy_ops() -> Iterator[None]:
    library = torch.library.Library(NAMESPACE, "DEF")
    implementations = dict(globals()) | {"declares_return": returns_argument}
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, implementations[name], "CompositeExplicitAutograd")
    yield
    library._destroy()


def op(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def inputs(*names: str) -> list[Tensor]:
    return [torch.full((4,), torch.nan) if name == "out" else torch.rand(4) for name in names]


def faults(name: str, *args: Any, **audit: Any) -> list[tuple[Fault, str]]:
    return [(f.fault, f.where) for f in audit_op(op(name), args, **audit).findings]


# --- one call -------------------------------------------------------------------------------------


def test_an_honest_op_passes_and_is_described() -> None:
    lse = torch.full((1,), torch.nan)
    report = audit_op(op("honest"), inputs("x", "out"), {"lse": lse[0]})
    report.assert_ok()
    assert report.written == report.declared == {"out", "lse"}
    assert report.exercised == {"x", "out", "lse"}


def test_an_honest_op_passes_with_nan_everywhere() -> None:
    x, out = torch.full((4,), torch.nan), torch.zeros(4)
    assert audit_op(op("honest"), (x, out)).ok


def test_writing_a_module_global_is_a_hidden_write() -> None:
    found = faults("hidden_write", *inputs("x", "out"))
    assert found == [(Fault.HIDDEN_WRITE, f"{__name__}.HIDDEN")]


def test_writing_a_tensor_in_a_container_is_a_hidden_write() -> None:
    found = faults("hidden_write_in_dict", *inputs("x", "out"))
    assert found == [(Fault.HIDDEN_WRITE, f"{__name__}.WORKSPACES[...]")]


def test_writing_an_argument_not_declared_mutated_is_found() -> None:
    found = faults("undeclared_write", *inputs("x", "out", "cache"))
    assert found == [(Fault.UNDECLARED_WRITE, "cache")]


def test_an_undeclared_optional_output_is_found_once_it_is_passed() -> None:
    assert faults("writes_when_given", *inputs("x", "out")) == []
    found = faults("writes_when_given", *inputs("x", "out"), torch.zeros(()))
    assert found == [(Fault.UNDECLARED_WRITE, "lse")]


def test_writing_an_argument_that_shares_a_buffer_with_the_output_is_found() -> None:
    """The storage is declared mutated through another view; single bytes tell."""
    buffer = torch.rand(3, 4)
    assert faults("undeclared_write", *buffer) == [(Fault.UNDECLARED_WRITE, "cache")]
    assert faults("honest", buffer[0], buffer[1]) == []


def test_writing_past_the_end_of_a_declared_view_is_found() -> None:
    buffer = torch.zeros(2, 4)
    report = audit_op(op("past_the_end"), (torch.rand(4), buffer[0]))
    assert [f.fault for f in report.findings] == [Fault.UNDECLARED_WRITE]
    assert "outside its elements" in str(report.findings[0])
    with pytest.raises(AssertionError, match="not true to its schema"):
        report.assert_ok()


def test_resizing_an_argument_is_a_write() -> None:
    assert faults("resizes", torch.rand(4)) == [(Fault.UNDECLARED_WRITE, "x")]


def test_returning_a_view_of_an_argument_must_be_declared() -> None:
    assert faults("returns_argument", torch.rand(4)) == [(Fault.UNDECLARED_ALIAS, "x")]
    assert faults("declares_return", torch.rand(4)) == []


def test_returning_a_view_of_hidden_memory_is_found() -> None:
    found = faults("returns_hidden", torch.rand(4))
    assert found == [(Fault.UNDECLARED_ALIAS, f"{__name__}.HIDDEN")]


def test_tensors_in_lists_are_arguments_too() -> None:
    xs, outs = inputs("x", "x"), inputs("out", "out")
    report = audit_op(op("takes_list"), (xs, outs))
    assert report.ok
    assert report.written == {"outs"}


def test_hidden_memory_may_be_allowed_by_name_or_by_tensor() -> None:
    for where in (f"{__name__}.HIDDEN", HIDDEN):
        allow = [AllowedWrite(where, "a counter")]
        assert faults("hidden_write", *inputs("x", "out"), allow=allow) == []
    elsewhere = [AllowedWrite(torch.zeros(4), "another one")]
    assert faults("hidden_write", *inputs("x", "out"), allow=elsewhere) != []


def test_allowing_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        AllowedWrite(HIDDEN, " ")
    with pytest.raises(ValueError, match="needs a reason"):
        AllowedArgument("cache", "")


def test_fake_and_meta_tensors_that_are_alive_do_not_disturb() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(8)
    meta = torch.empty(8, device="meta")
    assert audit_op(op("honest"), inputs("x", "out")).ok
    assert (fake.shape, meta.shape) == ((8,), (8,))


def test_a_packet_or_unknown_argument_is_refused() -> None:
    packet = getattr(torch.ops, NAMESPACE).honest
    with pytest.raises(ValueError, match="must be an OpOverload"):
        audit_op(packet, inputs("x", "out"))
    with pytest.raises(ValueError, match="takes 3 arguments"):
        audit_op(op("honest"), inputs("x", "out"), {"softcap": 1.0})


# --- many calls -----------------------------------------------------------------------------------


def test_the_ledger_passes_an_op_whose_samples_cover_its_schema() -> None:
    ledger = AuditLedger()
    ledger.audit(op("honest"), inputs("x", "out"))
    ledger.audit(op("honest"), [*inputs("x", "out"), torch.full((), torch.nan)])
    verdict = ledger.verdict(op("honest"))
    verdict.assert_ok()
    assert verdict.num_calls == 2


def test_the_ledger_finds_what_is_declared_mutated_but_never_written() -> None:
    ledger = AuditLedger()
    ledger.audit(op("over_declared"), inputs("x", "out", "cache"))
    verdict = ledger.verdict(op("over_declared"))
    assert verdict.over_declared == ("cache",)
    with pytest.raises(AssertionError, match="over-declared: cache is never written"):
        verdict.assert_ok()


def test_one_call_that_writes_is_enough_to_justify_a_declaration() -> None:
    ledger = AuditLedger()
    x = torch.rand(4)
    ledger.audit(op("over_declared"), (x, x.clone(), torch.rand(4)))
    assert ledger.verdict(op("over_declared")).over_declared == ("cache", "out")
    ledger.audit(op("over_declared"), inputs("x", "out", "cache"))
    assert ledger.verdict(op("over_declared")).over_declared == ("cache",)


def test_the_ledger_names_optional_tensors_that_no_sample_passed() -> None:
    ledger = AuditLedger()
    ledger.audit(op("writes_when_given"), inputs("x", "out"))
    assert ledger.verdict(op("writes_when_given")).never_passed == ("lse",)


def test_the_ledger_keeps_findings_of_every_call() -> None:
    ledger = AuditLedger()
    ledger.audit(op("hidden_write"), inputs("x", "out"))
    ledger.audit(op("hidden_write"), inputs("x", "out"))
    assert len(ledger.verdict(op("hidden_write")).findings) == 2


def test_an_excused_argument_is_not_held_against_the_op_until_it_is_outdated() -> None:
    ledger = AuditLedger(excuse=[AllowedArgument("lse", "this backend gives no LSE")])
    ledger.audit(op("honest"), inputs("x", "out"))
    ledger.verdict(op("honest")).assert_ok()
    ledger.audit(op("honest"), [*inputs("x", "out"), torch.full((), torch.nan)])
    assert ledger.verdict(op("honest")).outdated == ("lse",)


def test_excusing_an_argument_that_does_not_exist_is_refused() -> None:
    ledger = AuditLedger(excuse=[AllowedArgument("cash", "typo")])
    with pytest.raises(ValueError, match=r"excused \['cash'\]"):
        ledger.verdict(op("honest"))


def test_an_op_that_was_never_audited_is_not_ok() -> None:
    assert not AuditLedger().verdict(op("honest")).ok
