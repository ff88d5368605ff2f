"""Run commands in this process."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from pqweights_cli import output
from pqweights_cli.main import app
from typer.testing import CliRunner, Result


def invoke(*arguments: object) -> Result:
    """Run a command; an unexpected exception is raised, not hidden."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@contextlib.contextmanager
def progress_hidden() -> Iterator[None]:
    """Show no progress, which comes after two seconds, and so where a test runs on a busy machine."""
    with patch.multiple(output, QUIET_SECONDS=3600.0, STATUS_SECONDS=3600.0):
        yield


def done(*arguments: object) -> Result:
    """Run a command that must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def answer(*arguments: object) -> Any:
    """Run a command that must succeed and print nothing but JSON; return the parsed JSON."""
    with progress_hidden():
        result = done(*arguments, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def refused(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail with one line on stderr and nothing on stdout; return the line."""
    with progress_hidden():
        result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return str(result.stderr)


@contextlib.contextmanager
def raises(
    error: type[Exception] | tuple[type[Exception], ...], *named: object
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """What is inside must fail with this error, in one line that names all of these."""
    with pytest.raises(error) as caught:
        yield caught
    line = str(caught.value)
    assert "\n" not in line
    for name in named:
        found = re.search(rf"(?<![\d.]){name}(?!\d)", line) if isinstance(name, int) else str(name) in line
        assert found, f"{name} in {line}"
