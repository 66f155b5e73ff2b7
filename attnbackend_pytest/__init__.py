"""The option ``--attn-backend`` of pytest, in a package of its own: importing `attnbackend` imports torch,
which a run without the option must not pay for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("attnbackend")
    group.addoption(
        "--attn-backend", action="append", default=[], metavar="NAME_OR_PATH",
        help="check this attention backend, one test for each check and case; may be repeated",
    )  # fmt: skip
    group.addoption("--attn-device", default="cpu", choices=("cpu", "cuda"), help="device of --attn-backend")
    group.addoption("--attn-seed", type=int, default=0, help="seed of all data of --attn-backend")
    group.addoption(
        "--attn-quick", action="store_true", help="every claim and every batch, but not every pair of them"
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("attn_backend"):
        from attnbackend.testing.pytest_plugin import ConformancePlugin

        config.pluginmanager.register(ConformancePlugin(config), "attnbackend-conformance")
