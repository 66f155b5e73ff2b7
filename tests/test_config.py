"""Choices that people make: who wins, and what is refused."""

from __future__ import annotations

import threading

import pytest

from attnbackend import AttentionBackendEnum, get_config, set_config
from attnbackend.config import debug_checks_enabled, forced_backend


def test_nothing_is_forced_by_default():
    assert forced_backend() is None
    assert (get_config().backend, get_config().debug) == (None, None)


def test_a_block_changes_the_configuration_and_gives_it_back():
    with set_config(backend="A") as inside:
        assert inside is get_config()
        with set_config(debug=True):
            assert (get_config().backend, get_config().debug) == ("A", True)
        assert get_config().debug is None
    assert get_config().backend is None


def test_an_exception_gives_the_configuration_back():
    with pytest.raises(RuntimeError, match="inside"), set_config(backend="A"):
        raise RuntimeError("inside")
    assert get_config().backend is None


def test_a_statement_holds_until_it_is_changed():
    with set_config():
        set_config(backend="A")
        assert forced_backend().name == "A"
        set_config(backend=None)
        assert forced_backend() is None


def test_a_member_stands_for_its_name():
    with set_config(backend=AttentionBackendEnum.TORCH_SDPA):
        assert forced_backend().name == "TORCH_SDPA"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bakend": "A"}, "bakend"),
        ({"backend": 3}, "backend=3 must be a str or None"),
        ({"debug": "0"}, "debug='0' must be a bool or None"),
    ],
)
def test_unknown_fields_and_wrong_types_are_refused_and_change_nothing(changes, match):
    with pytest.raises(TypeError, match=match):
        set_config(**changes)
    assert get_config().backend is None


def test_another_thread_is_not_concerned():
    seen = []
    with set_config(backend="A"):
        thread = threading.Thread(target=lambda: seen.append(get_config().backend))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize(
    ("value", "name"),
    [("TORCH_SDPA", "TORCH_SDPA"), (" my_toy\n", "my_toy"), ("", None), ("  ", None)],
)
def test_the_environment_is_stripped_and_empty_means_unset(monkeypatch, value, name):
    monkeypatch.setenv("ATTNBACKEND", value)
    forced = forced_backend()
    assert (forced and forced.name) == name
    if forced:
        assert forced.any_case
        assert "ATTNBACKEND" in forced.by


def test_the_configuration_stands_above_the_environment(monkeypatch):
    monkeypatch.setenv("ATTNBACKEND", "A")
    with set_config(backend="B"):
        assert forced_backend()[:2] == ("B", "the configuration (set_config)")
    assert forced_backend().name == "A"


@pytest.mark.parametrize(
    ("value", "enabled"), [(None, False), ("", False), ("0", False), ("1", True), (" 1 ", True)]
)
def test_debug_checks_follow_the_environment(monkeypatch, value, enabled):
    if value is not None:
        monkeypatch.setenv("ATTNBACKEND_DEBUG", value)
    assert debug_checks_enabled() is enabled


def test_debug_of_the_configuration_stands_above_the_environment(monkeypatch):
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "1")
    with set_config(debug=False):
        assert not debug_checks_enabled()


def test_a_debug_value_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "no")
    with pytest.raises(ValueError, match="ATTNBACKEND_DEBUG='no'; allowed: 0 or 1"):
        debug_checks_enabled()
