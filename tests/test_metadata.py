"""The batch of a step: no field is lost on the way, whatever is cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from toy_backends import ToyBuilder

from attnbackend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

QUERY_LENS = (3, 1, 0, 4, 2)
TOKENS, REQS = 10, 5
LENGTH = {"reqs": REQS, "reqs+1": REQS + 1, "tokens": TOKENS}


@dataclass(frozen=True, kw_only=True)
class Extended(CommonAttentionMetadata):
    """A subclass whose fields the base knows nothing of."""

    lora_ids: Tensor | None = field(default=None, metadata={"axis": "reqs"})
    weights: Tensor | None = field(default=None, metadata={"axis": "tokens"})
    table: Tensor | None = field(default=None, metadata={"axis": None})
    note: str = "kept"


def fields_along_axes(cls):
    return [f for f in dataclasses.fields(cls) if f.metadata.get("axis")]


def random_tensor(f):
    length = LENGTH[f.metadata["axis"]]
    if f.name.startswith("query_start_loc"):
        return torch.tensor((0, *torch.tensor(QUERY_LENS).cumsum(0)), dtype=torch.int32)
    shape = (length, 7) if f.name == "block_table" else (length,)
    return torch.randint(1, 1000, shape, dtype=torch.int32)


def full(cls=Extended, **changes):
    tensors = {f.name: random_tensor(f) for f in fields_along_axes(cls)}
    scalars = {"num_reqs": REQS, "num_actual_tokens": TOKENS, "max_query_len": 4, "max_seq_len": 99}
    return cls(**{**tensors, **scalars, **changes})


def rows_of(f, reqs, tokens):
    plus_1 = slice(reqs.start, reqs.stop + 1)
    return {"reqs": reqs, "reqs+1": plus_1, "tokens": tokens}[f.metadata["axis"]]


@pytest.mark.parametrize("cls", [CommonAttentionMetadata, Extended])
def test_every_tensor_field_states_its_axis(cls):
    tensors = [f for f in dataclasses.fields(cls) if "Tensor" in str(f.type)]
    assert len(tensors) >= 9
    assert all("axis" in f.metadata for f in tensors)


@pytest.mark.parametrize("cls", [CommonAttentionMetadata, Extended])
@pytest.mark.parametrize(("reqs", "tokens"), [(5, 10), (3, 4), (1, 3), (0, 0)])
def test_unpadded_cuts_every_field_to_its_axis(cls, reqs, tokens):
    whole = full(cls)
    cut = whole.unpadded(reqs, tokens)
    assert type(cut) is cls
    assert (cut.num_reqs, cut.num_actual_tokens) == (reqs, tokens)
    for f in fields_along_axes(cls):
        rows = rows_of(f, slice(0, reqs), slice(0, tokens))
        assert torch.equal(getattr(cut, f.name), getattr(whole, f.name)[rows]), f.name


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 4), (2, 3), (4, 5), (3, 3)])
def test_requests_cuts_every_field_and_starts_at_zero(start, stop):
    whole = full(table=torch.arange(3), note="mine", causal=False)
    part = whole.requests(start, stop)
    first, last = (sum(QUERY_LENS[:i]) for i in (start, stop))
    for f in fields_along_axes(Extended):
        wanted = getattr(whole, f.name)[rows_of(f, slice(start, stop), slice(first, last))]
        shift = first if f.name.startswith("query_start_loc") else 0
        assert torch.equal(getattr(part, f.name), wanted - shift), f.name
    assert (part.num_reqs, part.num_actual_tokens) == (stop - start, last - first)
    assert part.max_query_len == max(QUERY_LENS[start:stop], default=0)
    assert part.query_start_loc[0] == 0
    assert (part.note, part.causal, part.max_seq_len) == ("mine", False, 99)
    assert torch.equal(part.table, torch.arange(3))


def test_cutting_leaves_the_original_as_it_was():
    whole = full()
    before = {f.name: getattr(whole, f.name).clone() for f in fields_along_axes(Extended)}
    whole.requests(1, 4)
    whole.unpadded(2, 4)
    assert all(torch.equal(getattr(whole, name), x) for name, x in before.items())


@pytest.mark.parametrize("name", [f.name for f in fields_along_axes(Extended) if f.default is None])
def test_a_field_that_is_not_given_stays_so(name):
    cut = full(**{name: None}).unpadded(2, 4)
    assert getattr(cut, name) is None


def test_requests_without_the_host_copy_reads_the_device():
    part = full(query_start_loc_cpu=None).requests(1, 4)
    assert part.query_start_loc.tolist() == [0, 1, 1, 5]
    assert part.query_start_loc_cpu is None


@pytest.mark.parametrize(
    ("cut", "match"),
    [
        (lambda m: m.unpadded(6, 4), "num_reqs=6 is outside 0..5"),
        (lambda m: m.unpadded(-1, 4), "num_reqs=-1 is outside"),
        (lambda m: m.unpadded(2, 11), r"num_tokens \(of slot_mapping\)=11 is outside 0..10"),
        (lambda m: m.requests(0, 6), "stop=6 is outside 0..5"),
        (lambda m: m.requests(4, 2), "start=4 is outside 0..2"),
        (lambda m: m.requests(-2, 2), "start=-2 is outside 0..2"),
    ],
)
def test_counts_beyond_what_is_held_are_refused(cut, match):
    with pytest.raises(ValueError, match=match):
        cut(full())


def test_tokens_beyond_a_field_of_a_subclass_are_refused_too():
    with pytest.raises(ValueError, match="of weights"):
        full(slot_mapping=None, positions=None).unpadded(2, 11)


def test_replace_refuses_a_name_that_does_not_exist():
    with pytest.raises(TypeError, match="max_query_length"):
        full().replace(max_query_length=3)


def test_replace_changes_only_what_is_named():
    whole = full()
    changed = whole.replace(causal=False)
    names = [f.name for f in dataclasses.fields(whole) if f.name != "causal"]
    assert all(getattr(changed, name) is getattr(whole, name) for name in names)
    assert changed.causal is False


def test_a_tensor_of_a_subclass_that_states_no_axis_is_refused_rather_than_forgotten():
    @dataclass(frozen=True, kw_only=True)
    class Forgetful(CommonAttentionMetadata):
        extra: Tensor | None = None

    with pytest.raises(TypeError, match=r"Forgetful\.extra is a tensor.*axis"):
        full(Forgetful, extra=torch.ones(REQS)).unpadded(2, 4)


def test_from_tensors_bounds_the_batch_by_its_shapes():
    starts, lens = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([9, 3])
    table = torch.zeros(2, 6, dtype=torch.int32)
    m = CommonAttentionMetadata.from_tensors(starts, lens, table, num_tokens=5, block_size=16)
    assert (m.num_reqs, m.num_actual_tokens, m.max_query_len, m.max_seq_len) == (2, 5, 5, 96)
    assert m.query_start_loc is starts
    assert m.slot_mapping is None


def test_host_copies_are_used_where_they_are_given():
    host = torch.arange(REQS + 1, dtype=torch.int32)
    m = full(query_start_loc_cpu=host)
    assert m.host_query_start_loc() is host
    assert m.host_seq_lens() is m.seq_lens_cpu
    without = full(seq_lens_cpu=None)
    assert torch.equal(without.host_seq_lens(), without.seq_lens)


def plan_for(common):
    return AttentionMetadata(common=common)


def test_a_plan_is_for_the_tensors_that_it_was_made_from():
    common = full()
    plan = plan_for(common)
    assert plan.is_for(common.query_start_loc, common.seq_lens, common.block_table)
    view = common.seq_lens[:]
    assert plan.is_for(common.query_start_loc, view, common.block_table)


@pytest.mark.parametrize("changed", ["query_start_loc", "seq_lens", "block_table"])
def test_a_plan_is_not_for_equal_tensors_elsewhere_nor_for_a_part(changed):
    common = full()
    tensors = {n: getattr(common, n) for n in ("query_start_loc", "seq_lens", "block_table")}
    for other in (tensors[changed].clone(), tensors[changed][:-1]):
        assert not plan_for(common).is_for(**{**tensors, changed: other})


def test_a_builder_without_build_cannot_be_made():
    class NoBuild(AttentionMetadataBuilder):
        pass

    with pytest.raises(TypeError, match="build"):
        NoBuild(None, None, None, torch.device("cpu"))


def test_the_plan_to_capture_is_the_plan_of_the_batch():
    common = full()
    plan = ToyBuilder(None, None, None, torch.device("cpu")).build_for_cudagraph_capture(common)
    assert plan.common is common
