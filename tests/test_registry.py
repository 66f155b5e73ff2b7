"""Names, registrations, overrides and plugins."""

from __future__ import annotations

import contextlib
import enum
import json
import subprocess
import sys

import pytest
from toy_backends import config, make_backend

from attnbackend import (
    AttentionBackend,
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
    backend_names,
    clear_override,
    register_backend,
    registry_scope,
    resolve_backend,
    select_backend,
)
from attnbackend.registry import any_case_name, is_implemented, is_overridden, registry_generation


@pytest.fixture(autouse=True)
def _scope():
    with registry_scope():
        yield


MEMBERS = [*AttentionBackendEnum, *MambaAttentionBackendEnum]
ABSENT = [m for m in MEMBERS if not m.is_implemented()]


# Members


def test_every_member_is_listed_once():
    keys = [member.key for member in MEMBERS]
    assert len(set(keys)) == len(keys)
    assert backend_names()[: len(keys)] == keys


@pytest.mark.parametrize("members", [AttentionBackendEnum, MambaAttentionBackendEnum])
def test_no_two_names_are_one_member(members):
    values = [member.value for member in members.__members__.values()]
    assert len(set(values)) == len(values) == len(members)
    assert not [name for name, member in members.__members__.items() if member.name != name]


def test_the_custom_members_of_the_two_enums_have_keys_of_their_own():
    assert AttentionBackendEnum.CUSTOM.key == "CUSTOM"
    assert MambaAttentionBackendEnum.CUSTOM.key == "MAMBA_CUSTOM"


def test_equal_values_would_have_been_one_member():
    """The fault that unique values avoid."""

    class Equal(enum.Enum):
        TORCH_SDPA = ""
        CUSTOM = ""  # noqa: PIE796

    assert Equal.CUSTOM is Equal.TORCH_SDPA


def test_registering_custom_leaves_torch_sdpa_alone():
    builtin = resolve_backend("TORCH_SDPA")
    mine = register_backend(AttentionBackendEnum.CUSTOM)(make_backend("CUSTOM"))
    assert resolve_backend(AttentionBackendEnum.CUSTOM) is mine
    assert resolve_backend(AttentionBackendEnum.TORCH_SDPA) is builtin
    chosen = select_backend(config(), backend="TORCH_SDPA")
    assert chosen.backend is builtin
    assert select_backend(config(), backend=AttentionBackendEnum.CUSTOM).backend is mine


@pytest.mark.parametrize("member", ABSENT, ids=lambda m: m.key)
def test_a_member_without_a_class_says_so(member):
    with pytest.raises(ValueError, match=rf"'{member.key}' is not implemented.*TORCH_SDPA"):
        member.get_class()


@pytest.mark.parametrize("member", [m for m in MEMBERS if m not in ABSENT], ids=lambda m: m.key)
def test_a_member_with_a_class_resolves_to_it_or_says_what_is_missing(member):
    try:
        cls = member.get_class()
    except ImportError:
        pytest.skip(f"{member.key} needs a library that is not installed")
    assert cls.get_name() == member.key
    assert f"{cls.__module__}.{cls.__qualname__}" == member.get_path()


def test_an_unknown_name_is_refused_with_near_names_of_any_case():
    with pytest.raises(ValueError, match=r"'torch_spda'; did you mean TORCH_SDPA.*Allowed: .*CPU_"):
        resolve_backend("torch_spda")


def test_a_name_near_to_nothing_lists_what_is_allowed():
    with pytest.raises(ValueError, match=r"'zzzz'\. Allowed: .*TORCH_SDPA"):
        resolve_backend("zzzz")


# Registration


def test_a_decorator_takes_the_name_of_the_class():
    mine = register_backend()(make_backend("TOY_A"))
    assert resolve_backend("TOY_A") is mine
    assert "TOY_A" in backend_names()
    assert is_implemented("TOY_A")
    assert not is_overridden("TOY_A")


def test_a_path_is_imported_only_when_the_backend_is_wanted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lazy_toy.py").write_text(
        "from toy_backends import make_backend\nToy = make_backend('TOY_LAZY')\n"
        "class Outer:\n    Inner = make_backend('TOY_INNER')\n"
    )
    register_backend("TOY_LAZY", "lazy_toy.Toy")
    register_backend("TOY_INNER", "lazy_toy:Outer.Inner")
    assert "lazy_toy" not in sys.modules
    assert resolve_backend("TOY_LAZY").get_name() == "TOY_LAZY"
    assert resolve_backend("TOY_INNER").get_name() == "TOY_INNER"
    sys.modules.pop("lazy_toy")


