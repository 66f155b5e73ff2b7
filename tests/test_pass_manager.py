"""The pass manager: order, accounts, strictness, dumps, plugins, and what no pass may do to a cache."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_models import make_stack, random_batch, reset_caches

import attnbackend
from attnbackend import AttentionSelectorConfig
from attnbackend.fx_passes import (
    CacheOrderError,
    Change,
    GraphPass,
    Measured,
    MeasuredTable,
    MergeLinears,
    PassConfig,
    PassManager,
    PassReport,
    SelectBackend,
    ShapeRange,
    Site,
    Stage,
    diff_html,
    graph_text,
    plugins,
)
from attnbackend.fx_passes.cache_order import cache_history
from attnbackend.fx_passes.nodes import find_ops
from attnbackend.layers import BatchTensors

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def exported(
    num_layers: int = 1, decompose: bool = False, max_tokens: int = 512
) -> torch.export.ExportedProgram:
    stack = make_stack(num_layers=num_layers)
    tokens = torch.export.Dim("tokens", min=2, max=max_tokens)
    dynamic = ({0: tokens}, BatchTensors({0: tokens}, None, None, None))  # type: ignore[arg-type]
    program = torch.export.export(stack, random_batch(1), dynamic_shapes=dynamic)
    return program.run_decompositions() if decompose else program


class Named(GraphPass):
    """Does nothing but say that it ran."""

    def __init__(self, name: str, stage: Stage, log: list[str]) -> None:
        self.name, self.stage, self._log = name, stage, log

    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        self._log.append(self.name)
        return PassReport(self.name)


class Vandal(GraphPass):
    """A pass that does to the graph what it is told."""

    name = "vandal"
    stage = Stage.CLEAN

    def __init__(self, damage: Callable[[torch.fx.Graph], None]) -> None:
        self._damage = damage

    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        self._damage(graph_module.graph)
        return PassReport(self.name, (Change("a", "b", "c", "d"),))


def test_stages_come_in_their_order_whatever_the_list_s() -> None:
    log: list[str] = []
    given = [
        ("d", Stage.CLEAN),
        ("c", Stage.FUSE),
        ("b", Stage.SELECT),
        ("c2", Stage.FUSE),
        ("a", Stage.RECOGNISE),
    ]
    PassManager([Named(name, stage, log) for name, stage in given]).run(exported().graph_module)
    assert log == ["a", "b", "c", "c2", "d"]


def test_a_pass_that_does_not_apply_says_why_and_is_not_run() -> None:
    class ForFew(Named):
        def applies(self, config: PassConfig, shape_range: ShapeRange) -> list[str]:
            most = shape_range.max_tokens
            assert config.device_type == "cpu"
            return [] if most is not None and most <= 64 else [f"{shape_range}; it pays up to 64"]

    log: list[str] = []
    for most, ran in ((512, []), (64, ["few"])):
        PassManager([ForFew("few", Stage.FUSE, log)]).run(exported(max_tokens=most).graph_module)
        assert log == ran
    assert str(PassReport("few", not_applied=("2 to 512 tokens; it pays up to 64",))).endswith(
        "it pays up to 64"
    )
    PassManager([ForFew("few", Stage.FUSE, log)]).run(exported().graph_module, ShapeRange(1, 8))
    assert log == ["few", "few"]


def test_strict_makes_nothing_done_an_error() -> None:
    graph_module = exported().graph_module
    PassManager([SelectBackend("TORCH_SDPA")], strict=True).run(graph_module)
    with pytest.raises(
        ValueError, match=r"changed nothing in a graph of 2 to 512 tokens(.|\n)*merge_linears: 0"
    ):
        PassManager([MergeLinears()], strict=True).run(graph_module)
    compiled = attnbackend.compile(
        make_stack(1), compiler="eager", passes=[SelectBackend(), MergeLinears()], strict=True, fullgraph=True
    )
    with pytest.raises(Exception, match="strict=True"):
        compiled(*random_batch(1))


def test_what_nearly_matched_is_accounted_for() -> None:
    graph_module = exported().graph_module
    PassManager([SelectBackend("TORCH_SDPA")]).run(graph_module)
    (report,) = PassManager([SelectBackend("CPU_ATTN")]).run(graph_module)
    assert "attention: no swap: the graph names TORCH_SDPA already" in str(report)


def test_graphs_are_written_before_and_after(tmp_path: Path) -> None:
    manager = PassManager([SelectBackend("TORCH_SDPA")], dump_folder=tmp_path / "dumps")
    graph_module = exported().graph_module
    before = graph_text(graph_module)
    manager.run(graph_module)
    manager.run(exported().graph_module)
    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert names == [
        f"00{i}_0_select_backend.{end}" for i in (0, 1) for end in ("after.txt", "before.txt", "html")
    ]
    texts = {name: (tmp_path / "dumps" / name).read_text() for name in names}
    assert texts[names[1]] == f"{before}\n"
    for text in ("torch_sdpa_forward", "named by the caller"):
        assert text in texts[names[0]]
    for text in ("diff_chg", "<title>000_0_select_backend</title>"):
        assert text in texts[names[2]]


@pytest.mark.parametrize(
    "name", ["a/b", "../up", "/etc/x", "a\\b", "c:d", "x.before", "", "n\0l", "ä<b>&\udc80", "long" * 99]
)
def test_every_name_of_a_pass_has_its_files(name: str, tmp_path: Path) -> None:
    """Its own, in the folder: another pass of nearly that name, right behind it, gets others."""
    names = [name, name.replace("/", "_"), name + "_"]
    passes = [Named(n, Stage.FUSE, []) for n in names]
    PassManager(passes, dump_folder=tmp_path / "dumps").run(exported().graph_module)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) == 9
    for place, path in enumerate(written[2::3]):
        assert path.parent.name == "dumps"
        assert path.name.startswith(f"000_{place}_")
        assert path.suffix == ".html"
    texts = [(tmp_path / path).read_text() for path in written[::3]]
    assert [text.splitlines()[-1] for text in texts] == [
        f"{n}: 0 changes".encode(errors="backslashreplace").decode().splitlines()[-1] for n in names
    ]


def test_nothing_reaches_html_as_markup() -> None:
    evil = "</title></td><script>alert('x')</script>&amp;"
    page = diff_html(f"a = {evil}", f"b = {evil}", evil)
    assert "<script" not in page
    assert page.count("</title>") == 1
    assert f"<title>{html.escape(evil)}</title>" in page
    assert "&amp;amp;" in page


def writes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [op.node for op in find_ops(graph) if "slot_mapping" in op.arguments()]


def readers(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [op.node for op in find_ops(graph) if "slot_mapping" not in op.arguments()]


def drop(graph: torch.fx.Graph) -> None:
    graph.erase_node(writes(graph)[-1])


def double(graph: torch.fx.Graph) -> None:
    with graph.inserting_after(writes(graph)[0]):
        graph.node_copy(writes(graph)[0], lambda node: node)


def move_behind_its_reader(graph: torch.fx.Graph) -> None:
    readers(graph)[0].append(writes(graph)[0])


def write_other_slots(graph: torch.fx.Graph) -> None:
    node = writes(graph)[0]
    node.replace_input_with(node.args[3], next(n for n in graph.nodes if "seq_lens" in n.name))  # type: ignore[arg-type]


def write_the_other_s_cache(graph: torch.fx.Graph) -> None:
    first, second = writes(graph)
    second.replace_input_with(second.args[2], first.args[2])  # type: ignore[arg-type]


def read_before(graph: torch.fx.Graph) -> None:
    """A reader that is not attnbackend's, put before the write."""
    with graph.inserting_before(writes(graph)[0]):
        graph.call_function(torch.ops.aten.sum.default, (writes(graph)[0].args[2],))


