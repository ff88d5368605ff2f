"""The CPU kernels of error-compensated rounding (compensation.py has the method), in numba.

All three are made of one loop: four rows of a panel times a long run of rows of 64 numbers. Its sums are added in the
order of the rows, one multiplication and one addition at a time, so results are the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.emit import I64, LANES, array_pointers, load, loop, splat, store
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.vector import stack

# Rows of weights that are rounded together; panel rows that are multiplied together.
TILE = 64
QUAD = 4
# Columns of which a panel is gathered at once, which reads runs of as many numbers from the columns of a matrix.
PANEL = 64
# Rows of a factor that are computed together.
STRIP = 32
# Rows of 64 numbers that are multiplied by several quads while they are in the cache.
BLOCK = 1024
_VECTORS = TILE // LANES
_SUMS = QUAD * TILE
_STRIP_OF_4, _PANEL_OF_4, _SUMS_OF_4 = STRIP * TILE * 4, PANEL * TILE * 4, _SUMS * 4


# The parameters of an intrinsic are the operands of the code that it emits, so they stay apart.
@intrinsic
def _multiply(
    typingctx: Any,
    panel: Any,  # f32: row q begins at q * width
    width: Any,
    rows: Any,  # f32: row i begins at i * stride, and 64 numbers of it count
    stride: Any,
    count: Any,  # how many rows; at least 1
    sums: Any,  # in and out: f32 [4, 64]
) -> Any:
    """Add panel[q, i] * rows[i] to the sums, in the order of i."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        panel, rows, sums = array_pointers(context, b, signature, args)
        width, stride, count = args[1], args[3], args[4]
        before = [tuple(load(b, sums, I64(q * TILE + v * LANES)) for v in range(_VECTORS)) for q in range(QUAD)]

        def add(i: Any, totals: Any) -> Any:
            at = b.mul(i, stride)
            vectors = [load(b, rows, b.add(at, I64(v * LANES))) for v in range(_VECTORS)]
            result = []
            for q, own in enumerate(totals):
                factor = splat(b, b.load(b.gep(panel, [b.add(b.mul(width, I64(q)), i)])))
                result.append(tuple(t + factor * vector for t, vector in zip(own, vectors, strict=True)))
            return tuple(result)

        totals = loop(b, count, tuple(before), add)
        for q, own in enumerate(totals):
            for v, total in enumerate(own):
                store(total, sums, I64(q * TILE + v * LANES))
        return context.get_dummy_value()

    return types.void(panel, width, rows, stride, count, sums), codegen


# Pointers: matrix, panel, failed; then size, stride.
FACTOR = types.void(*[types.voidptr] * 3, *[types.int64] * 2)


@jit
def _multiply_blocks(
    panel: Any, width: Any, first: Any, rows: Any, stride: Any, count: Any, quads: Any, sums: Any
) -> None:
    """Add to the sums of several quads. first: the column of the panel that belongs to the first row."""
    for block in range(0, count, BLOCK):
        for quad in range(quads):
            _multiply(
                panel[quad * QUAD * width + first + block :],
                width,
                rows[block * stride :],
                stride,
                min(BLOCK, count - block),
                sums[quad * _SUMS : (quad + 1) * _SUMS],
            )


@jit
def _finish_quad(a: Any, sums: Any, size: Any, stride: Any, row: Any, chunk: Any, is_first: Any) -> Any:
    """Write 64 columns of four rows of the factor; return the first row without a positive pivot, or -1."""
    for q in range(QUAD):
        at, own = (row + q) * stride, sums[q * TILE : (q + 1) * TILE]
        for lane in range(TILE):
            own[lane] = a[at + chunk + lane] - own[lane]
        for p in range(q):
            factor, other = a[(row + p) * stride + row + q], sums[p * TILE : (p + 1) * TILE]
            for lane in range(TILE):
                own[lane] = own[lane] - factor * other[lane]
        if is_first:
            pivot = own[row + q - chunk]
            if not (pivot > 0 and pivot < np.inf):
                return row + q
            a[at + row + q] = np.sqrt(pivot)
        diagonal = a[at + row + q]
        for lane in range(TILE):
            own[lane] = own[lane] / diagonal
        for lane in range(max(0, row + q + 1 - chunk), min(TILE, size - chunk)):
            a[at + chunk + lane] = own[lane]
    return -1