@pytest.mark.parametrize("path", ["no_such_module.Toy", "toy_backends.NoSuchClass"])
def test_a_path_that_leads_nowhere_is_an_import_error_that_names_it(path):
    register_backend("TOY_LOST", path)
    with pytest.raises(ImportError, match=path.split(".")[path.startswith("toy")]):
        resolve_backend("TOY_LOST")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("TOY_B", "NoDot"), "give a name and a path"),
        ((None, "a.b.C"), "give a name and a path"),
        (("TOY B", "a.b.C"), "'TOY B' is not letters"),
        (("", "a.b.C"), "'' is not letters"),
        (("torch_sdpa", "a.b.C"), "'torch_sdpa' differs from 'TORCH_SDPA' in case alone"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        register_backend(*arguments)


def test_a_name_is_registered_once_unless_overriding_is_asked_for():
    first = register_backend()(make_backend("TOY_C"))
    second = make_backend("TOY_C")
    with pytest.raises(ValueError, match=r"'TOY_C' is registered already as toy_backends.*override"):
        register_backend()(second)
    with pytest.raises(ValueError, match="registered already"):
        register_backend("TOY_C", "a.b.C")
    assert resolve_backend("TOY_C") is first
    assert register_backend(override=True)(second) is second
    assert resolve_backend("TOY_C") is second


@pytest.mark.parametrize(
    ("name", "cls", "match"),
    [
        ("OTHER", make_backend("TOY_D"), "returns 'TOY_D' but it is registered as 'OTHER'"),
        ("TOY_D", object, "is not a subclass of AttentionBackend"),
        ("TOY_D", make_backend, "is not a subclass of AttentionBackend"),
        (None, object, "is not a subclass of AttentionBackend"),
    ],
)
def test_what_is_not_a_backend_of_that_name_is_refused_and_forgotten(name, cls, match):
    before = backend_names()
    with pytest.raises(TypeError, match=match):
        register_backend(name)(cls)
    assert backend_names() == before


def test_a_path_to_a_class_of_another_name_is_refused_when_it_is_wanted():
    register_backend("TOY_E", "attnbackend.backends.torch_sdpa.TorchSDPABackend")
    with pytest.raises(TypeError, match="returns 'TORCH_SDPA' but it is registered as 'TOY_E'"):
        resolve_backend("TOY_E")


def test_the_decorator_without_parentheses_says_what_to_write():
    with pytest.raises(TypeError, match="with parentheses"):
        register_backend(make_backend("TOY_F"))


# Overrides


def test_a_member_takes_another_class_and_gets_its_own_back():
    member = AttentionBackendEnum.TORCH_SDPA
    own, own_path = member.get_class(), member.get_path()
    mine = register_backend(member)(make_backend("TORCH_SDPA"))
    assert member.is_overridden()
    assert member.get_class() is mine
    assert member.get_path() == "toy_backends.ToyBackend"
    member.clear_override()
    assert not member.is_overridden()
    assert member.get_class() is own
    assert member.get_path() == own_path


def test_clearing_a_third_party_name_removes_it():
    register_backend()(make_backend("TOY_G"))
    clear_override("TOY_G")
    assert "TOY_G" not in backend_names()
    with pytest.raises(ValueError, match="unknown attention backend 'TOY_G'"):
        resolve_backend("TOY_G")


def test_clearing_what_is_not_registered_is_refused():
    with pytest.raises(ValueError, match="nothing is registered under 'TORCH_SDPA'"):
        clear_override("TORCH_SDPA")


# Generation and scope


def test_every_change_moves_the_generation_and_reading_does_not():
    seen = [registry_generation()]

    def moved(change):
        change()
        seen.append(registry_generation())
        return seen[-1] > seen[-2]

    assert moved(lambda: register_backend()(make_backend("TOY_H")))
    assert moved(lambda: register_backend("TOY_I", "a.b.C"))
    assert moved(lambda: register_backend(override=True)(make_backend("TOY_H")))
    assert moved(lambda: clear_override("TOY_H"))
    assert not moved(lambda: (resolve_backend("TORCH_SDPA"), backend_names()))


def test_a_refused_registration_does_not_move_the_generation():
    before = registry_generation()
    with pytest.raises(ValueError, match="not letters"):
        register_backend("TOY J", "a.b.C")
    assert registry_generation() == before


def test_a_scope_restores_registrations_overrides_and_clearings():
    own = resolve_backend("TORCH_SDPA")
    outer = register_backend()(make_backend("TOY_K"))
    with contextlib.suppress(RuntimeError), registry_scope():
        register_backend()(make_backend("TOY_L"))
        register_backend("TORCH_SDPA")(make_backend("TORCH_SDPA"))
        register_backend(override=True)(make_backend("TOY_K"))
        inside = registry_generation()
        assert resolve_backend("TORCH_SDPA") is not own
        raise RuntimeError("ends the block")
    assert resolve_backend("TORCH_SDPA") is own
    assert resolve_backend("TOY_K") is outer
    assert "TOY_L" not in backend_names()
    assert registry_generation() > inside
    with registry_scope():
        clear_override("TOY_K")
    assert resolve_backend("TOY_K") is outer


# Names of any case


def test_names_of_any_case_are_found_and_exact_ones_stand():
    register_backend()(make_backend("my-Toy.v2"))
    assert any_case_name("torch_sdpa") == "TORCH_SDPA"
    assert any_case_name("MY-TOY.V2") == "my-Toy.v2"
    assert any_case_name("my-Toy.v2") == "my-Toy.v2"
    assert any_case_name("nothing") == "nothing"


# Plugins, in a process of their own: entry points are read once

PLUGINS = {
    "good_one": {"GOOD_PLUGIN": "plug_good:Good", "NESTED_PLUGIN": "plug_good:Outer.Nested"},
    "bad_ones": {
        "BROKEN_IMPORT": "plug_broken:Toy",
        "NO_MODULE": "plug_missing:Toy",
        "NO_CLASS": "plug_good:Missing",
        "WRONG_NAME": "plug_good:Good",
        "NOT_A_BACKEND": "plug_good:Outer",
        "torch_sdpa": "plug_good:Good",
        "SHARED": "plug_good:Good",
    },
    "another": {"SHARED": "plug_good:Outer.Nested", "FLASH_ATTN_DIFFKV": "plug_good:Override"},
}
MODULES = {
    "plug_good": "from toy_backends import make_backend\nGood = make_backend('GOOD_PLUGIN')\n"
    "Override = make_backend('FLASH_ATTN_DIFFKV')\n"
    "class Outer:\n    Nested = make_backend('NESTED_PLUGIN')\n",
    "plug_broken": "raise RuntimeError('its set-up is wrong')\n",
}
PROBE = """
import json, sys
import attnbackend as ab
from toy_backends import config
lazy = not any(m.startswith('plug_') for m in sys.modules)
names = ab.backend_names()
lazy = lazy and not any(m.startswith('plug_') for m in sys.modules)
rows = {
    r.name: [r.verdict, r.class_path, [str(x) for x in r.reasons]]
    for r in ab.explain(config()).rows
}
automatic = ab.select_backend(config()).name
try:
    ab.select_backend(config(), backend='BROKEN_IMPORT')
    error = None
except ValueError as e:
    error = str(e)
named = ab.select_backend(config(), backend='GOOD_PLUGIN').backend.__module__
ab.register_backend('GOOD_PLUGIN', 'toy_backends.Explicit', override=True)
print(json.dumps([lazy, names, rows, automatic, error, named]))
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    for name, text in MODULES.items():
        (site / f"{name}.py").write_text(text)
    for package, points in PLUGINS.items():
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[attnbackend.backends]", *lines, ""]))
    paths = [str(site), *(p for p in sys.path if p)]
    code = f"import sys; sys.path[:] = {paths!r}\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    keys = ("lazy", "names", "rows", "automatic", "error", "named")
    return dict(zip(keys, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_plugins_are_listed_without_being_imported(plugins):
    assert plugins["lazy"]
    assert {name for points in PLUGINS.values() for name in points} <= set(plugins["names"])


def test_a_plugin_is_usable_by_name(plugins):
    assert plugins["rows"]["GOOD_PLUGIN"] == ["eligible", "plug_good:Good", []]
    assert plugins["rows"]["NESTED_PLUGIN"][0] == "eligible"
    assert plugins["named"] == "toy_backends"


def test_a_plugin_may_bring_the_class_of_a_member(plugins):
    assert plugins["rows"]["FLASH_ATTN_DIFFKV"][:2] == ["eligible", "plug_good:Override"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("BROKEN_IMPORT", "plugin plug_broken:Toy: RuntimeError: its set-up is wrong"),
        ("NO_MODULE", "No module named 'plug_missing'"),
        ("NO_CLASS", "'Missing' of 'plug_good:Missing' does not exist"),
        ("WRONG_NAME", "returns 'GOOD_PLUGIN' but it is registered as 'WRONG_NAME'"),
        ("NOT_A_BACKEND", "is not a subclass of AttentionBackend"),
        ("torch_sdpa", "'torch_sdpa' differs from 'TORCH_SDPA' in case alone"),
        ("SHARED", "different classes for 'SHARED': plug_good:Good, plug_good:Outer.Nested"),
    ],
)
def test_a_faulty_plugin_is_unavailable_with_the_cause(plugins, name, cause):
    verdict, _, (reason,) = plugins["rows"][name]
    assert verdict == "unavailable"
    assert cause in reason


def test_faulty_plugins_do_not_disturb_the_automatic_choice(plugins):
    assert plugins["automatic"] in ("CPU_ATTN", "TORCH_SDPA")


def test_naming_a_faulty_plugin_gives_its_cause(plugins):
    assert "'BROKEN_IMPORT', named by the caller, cannot serve" in plugins["error"]
    assert "its set-up is wrong" in plugins["error"]


def test_every_member_is_a_backend_class_path():
    for member in MEMBERS:
        if "CUSTOM" not in member.key:
            assert member.value.startswith("attnbackend.backends.")
            assert member.value.rpartition(".")[2].endswith("Backend")
    assert issubclass(AttentionBackendEnum.TORCH_SDPA.get_class(), AttentionBackend)
