"""What compile caches tell passes apart by: everything in Python that its work depends on, and no more."""

from __future__ import annotations

import importlib
import linecache
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnbackend
from attnbackend import AttentionSelectorConfig
from attnbackend.fx_passes import PassManager, SelectBackend

_PASS = """
from attnbackend.fx_passes import PassReport
from {base} import {name}

class Mine({name}):
    name = "mine"

    def run(self, graph_module):
        {body}
        return PassReport("mine")
"""
_BASE = """
from attnbackend.fx_passes import GraphPass

class Base(GraphPass):
    limit = "X"
"""
_OURS = "attnbackend.fx_passes"

Files = dict[str, str]
PASSES: dict[str, Files] = {
    "a base class of another module": {
        "mine": _PASS.format(base="theirs", name="Base", body="pass"), "theirs": _BASE,
    },
    "the base of a base": {
        "mine": _PASS.format(base="middle", name="Middle", body="pass"),
        "middle": "from theirs import Base\nclass Middle(Base):\n    pass", "theirs": _BASE,
    },
    "a class derived from one of ours that tells its own settings": {
        "mine": _PASS.format(base=_OURS, name="UndoFunctionalization", body="print('X')"),
    },
    "a helper of another module": {
        "mine": _PASS.format(base=_OURS, name="GraphPass", body="helper()") + "\nfrom helpers import helper",
        "helpers": "def helper():\n    return 'X'",
    },
    "a helper of a helper, imported where it is called": {
        "mine": _PASS.format(base=_OURS, name="GraphPass", body="import helpers; helpers.helper()"),
        "helpers": "def helper():\n    from deeper import values\n    return values",
        "deeper": "values = ['X']",
    },
}  # fmt: skip
CHOOSERS: dict[str, Files] = {
    "a class": {"mine": """
class Order:
    def rank(self, config, site):
        return ["X"]
    def __repr__(self):
        return "Order()"
given = Order()
"""},
    "a base class of another module": {
        "mine": """
from theirs import Base
class Order(Base):
    def __repr__(self):
        return "Order()"
given = Order()
""",
        "theirs": "class Base:\n    def rank(self, config, site):\n        return ['X']",
    },
    "a global": {"mine": "TABLE = 'X'\ndef given(config):\n    return TABLE"},
    "a global that is an object": {"mine": """
from dataclasses import dataclass
@dataclass(frozen=True)
class Options:
    best: str
OPTIONS = Options("X")
def given(config):
    return OPTIONS.best
"""},
    "a function that is called": {"mine": """
def helper():
    return given and "X"
def given(config):
    return helper()
"""},
    "a function that a comprehension calls": {"mine": """
def helper():
    return "X"
def given(config):
    return [helper() for _ in range(1)][0]
"""},
    "a function of another module": {
        "mine": "from helpers import helper\ndef given(config):\n    return helper()",
        "helpers": "def helper():\n    return 'X'",
    },
    "another module": {
        "mine": "import helpers\ndef given(config):\n    return helpers.best",
        "helpers": "best = 'X'",
    },
    "a default that is given by name": {"mine": "def given(config, *, name='X'):\n    return name"},
    "a function in part": {"mine": """
import functools
def choose(name, config):
    return name
given = functools.partial(choose, "X")
"""},
    "what wraps a function": {
        "mine": "from helpers import wrap\n@wrap\ndef given(config):\n    return config",
        "helpers": """
import functools
def wrap(function):
    @functools.wraps(function)
    def wrapper(config):
        return "X"
    return wrapper
""",
    },
    "a function whose results are kept": {"mine": """
import functools
@functools.cache
def helper():
    return "X"
def given(config):
    return helper()
"""},
    "a method": {"mine": """
class Chooser:
    def choose(self, config):
        return "X"
    def __repr__(self):
        return "Chooser()"
given = Chooser().choose
"""},
}  # fmt: skip
"""What chooses a backend whose name is X."""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Files, str], Any]:
    """Writes modules, with a name in the place of X, and imports the one called ``mine``."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(files: Files, name: str) -> Any:
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        for module, source in files.items():
            (tmp_path / f"{module}.py").write_text(source.replace("X", name))
            monkeypatch.delitem(sys.modules, module, raising=False)
        linecache.clearcache()
        importlib.invalidate_caches()
        return importlib.import_module("mine")

    return load


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_is_told_apart_by_all_that_it_is_made_of(kind: str, load: Any) -> None:
    uuids = [PassManager([load(PASSES[kind], name).Mine()]).uuid() for name in ("A", "A", "B")]
    assert uuids[0] == uuids[1] != uuids[2]


@pytest.mark.parametrize("kind", CHOOSERS)
def test_what_chooses_is_told_apart_by_all_that_it_says(kind: str, load: Any) -> None:
    uuids = [
        PassManager([SelectBackend(load(CHOOSERS[kind], name).given)]).uuid() for name in ("A", "A", "B")
    ]
    assert uuids[0] == uuids[1] != uuids[2]


def test_functions_are_told_apart_by_what_they_say() -> None:
    def choice(name: str) -> Callable[[AttentionSelectorConfig], str]:
        return lambda config: name

    def uuid(name: str) -> str:
        return PassManager([SelectBackend(choice(name))]).uuid()

    assert uuid("A") == uuid("A") != uuid("B")


def test_classes_that_a_function_makes_are_told_apart(load: Any) -> None:
    source = """
from attnbackend.fx_passes import GraphPass, PassReport
def make(limit):
    class Made(GraphPass):
        name = "made"
        def run(self, graph_module):
            return PassReport(str(limit))
    return Made()
"""
    make = load({"mine": source}, "A").make
    uuids = [PassManager([make(limit)]).uuid() for limit in (1, 1, 2)]
    assert uuids[0] == uuids[1] != uuids[2]


_STABLE = """
import functools
from dataclasses import dataclass, field
from typing import NamedTuple
from attnbackend.fx_passes import GraphPass, PassManager, PassReport

class Row(NamedTuple):
    a: int

@dataclass(frozen=True)
class Options:
    names: frozenset = frozenset("abcdef")
    rows: list = field(default_factory=list)

def act(): ...

class Mine(GraphPass):
    name = "mine"
    handlers = {"act": act, "row": functools.partial(act, Row(1))}
    def __init__(self):
        self.options = Options()
    def run(self, graph_module):
        return PassReport("mine")

print(PassManager([Mine()]).uuid())
"""


def test_what_means_the_same_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_STABLE)
    repository = Path(attnbackend.__file__).parent.parent
    printed = [
        subprocess.run(
            [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True,
            cwd=tmp_path, env={"PYTHONPATH": str(repository), "PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert printed[0] == printed[1] != ""
