"""Rules that all tests keep: closeness is judged in one place, and nothing is skipped."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
# They have tolerances of their own, or defaults.
COMPARING = ("allclose", "isclose", "approx", "assert_allclose", "assert_close", "assert_almost_equal")
# A number below is a tolerance, unless it is below that, when it is the size of weights.
LARGEST, SMALLEST = 1e-3, 1e-20


@functools.cache
def trees() -> dict[str, ast.Module]:
    """All files of the tests, parsed."""
    return {str(path.relative_to(FOLDER)): ast.parse(path.read_bytes()) for path in sorted(FOLDER.rglob("*.py"))}


def floats_in(node: ast.AST) -> Iterator[float]:
    """The floating-point numbers that stand in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, float):
            yield abs(part.value)


def tolerances(tree: ast.Module) -> Iterator[int]:
    """The lines that compare with a tolerance of their own."""
    judged = {name.asname or name.name for name in imported_from(tree, "closeness")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops
        ):
            if any(SMALLEST < number < LARGEST for number in floats_in(node)):
                yield node.lineno
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            bounds = [*node.args[2 if name in ("near", "each_near") else 1 :], *(word.value for word in node.keywords)]
            if name in judged and any(number < 1 for value in bounds for number in floats_in(value)):
                yield node.lineno
            if name in COMPARING and not (isinstance(node.func, ast.Name) and name in judged):
                yield node.lineno


def imported_from(tree: ast.Module, module: str) -> list[ast.alias]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return [name for node in nodes for name in node.names]


def test_every_tolerance_is_stated_in_one_place() -> None:
    own = ("support/closeness.py", Path(__file__).name)
    found = {path: sorted(set(tolerances(tree))) for path, tree in trees().items() if path not in own}
    assert not {path: lines for path, lines in found.items() if lines}


def test_nothing_is_skipped() -> None:
    """What tests need is installed by `make test`: where it is missing, they fail."""
    skipping = ("skip", "skipif", "importorskip", "xfail")
    found = {
        path: [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in skipping]
        for path, tree in trees().items()
    }
    assert not any(found.values()), {path: lines for path, lines in found.items() if lines}
