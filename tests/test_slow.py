"""The list of slow tests names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from slow import SLOW

TESTS = Path(__file__).parent


@pytest.mark.parametrize("module", sorted({entry.partition("::")[0] for entry in SLOW}))
def test_slow_tests_exist(module: str) -> None:
    tree = ast.parse((TESTS / module).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    listed = {entry.partition("::")[2] for entry in SLOW if entry.partition("::")[0] == module}
    assert listed == {""} or listed <= functions, f"tests/support/slow.py: {module} has no {listed - functions}"
