"""Loops in generated code run as often as they are told to, which may be never."""

from __future__ import annotations

from typing import Any

import numba
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import I64, INTS, Lanes, constant, loop


@intrinsic
def _powers(typingctx: Any, count: Any) -> Any:
    """Return 100 * 2**count + the number of turns, by a loop in a loop and one of a constant number of turns."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def body(i: Any, carried: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            doubled, turns = carried
            return doubled + doubled, loop(b, I64(1), turns, lambda j, inner: inner + 1)

        start = constant(b, INTS, [100] * 16), constant(b, INTS, [0] * 16)
        doubled, turns = loop(b, args[0], start, body)
        total = loop(b, I64(0), doubled + turns, lambda j, carried: carried + 10_000)
        return b.sext(b.extract_element(total.value, ir.Constant(ir.IntType(32), 3)), I64)

    return types.int64(types.int64), codegen


@numba.njit
def powers(count: int) -> int:
    result: int = _powers(count)
    return result


@pytest.mark.parametrize("count", [0, 1, 2, 5, -1])
def test_body_runs_as_often_as_it_is_told_to(count: int) -> None:
    turns = max(count, 0)
    assert powers(count) == 100 * 2**turns + turns