@pytest.mark.parametrize(
    "damage", [drop, double, move_behind_its_reader, write_other_slots, write_the_other_s_cache, read_before]
)
def test_a_pass_that_harms_a_cache_is_found_out(damage: Callable[[torch.fx.Graph], None]) -> None:
    with pytest.raises(CacheOrderError, match="'vandal' changed what is written to a KV cache"):
        PassManager([Vandal(damage)]).run(exported(num_layers=2).graph_module)


def test_harm_that_a_pass_does_not_report_is_found_out() -> None:
    class Silent(Vandal):
        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            super().run(graph_module)
            return PassReport(self.name)

    with pytest.raises(CacheOrderError):
        PassManager([Silent(drop)]).run(exported().graph_module)


def test_a_pass_typed_at_a_prompt_has_a_fingerprint() -> None:
    typed: dict[str, Any] = {"__name__": "__main__", "PluginPass": PluginPass}
    exec("class Typed(PluginPass):\n    name = 'typed'", typed)
    assert "Typed of process" in typed["Typed"]().fingerprint()


def skip_the_write(graph: torch.fx.Graph) -> None:
    """The reader gets the cache as it was before the write."""
    write, reader = writes(graph)[0], readers(graph)[0]
    (old,) = write.kwargs["_all_bases"]  # type: ignore[misc]
    reader.update_kwarg("kv_cache", old)


