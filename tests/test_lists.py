"""Lists of modules and tests are complete: references.md, slow.py, and the packages that are installed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from slow import SLOW

TESTS = Path(__file__).parent
PAGE = (TESTS / "references.md").read_text(encoding="utf-8")


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
