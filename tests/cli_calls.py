"""Calls of the command line in this process, for tests."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from attnbackend import cli
from attnbackend.cli.app import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(result: Result) -> str:
    """The one line on stderr of a wrong request, checked for what holds of all of them."""
    assert result.exit_code == cli.EXIT_USER_ERROR, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.endswith(errors[0] + "\n")
    return errors[0]
