"""What happens before a command is known to the command line."""

from __future__ import annotations

import os
import sys

import pytest
from pqweights_cli import __main__ as start
from pqweights_cli.main import app
from typer.main import get_command


@pytest.mark.parametrize(
    ("command", "already", "expected"), [("plan", None, "1"), ("plan", "3", "3"), ("eval", None, None)]
)
def test_numpy_gets_one_thread_where_no_matrices_are_multiplied(
    command: str, already: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pqweights", command])
    monkeypatch.setattr("pqweights_cli.interrupts.answer_at_once", lambda: None)
    monkeypatch.setattr("pqweights_cli.main.main", lambda: None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", already or "")
    if already is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    start.main()
    assert os.environ.get("OPENBLAS_NUM_THREADS") == expected


def test_commands_without_matrices_exist() -> None:
    assert set(start.WITHOUT_BLAS) < set(get_command(app).commands)  # type: ignore[attr-defined]