def forget_the_end(graph: torch.fx.Graph) -> None:
    """The last version of a cache is not handed back."""
    write = writes(graph)[0]
    (old,) = write.kwargs["_all_bases"]  # type: ignore[misc]
    output = graph.output_node()
    output.args = (tuple(old if a.args and a.args[0] is write else a for a in output.args[0]),)  # type: ignore


@pytest.mark.parametrize("damage", [skip_the_write, forget_the_end])
def test_harm_to_a_functionalised_graph_is_found_out(damage: Callable[[torch.fx.Graph], None]) -> None:
    with pytest.raises(CacheOrderError, match="vandal"):
        PassManager([Vandal(damage)]).run(exported(decompose=True).graph_module)


def test_both_forms_of_a_graph_have_one_history() -> None:
    plain, functional = (cache_history(exported(2, decompose=d).graph_module) for d in (False, True))

    def told(history: Any) -> Any:
        return sorted((e.version, e.what.split("slots")[0]) for e in history.events.elements())

    assert told(plain) == told(functional) == [(0, "write of the ")] * 2 + [(1, "read")] * 2
    assert set(plain.final.values()) == set(functional.final.values()) == {1}


def test_harmless_changes_pass() -> None:
    def harmless(graph: torch.fx.Graph) -> None:
        with graph.inserting_after(readers(graph)[0]):
            graph.call_function(torch.ops.aten.neg.default, (readers(graph)[0].args[0],))

    PassManager([Vandal(harmless)]).run(exported().graph_module)


def test_installed_passes_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    group = plugins.PASS_ENTRY_POINT_GROUP
    point = EntryPoint("mine", f"{__name__}:PluginPass", group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    compiled = attnbackend.compile(make_stack(1), compiler="eager", fullgraph=True)
    compiled(*random_batch(1))
    assert [r.pass_name for r in compiled.attnbackend_compiler.reports] == ["select_backend", "from_a_plugin"]


class PluginPass(GraphPass):
    name = "from_a_plugin"
    stage = Stage.CLEAN

    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        return PassReport(self.name)


class Nameless(GraphPass):
    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        return PassReport("nameless")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PluginPass, "is no GraphPass: <class"),
        ("remove_no_ops", "is no GraphPass: 'remove_no_ops'"),
        (Nameless(), "has no name"),
    ],
)
def test_what_is_no_pass_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"passes\[1\] {message}"):
        PassManager([SelectBackend(), given])


def _out_of_order(graph: torch.fx.Graph) -> PassReport:
    call = next(node for node in graph.nodes if node.op == "call_method")
    next(iter(call.users)).append(call)
    return PassReport("careless", (Change("a", "b", "c", "d"),))


