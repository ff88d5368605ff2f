"""Lists of modules and tests are complete: references.md, slow.py, and what benchmarks import and wrap by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from slow import SLOW

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
PAGE = (TESTS / "references.md").read_text(encoding="utf-8")
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from phases import PHASES
for module, owner, functions in PHASES.values():
    holder = importlib.import_module(module)
    for function in functions:
        getattr(getattr(holder, owner) if owner else holder, function)
"""

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # only here: names clash


def functions_of(module: str) -> set[str]:
    tree = ast.parse((TESTS / module).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_kernel_and_codec_has_a_reference() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    rows += [line for line in PAGE.splitlines() if line.startswith("No arithmetic of their own")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    package = TESTS.parent / "pqweights"
    python = {path.stem for folder in ("kernels", "formats") for path in (package / folder).glob("*.py")}
    modules = python | {path.stem for path in (package / "kernels" / "native").glob("*.[ch]pp")}
    assert len(named) == len(set(named)) and set(named) == modules


def test_packages_that_are_installed_are_those_there_are() -> None:
    listed = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    package = TESTS.parent / "pqweights"
    folders = {path.parent.relative_to(TESTS.parent) for path in package.rglob("*.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"pqweights_cli", "pqweights_recipes"}
    assert len(listed) == len(set(listed)) and set(listed) == expected


def test_tests_that_are_named_exist() -> None:
    references = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", PAGE)
    assert references
    for module, function in [*references, *(entry.split("::") for entry in SLOW if "::" in entry)]:
        assert function in functions_of(module), (module, function)
    assert all((TESTS / entry.partition("::")[0]).exists() for entry in SLOW)
    assert all((TESTS / "support" / name).exists() for name in re.findall(r"`(\w+\.py)`", PAGE) if "test_" not in name)


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "phases" in names
    code = f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(TESTS / 'support')]!r}\n{IMPORT_ALL}"
    subprocess.run([sys.executable, "-c", code, *names], check=True, timeout=300, cwd=BENCHMARKS)
