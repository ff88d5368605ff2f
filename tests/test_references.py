"""references.md names every module with arithmetic, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "references.md").read_text(encoding="utf-8")


def test_every_kernel_and_codec_has_a_reference() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    rows += [line for line in PAGE.splitlines() if line.startswith("No arithmetic of their own")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    package = TESTS.parent / "pqweights"
    python = {path.stem for folder in ("kernels", "codecs") for path in (package / folder).glob("*.py")}
    modules = python | {path.stem for path in (package / "kernels" / "native").glob("*.[ch]pp")}
    assert len(named) == len(set(named)) and set(named) == modules


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", PAGE)
    assert named
    for module, function in named:
        tree = ast.parse((TESTS / module).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (module, function)
    assert all((TESTS / "support" / name).exists() for name in re.findall(r"`(\w+\.py)`", PAGE) if "test_" not in name)