@pytest.mark.parametrize(
    ("does", "message"),
    [(_out_of_order, "left a graph that cannot run"), (lambda graph: None, "returned None; expected a")],
)
def test_a_careless_pass_is_named(does: Callable[[torch.fx.Graph], Any], message: str) -> None:
    class Careless(GraphPass):
        name = "careless"

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            return does(graph_module.graph)  # type: ignore[no-any-return]

    compiled = attnbackend.compile(lambda x: x.sin() + 1, passes=[Careless()], compiler="eager")
    with pytest.raises(Exception, match=f"backend='attnbackend'(.|\n)*pass 'careless' {message}"):
        compiled(torch.ones(3))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("nowhere_at_all:Pass", ImportError, "'mine' = 'nowhere_at_all:Pass'(.|\n)*repair or uninstall"),
        ("builtins:dict", TypeError, "expected a GraphPass"),
    ],
)
def test_a_broken_plugin_is_an_error(
    monkeypatch: pytest.MonkeyPatch, value: str, error: type[Exception], message: str
) -> None:
    point = EntryPoint("mine", value, plugins.PASS_ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    with pytest.raises(error, match=message):
        plugins.installed_passes()


def test_a_measured_table_decides(tmp_path: Path) -> None:
    table = [
        {"where": {"head_size": 64}, "times_us": {"CPU_ATTN": 1.0}},
        {"where": {"head_size": 32, "dtype": "float32"}, "max_tokens": 30, "times_us": {"CPU_ATTN": 1.0}},
        {"where": {"head_size": 32}, "times_us": {"CPU_ATTN": 9.0, "TORCH_SDPA": 5.0, "FLASHINFER": 2.0}},
    ]
    (tmp_path / "table.json").write_text(json.dumps(table))
    choice = SelectBackend(MeasuredTable.from_json(tmp_path / "table.json"))
    (report,) = PassManager([choice]).run(exported().graph_module)
    assert {change.after for change in report.changes} >= {"attnbackend::torch_sdpa_forward"}
    assert "first of the given order; FLASHINFER cannot serve" in str(report)
    (report,) = PassManager([choice]).run(exported(max_tokens=30).graph_module)
    assert {change.after for change in report.changes} >= {"attnbackend::cpu_attn_forward"}
    assert PassManager([choice]).uuid() != PassManager([SelectBackend(MeasuredTable(()))]).uuid()


def test_an_order_that_nobody_of_can_serve_is_an_error_with_reasons() -> None:
    table = MeasuredTable((Measured({"FLASHINFER": 1.0}, {}),))
    with pytest.raises(ValueError, match=r"no backend of the given order(.|\n)*FLASHINFER: device_type=cpu"):
        PassManager([SelectBackend(table)]).run(exported().graph_module)


def test_a_table_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps([{"where": {"head_dim": 1}, "times_us": {}}]))
    with pytest.raises(ValueError, match="'head_dim' is no field"):
        MeasuredTable.from_json(tmp_path / "table.json")


def test_a_user_s_order_sees_layer_and_tokens() -> None:
    seen: list[Site] = []

    class ByLayer:
        def rank(self, config: AttentionSelectorConfig, site: Site) -> list[str]:
            seen.append(site)
            return ["TORCH_SDPA"] if "layers.0" in str(site.layer) else []

    (report,) = PassManager([SelectBackend(ByLayer())]).run(exported(num_layers=2).graph_module)
    attention = [change.after for change in report.changes if change.after.endswith("_forward")]
    assert attention == ["attnbackend::torch_sdpa_forward", "attnbackend::cpu_attn_forward"]
    assert [site.tokens for site in seen] == [ShapeRange(2, 512)] * 2


def test_a_program_whose_outputs_were_rewritten_still_runs() -> None:
    """An output's name is in the signature of an exported program."""

    def renew_the_last(graph: torch.fx.Graph) -> None:
        (last,) = graph.output_node().args[0]  # type: ignore[misc]
        with graph.inserting_after(last):
            again = graph.node_copy(last, lambda node: node)
        last.replace_all_uses_with(again)
        graph.erase_node(last)

    program = exported()
    x, batch = random_batch(1)
    stack = make_stack(1)
    reset_caches(stack)
    PassManager([Vandal(renew_the_last)]).run_on(program)
    torch.testing.assert_close(program.module()(x, batch), stack(x, batch))
