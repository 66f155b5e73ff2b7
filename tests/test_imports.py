"""`import attnbackend` costs next to nothing and brings nothing heavy."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

HEAVY = ("triton", "transformers", "flashinfer", "flash_attn", "torch._inductor", "numba", "jax")


def run(code, *options):
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def modules():
    code = (
        "import json, sys, torch\nbefore = set(sys.modules)\nimport attnbackend\n"
        "plain = set(sys.modules) - before\n"
        "attnbackend.explain, attnbackend.select_backend, attnbackend.attention\n"
        "attnbackend.backend_names()\n"
        "print(json.dumps([sorted(plain), sorted(set(sys.modules) - before)]))"
    )
    return json.loads(run(code).stdout)


def test_the_package_alone_brings_only_itself_torch_and_the_standard_library(modules):
    plain, _ = modules
    allowed = {"attnbackend", "torch", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in plain} <= allowed
    assert "attnbackend.ops" in plain


@pytest.mark.parametrize("name", HEAVY)
def test_the_contract_brings_nothing_heavy(modules, name):
    _, contract = modules
    assert [m for m in contract if m == name or m.startswith(f"{name}.")] == []


def test_no_backend_is_imported_before_it_is_wanted(modules):
    _, contract = modules
    assert [m for m in contract if m.startswith("attnbackend.backends.")] == []


def test_backends_are_found_where_torch_alone_is_installed():
    """Lengths on the host want numpy, an extra of serving; the classes do not."""
    code = (
        "import sys\nsys.modules['numpy'] = None\nimport torch, attnbackend\n"
        "from attnbackend.registry import is_implemented, resolve_backend\n"
        "names = [*filter(is_implemented, attnbackend.backend_names()), 'FLASH_ATTN+TRITON_ATTN']\n"
        "for name in names: resolve_backend(name)\nprint(len(names))"
    )
    assert int(run(code).stdout) > 10


def test_the_package_imports_within_a_second_of_torch():
    """Measured at 25 to 75 ms; the bound only catches an accidental heavy import."""
    errors = run("import torch, attnbackend", "-X", "importtime").stderr
    times = {}
    for line in errors.splitlines():
        _, total, name = (part.strip() for part in line.removeprefix("import time:").split("|"))
        if total.isdigit():
            times[name] = int(total)
    print(f"import attnbackend on top of torch: {times['attnbackend'] / 1000:.1f} ms")
    assert times["attnbackend"] < 1_000_000


def test_every_public_name_exists_and_is_listed():
    code = (
        "import attnbackend\n"
        "for name in attnbackend.__all__:\n    getattr(attnbackend, name)\n"
        "assert set(attnbackend.__all__) == set(dir(attnbackend))"
    )
    run(code)


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    """Importing ``package.name`` sets ``package.name`` to the module, whatever it was before."""
    import attnbackend

    modules = {module.name for module in pkgutil.iter_modules(attnbackend.__path__)}
    assert modules & set(attnbackend.__all__) == set()


def test_an_unknown_name_is_an_attribute_error():
    import attnbackend

    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = attnbackend.no_such_thing