def _factor(
    matrix_at: Any,  # f32 [size, stride]: a symmetric matrix; stride is at least size + TILE
    panel_at: Any,  # f32 [STRIP, stride], for work
    failed_at: Any,  # out: i64, the first row without a positive pivot, or -1
    size: Any,  # a multiple of QUAD
    stride: Any,
) -> None:
    """Write R above and on the diagonal of A, where A = R' R. What is below the diagonal stays."""
    a = carray(matrix_at, size * stride, np.float32)
    panel = carray(panel_at, STRIP * stride, np.float32)
    failed = carray(failed_at, 1, np.int64)
    sums = carray(stack(_STRIP_OF_4), STRIP * TILE, np.float32)
    failed[0] = -1
    for start in range(0, size, STRIP):
        end = min(start + STRIP, size)
        for i in range(start):
            for row in range(start, end):
                panel[(row - start) * stride + i] = a[i * stride + row]
        for chunk in range(start, size, TILE):
            for lane in range(STRIP * TILE):
                sums[lane] = np.float32(0)
            _multiply_blocks(panel, stride, 0, a[chunk:], stride, start, (end - start) // QUAD, sums)
            for row in range(start, end, QUAD):
                own = sums[(row - start) * TILE : (row - start + QUAD) * TILE]
                if chunk == start:
                    for i in range(start, row):
                        for q in range(QUAD):
                            panel[(row - start + q) * stride + i] = a[i * stride + row + q]
                if row > start:
                    begin = (row - start) * stride + start
                    _multiply(panel[begin:], stride, a[start * stride + chunk :], stride, row - start, own)
                bad = _finish_quad(a, own, size, stride, row, chunk, chunk == start)
                if bad >= 0:
                    failed[0] = bad
                    return


@inlined
def _gather(a: Any, diagonal: Any, panel: Any, size: Any, stride: Any, start: Any, end: Any, again: Any) -> None:
    """Write how the error of each column changes the targets of the columns start to end: [PANEL, stride]."""
    for k in range(start, end):
        at, row = (k - start) * stride, k * stride
        if again:
            for i in range(k):
                panel[at + i] = a[row + i] / diagonal[k]
        else:
            for i in range(start, k):
                panel[at + i] = np.float32(0)
            for i in range(k + 1, size):
                panel[at + i] = a[row + i] / a[row + k]
        panel[at + k] = np.float32(0)
    if again:
        for i in range(start + 1, size):
            for k in range(start, min(end, i)):
                panel[(k - start) * stride + i] = a[i * stride + k] / diagonal[k]


@jit
def _round_panel(
    panel: Any,
    sums: Any,
    w: Any,
    s: Any,
    o: Any,
    group_of: Any,
    e: Any,
    codes: Any,
    delta: Any,
    place: Any,
    limits: Any,
) -> None:
    """Round the columns of a panel for 64 rows, the last one first, and pass the error of each on to the others."""
    start, end, stride = place
    lowest, highest = limits
    for q in range(end - start - 1, -1, -1):
        k = start + q
        at, group = k * TILE, group_of[k] * TILE
        for lane in range(TILE):
            scale, offset, weight = s[group + lane], o[group + lane], w[at + lane]
            target = weight + sums[q * TILE + lane]
            code = min(max(np.rint((target - offset) / scale), lowest), highest)
            error = weight - (code * scale + offset)
            delta[lane] = error - e[at + lane]
            e[at + lane] = error
            codes[at + lane] = np.uint8(code - lowest)
        for p in range(q):
            factor = panel[p * stride + k]
            for lane in range(TILE):
                sums[p * TILE + lane] += factor * delta[lane]


# Pointers: matrix, diagonal, weights, scales, offsets, group_of, errors, codes, panel; then size, stride, tiles,
# groups, again, lowest, highest.
COMPENSATE = types.void(*[types.voidptr] * 9, *[types.int64] * 7)


def _compensate(
    matrix_at: Any,  # f32 [size, stride]: R above and on the diagonal, A below it
    diagonal_at: Any,  # f32 [size]: the diagonal of A
    weights_at: Any,  # f32 [tiles, size, TILE]
    scales_at: Any,  # f32 [tiles, groups, TILE]
    offsets_at: Any,  # f32 [tiles, groups, TILE]
    group_of_at: Any,  # i64 [size]: the group of each column
    errors_at: Any,  # in and out: f32 [tiles, size, TILE]; zeros, unless `again`
    codes_at: Any,  # out: u8 [tiles, size, TILE]
    panel_at: Any,  # f32 [PANEL, stride], for work
    size: Any,  # a multiple of QUAD
    stride: Any,
    tiles: Any,
    groups: Any,
    again: Any,  # whether each column looks at the errors of all others, not only of those before it
    lowest: Any,  # the lowest code, before it is counted from 0
    highest: Any,
) -> None:
    """Round all columns, the last one first."""
    a = carray(matrix_at, size * stride, np.float32)
    diagonal = carray(diagonal_at, size, np.float32)
    group_of = carray(group_of_at, size, np.int64)
    weights = carray(weights_at, tiles * size * TILE, np.float32)
    scales = carray(scales_at, tiles * groups * TILE, np.float32)
    offsets = carray(offsets_at, tiles * groups * TILE, np.float32)
    errors = carray(errors_at, tiles * size * TILE, np.float32)
    codes = carray(codes_at, tiles * size * TILE, np.uint8)
    panel = carray(panel_at, PANEL * stride, np.float32)
    sums = carray(stack(_PANEL_OF_4), PANEL * TILE, np.float32)
    delta = carray(stack(_SUMS_OF_4), TILE, np.float32)
    limits = (np.float32(lowest), np.float32(highest))
    for end in range(size, 0, -PANEL):
        start = max(0, end - PANEL)
        _gather(a, diagonal, panel, size, stride, start, end, again)
        for tile in range(tiles):
            begin, first = tile * size * TILE, tile * groups * TILE
            w, e = weights[begin : begin + size * TILE], errors[begin : begin + size * TILE]
            c = codes[begin : begin + size * TILE]
            s, o = scales[first : first + groups * TILE], offsets[first : first + groups * TILE]
            for lane in range(PANEL * TILE):
                sums[lane] = np.float32(0)
            since = 0 if again else start
            quads = (end - start) // QUAD
            _multiply_blocks(panel, stride, since, e[since * TILE :], TILE, size - since, quads, sums)
            _round_panel(panel, sums, w, s, o, group_of, e, c, delta, (start, end, stride), limits)


# Pointers: errors, inputs, totals; then size, tiles, inputs.
OUTPUT_ERRORS = types.void(*[types.voidptr] * 3, *[types.int64] * 3)


def _output_errors(
    errors_at: Any,  # f32 [tiles, size, TILE]
    inputs_at: Any,  # f32 [count, size]
    totals_at: Any,  # out: f64 [tiles, TILE]
    size: Any,
    tiles: Any,
    count: Any,  # a multiple of QUAD
) -> None:
    """Write the sum over the inputs x of (e x)^2 for each row e of the errors."""
    errors = carray(errors_at, tiles * size * TILE, np.float32)
    inputs = carray(inputs_at, count * size, np.float32)
    totals = carray(totals_at, tiles * TILE, np.float64)
    sums = carray(stack(_SUMS_OF_4), _SUMS, np.float32)
    for tile in range(tiles):
        e, total = errors[tile * size * TILE : (tile + 1) * size * TILE], totals[tile * TILE : (tile + 1) * TILE]
        for lane in range(TILE):
            total[lane] = 0.0
        for row in range(0, count, QUAD):
            for lane in range(_SUMS):
                sums[lane] = np.float32(0)
            _multiply(inputs[row * size :], size, e, TILE, size, sums)
            for q in range(QUAD):
                for lane in range(TILE):
                    output = np.float64(sums[q * TILE + lane])
                    total[lane] += output * output


KERNELS = {
    "factor": (_factor, FACTOR),
    "compensate": (_compensate, COMPENSATE),
    "output_errors": (_output_errors, OUTPUT_ERRORS),
}
