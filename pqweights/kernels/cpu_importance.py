"""The CPU kernel that fits the scales and offsets of groups whose columns count unequally, in numba.

Rows of weights are in the lanes, as in cpu_compensation.py. The search begins with shares of the given range, which
move to the weighted mean as they get smaller: weights that are large but hardly count must not stretch it. From each,
a few steps alternate between codes and the weighted least-squares fit to them; the best after rounding to BF16 is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from pqweights.kernels.cpu_compensation import TILE
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.vector import stack

# Where the search begins, in 16ths of the given scale, and how many steps it takes from there.
SHARES = (17, 16, 15, 14, 13, 12, 11, 10, 8, 6, 5, 4, 3, 2)
STEPS = 4
_SUMS_OF_4, _PAIRS_OF_4 = 4 * TILE * 4, 2 * TILE * 4


@jit
def _step(w: Any, column: Any, importance: Any, numbers: Any, sums: Any, limits: Any) -> None:
    """Move scales and offsets to the weighted least-squares fit of the codes that they give."""
    scales, offsets = numbers[:TILE], numbers[TILE : 2 * TILE]
    lowest, highest, symmetric = limits
    c, x, cc, cx = sums[:TILE], sums[TILE : 2 * TILE], sums[2 * TILE : 3 * TILE], sums[3 * TILE : 4 * TILE]
    for lane in range(4 * TILE):
        sums[lane] = np.float32(0)
    total = np.float32(0)
    for j in range(len(column)):
        factor, at = importance[column[j]], column[j] * TILE
        total += factor
        for lane in range(TILE):
            weight = w[at + lane]
            code = min(max(np.rint((weight - offsets[lane]) / scales[lane]), lowest), highest)
            weighted = factor * code
            c[lane] += weighted
            x[lane] += factor * weight
            cc[lane] += weighted * code
            cx[lane] += weighted * weight
    for lane in range(TILE):
        center = np.float32(0) if symmetric else c[lane] / total
        spread = cc[lane] - center * c[lane]
        slope = (cx[lane] - center * x[lane]) / spread
        usable = spread > np.float32(1e-6) * total and slope != 0 and abs(slope) < np.float32(1e30)
        if usable:
            scales[lane] = slope
            offsets[lane] = np.float32(0) if symmetric else x[lane] / total - slope * center


@jit
def _measure(w: Any, column: Any, importance: Any, numbers: Any, errors: Any, limits: Any) -> None:
    """Write the weighted squared errors that scales and offsets give."""
    scales, offsets = numbers[:TILE], numbers[TILE : 2 * TILE]
    lowest, highest, _ = limits
    for lane in range(TILE):
        errors[lane] = np.float32(0)
    for j in range(len(column)):
        factor, at = importance[column[j]], column[j] * TILE
        for lane in range(TILE):
            weight = w[at + lane]
            code = min(max(np.rint((weight - offsets[lane]) / scales[lane]), lowest), highest)
            e = weight - (code * scales[lane] + offsets[lane])
            errors[lane] += factor * (e * e)


@jit
def _average(w: Any, column: Any, importance: Any, means: Any) -> None:
    """Write the weighted mean of each row's weights."""
    for lane in range(TILE):
        means[lane] = np.float32(0)
    total = np.float32(0)
    for j in range(len(column)):
        factor, at = importance[column[j]], column[j] * TILE
        total += factor
        for lane in range(TILE):
            means[lane] += factor * w[at + lane]
    for lane in range(TILE):
        means[lane] = means[lane] / total


@inlined
def _as_stored(bits: Any) -> None:
    """Round float32, given by their bits, to BF16, ties to even."""
    for lane in range(2 * TILE):
        b = bits[lane]
        bits[lane] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)


# Pointers: weights, importance, position, scales, offsets; then size, tiles, group size, lowest, highest, symmetric.
FIT_BY_IMPORTANCE = types.void(*[types.voidptr] * 5, *[types.int64] * 6)


def _fit_by_importance(
    weights_at: Any,  # f32 [tiles, size, TILE]
    importance_at: Any,  # f32 [size], positive, in the order of the weights
    position_at: Any,  # i64 [size]: where in that order each column is
    scales_at: Any,  # in and out: f32 [tiles, groups, TILE]
    offsets_at: Any,  # in and out: f32 [tiles, groups, TILE]
    size: Any,
    tiles: Any,
    group_size: Any,
    lowest: Any,
    highest: Any,
    symmetric: Any,
) -> None:
    """Replace scales and offsets by those of smaller weighted error, where the search finds some."""
    groups = size // group_size
    weights = carray(weights_at, tiles * size * TILE, np.float32)
    importance, position = carray(importance_at, size, np.float32), carray(position_at, size, np.int64)
    scales = carray(scales_at, tiles * groups * TILE, np.float32)
    offsets = carray(offsets_at, tiles * groups * TILE, np.float32)
    sums = carray(stack(_SUMS_OF_4), 4 * TILE, np.float32)
    memory = stack(_PAIRS_OF_4)
    numbers, bits = carray(memory, 2 * TILE, np.float32), carray(memory, 2 * TILE, np.uint32)
    given = carray(stack(_PAIRS_OF_4), 2 * TILE, np.float32)
    errors = carray(stack(_PAIRS_OF_4), 2 * TILE, np.float32)
    means = carray(stack(_PAIRS_OF_4), TILE, np.float32)
    limits = (np.float32(lowest), np.float32(highest), symmetric != 0)
    middle = (np.float32(lowest) + np.float32(highest)) / np.float32(2)
    for tile in range(tiles):
        w = weights[tile * size * TILE : (tile + 1) * size * TILE]
        for group in range(groups):
            column = position[group * group_size : (group + 1) * group_size]
            at = (tile * groups + group) * TILE
            for lane in range(TILE):
                given[lane], given[TILE + lane] = scales[at + lane], offsets[at + lane]
            _measure(w, column, importance, given, errors[:TILE], limits)
            _average(w, column, importance, means)
            for share in SHARES:
                factor = np.float32(share) / np.float32(16)
                for lane in range(TILE):
                    numbers[lane] = given[lane] * factor
                    center = given[TILE + lane] + middle * given[lane]
                    center = means[lane] + (center - means[lane]) * min(factor, np.float32(1))
                    numbers[TILE + lane] = given[TILE + lane] if limits[2] else center - middle * numbers[lane]
                for _ in range(STEPS):
                    _step(w, column, importance, numbers, sums, limits)
                _as_stored(bits)
                _measure(w, column, importance, numbers, errors[TILE:], limits)
                for lane in range(TILE):
                    if errors[TILE + lane] < errors[lane] and numbers[lane] != 0:
                        errors[lane] = errors[TILE + lane]
                        scales[at + lane], offsets[at + lane] = numbers[lane], numbers[TILE + lane]


KERNELS = {"fit_by_importance": (_fit_by_importance, FIT_BY_IMPORTANCE)}
