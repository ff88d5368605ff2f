"""The nearest levels of numbers, in numba: codes and what they stand for, of runs with levels of their own.

A code is the number of thresholds that are not above a number. Its bits are found one after the other, the highest
first: with k bits known, 2**k thresholds come into question, which fit into a few registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import (
    LEVELS_OF_WIDTH,
    NEAREST_KERNEL,
    NEAREST_TASK_SIZE,
    STEP_STARTS,
    THRESHOLDS_OF_WIDTH,
)
from pqweights.kernels.cpu_products import PRODUCT, next_tile, pointer_in
from pqweights.kernels.emit import (
    FLOATS,
    I64,
    INTS,
    LANES,
    Lanes,
    array_pointers,
    constant,
    load,
    loop,
    shuffled,
    store,
)
from pqweights.kernels.jit import inlined
from pqweights.kernels.vector import Table


def _make_search(bits: int, lanes: int) -> Any:
    """Return the intrinsic that writes the codes and levels of some numbers, `lanes` at a time."""
    kind = ir.VectorType(FLOATS.element, lanes)

    @intrinsic
    def search(
        typingctx: Any,
        values: Any,  # f32
        at: Any,  # of the first row
        rows: Any,
        stride: Any,  # from one row to the next in values, codes and out
        pieces: Any,  # of `lanes` numbers
        thresholds: Any,  # f32
        levels: Any,  # f32
        codes: Any,  # u8
        out: Any,  # f32
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            values, thresholds, levels, codes, out = array_pointers(context, b, signature, args)
            at, rows, stride, pieces = args[1:5]
            steps = [
                Table(b, thresholds, bits * THRESHOLDS_OF_WIDTH + STEP_STARTS[k], max(LANES, 1 << k))
                for k in range(bits)
            ]
            table = Table(b, levels, bits * LEVELS_OF_WIDTH, max(LANES, 1 << bits))

            def of_row(row: Any, carried: tuple[()]) -> tuple[()]:
                begin = b.add(at, b.mul(row, stride))

                def of_piece(piece: Any, carried: tuple[()]) -> tuple[()]:
                    place = b.add(begin, b.mul(piece, I64(lanes)))
                    some = load(b, values, place, kind)
                    x = shuffled(some, some, [i % lanes for i in range(LANES)])
                    code = constant(b, INTS, [0] * LANES)
                    for step in steps:
                        # Not >=, which is false for a NaN: that gets the last code, as torch has it.
                        below = (x < step.look_up(code)).negated()
                        code = (code << 1) | Lanes(b, b.zext(below.value, INTS))
                    found = table.look_up(code)
                    store(shuffled(code.bytes(), code.bytes(), range(lanes)), codes, place)
                    store(shuffled(found, found, range(lanes)), out, place)
                    return carried

                return loop(b, pieces, carried, of_piece)

            loop(b, rows, (), of_row)
            return context.get_dummy_value()

        return types.void(values, at, rows, stride, pieces, thresholds, levels, codes, out), codegen

    return search


def _make_run(bits: int) -> Any:
    """Return the function that finds the levels of a run in some rows."""
    sixteens, eight = (_make_search(bits, lanes) for lanes in (LANES, LANES // 2))

    @inlined
    def find_run(
        values: Any, at: Any, rows: Any, stride: Any, count: Any, thresholds: Any, levels: Any, codes: Any, out: Any
    ) -> None:
        whole = count // LANES
        if whole:
            sixteens(values, at, rows, stride, whole, thresholds, levels, codes, out)
        if count % LANES:
            eight(values, at + whole * LANES, rows, stride, 1, thresholds, levels, codes, out)

    return find_run


_run_1, _run_2, _run_3, _run_4, _run_5, _run_6, _run_7, _run_8 = (_make_run(bits) for bits in range(1, 9))


def _find_nearest(task_at: Any) -> None:
    task = carray(task_at, NEAREST_TASK_SIZE, np.int64)
    rows, size, tile_rows, run_count = task[1], task[2], task[3], task[4]
    runs = carray(pointer_in(task, 5), 2 * run_count, np.int64)
    values = carray(pointer_in(task, 6), rows * size, np.float32)
    thresholds = carray(pointer_in(task, 7), 9 * THRESHOLDS_OF_WIDTH, np.float32)
    levels = carray(pointer_in(task, 8), 9 * LEVELS_OF_WIDTH, np.float32)
    codes = carray(pointer_in(task, 9), rows * size, np.uint8)
    out = carray(pointer_in(task, 10), rows * size, np.float32)
    while True:
        start = next_tile(task) * tile_rows
        if start >= rows:
            break
        some, at = min(tile_rows, rows - start), start * size
        for run in range(run_count):
            count, bits = runs[2 * run], runs[2 * run + 1]
            if bits == 1:
                _run_1(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 2:
                _run_2(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 3:
                _run_3(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 4:
                _run_4(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 5:
                _run_5(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 6:
                _run_6(values, at, some, size, count, thresholds, levels, codes, out)
            elif bits == 7:
                _run_7(values, at, some, size, count, thresholds, levels, codes, out)
            else:
                _run_8(values, at, some, size, count, thresholds, levels, codes, out)
            at += count


KERNELS = {NEAREST_KERNEL: (_find_nearest, PRODUCT)}
