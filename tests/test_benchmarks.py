"""Benchmarks run with the product as it is: of all, modules and options exist; some run on their smallest input."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from language_models import babbler, with_tokenizer
from pqweights_cli.main import app
from snippets import run_snippet

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
sys.path.append(str(BENCHMARKS))

# Of those that read models, what takes the least time.
SMALLEST = {
    "gguf_types": "MODEL --only models --types Q4_0 --max-tokens 64 --window 32 --ways ours",
    "quality": "MODEL --only ablation --bits 3 --max-tokens 64 --window 32 --stride 16",
}
# Of other programs that benchmarks start, and of the processes that they start of themselves.
OTHERS = {"--child", "--child-kernel", "--child-model", "--inside", "--hf-path", "--mlx-path", "--q-bits", "--help"}
OTHERS |= {"--reflink=never", "--allow-requantize"}
# Modules of benchmarks have the names of some of tests/support, so a process of their own imports them.
RUN = """
import importlib, sys
sys.path.insert(0, folder)
modules = {name: importlib.import_module(name) for name in names}
for module, owner, functions in modules["phases"].PHASES.values():
    holder = importlib.import_module(module)
    for function in functions:
        getattr(getattr(holder, owner) if owner else holder, function)
for name, arguments in runs.items():
    sys.argv = [name, *arguments]
    modules[name].main()
"""


def syntax(name: str) -> ast.Module:
    return ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))


@functools.cache
def commands() -> dict[str, set[str]]:
    """The options of each command of the product."""
    group: Any = typer.main.get_command(app)
    return {name: {text for p in command.params for text in p.opts} for name, command in group.commands.items()}


def options_in(tree: ast.AST) -> Iterator[str]:
    """The texts that begin as an option does, in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("--[a-z][^:]*", node.value):
            yield node.value


def calls_of(name: str) -> Iterator[ast.List]:
    """The lists [*PQWEIGHTS, ...] of a benchmark."""
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.List) and any(ast.unparse(part) == "*PQWEIGHTS" for part in node.elts):
            yield node


@functools.cache
def arguments() -> set[str]:
    """The options that benchmarks have themselves."""
    calls = [node for name in NAMES for node in ast.walk(syntax(name)) if isinstance(node, ast.Call)]
    return {text for call in calls if ast.unparse(call.func).endswith("add_argument") for text in options_in(call)}


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_that_a_benchmark_gives_exist(name):
    known = commands()
    for call in calls_of(name):
        command = call.elts[1]
        if isinstance(command, ast.Constant):
            assert set(options_in(call)) <= known[str(command.value)], ast.unparse(call)
    assert set(options_in(syntax(name))) <= set().union(*known.values()) | arguments() | OTHERS


def test_benchmarks_can_be_imported_and_run_on_the_smallest_input(tmp_path):
    model = with_tokenizer(babbler(tmp_path / "model"))
    (model / "eval.txt").write_text("the rain in spain stays mainly in the plain\n" * 20)
    runs = {name: words.replace("MODEL", str(model)).split() for name, words in SMALLEST.items()}
    code, log = f"folder, names, runs = {(str(BENCHMARKS), NAMES, runs)!r}\n{RUN}", tmp_path / "log"
    assert run_snippet(code, tmp_path, log) == 0, log.read_text()
    assert "Q4_0" in log.read_text() and "+ least-squares norm" in log.read_text()
