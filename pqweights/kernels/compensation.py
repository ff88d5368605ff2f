"""Error-compensated rounding of rows of weights (GPTQ, Frantar et al., arXiv:2210.17323).

H = X' X / n are the second moments of the inputs of a matrix W. Rounding W to Q gives its outputs a mean squared error
of tr(E H E'), where E = W - Q. Columns are rounded one after the other, the one of largest H[k, k] first, and each
passes its error on: with A = H + d mean(diag H) I in the order of columns and A = R' R, the last column first,

    target[k] = w[k] + sum over i > k of e[i] R[k, i] / R[k, k]

This is the same as the updates by the inverse of A in the paper (Chee et al., arXiv:2307.13304, section 3), and needs
one factorization and no inverse. Further passes go over the columns again, each of which now looks at all others:

    target[k] = w[k] + sum over i != k of e[i] A[k, i] / A[k, k]

which is the least of the damped sum over the codes of one column. Scales and offsets are chosen before, with the
diagonal of A as the weight of each column; codes are integers or short floats. R lies above, and A below the diagonal
of one K x K array. The only implementation is for the CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native
from pqweights.kernels.gguf_codes import with_codes
from pqweights.kernels.gguf_encoding import FLOATS, PART, BlockRule, blocks_of_floats, steps
from pqweights.kernels.groups import (
    LARGEST_BF16,
    TILE,
    FloatRule,
    GroupRule,
    Groups,
    Tiles,
    fit_by_importance,
    sums_of_squares,
)

Floats = npt.NDArray[np.float32]

# The same as in native/compensation.cpp.
QUAD, PANEL, STRIP = 4, 64, 32
# What codes are: whole numbers, floats of 4 or 8 bits, or those of IQ4_NL and IQ4_XS.
INTEGERS, E2M1, E4M3, IQ4 = 0, 4, 8, 16
# How often all columns are looked at again after the first pass. More than two gain little.
REPEATS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentsFactor:
    """The second moments of the inputs of a matrix with K columns, ready for rounding.

    order: i64 [K], the columns in the order of the arrays below: by ascending diagonal, so that the last is first
    matrix: f32 [K, K + 64 or more]: R on and above the diagonal, A below it
    diagonal: f32 [K], the diagonal of A
    """

    order: npt.NDArray[np.int64]
    matrix: Floats
    diagonal: Floats

    @property
    def importance(self) -> Floats:
        """The diagonal of A in the order of the weights, [K]."""
        result = np.empty_like(self.diagonal)
        result[self.order] = self.diagonal
        return result


def order_of(diagonal: Floats) -> npt.NDArray[np.int64]:
    """Return the columns by ascending second moment, those that are equal in their own order: i64 [K]."""
    return np.argsort(diagonal, kind="stable").astype(np.int64)


def empty_matrix(size: int) -> Floats:
    """Return zeros [size, stride], the array for `factorize`. The padding keeps rows out of each other's cache sets."""
    return np.zeros((size, size + TILE + 16), dtype=np.float32)


def factorize(matrix: Floats, moments: Floats, damping: float) -> Floats | None:
    """Write R on and above the diagonal of A, and return the diagonal of A; None if A is not positive definite.

    matrix: f32 [K, stride], which holds H below the diagonal
    moments: f32 [K], the diagonal of H, in the order of the matrix
    damping: what is added to the diagonal, as a share of its mean

    Raises ValueError for a matrix of another kind than `empty_matrix` returns.
    """
    size, stride = _checked_shape(matrix)
    diagonal = moments + np.float32(damping * float(np.mean(moments, dtype=np.float64)))
    for start in range(0, size, STRIP):  # what is above the diagonal is what is below it
        end = min(start + STRIP, size)
        matrix[start:end, end:size] = matrix[end:size, start:end].T
        for row in range(start, end):
            matrix[row, row:end] = matrix[row:end, row]
    np.fill_diagonal(matrix, diagonal)
    failed, panel = np.empty(1, dtype=np.int64), np.empty(STRIP * stride, dtype=np.float32)
    arrays = ((matrix, np.float32, size * stride), (panel, np.float32, panel.size), (failed, np.int64, 1))
    native.call("factor", *(native.array(*each, written=True) for each in arrays), size, stride)
    return diagonal if failed[0] < 0 else None


def _checked_shape(matrix: Floats) -> tuple[int, int]:
    """The shape of a matrix that is like one of `empty_matrix`."""
    size, stride = matrix.shape
    if size % QUAD or stride < size + TILE:
        raise ValueError(f"expected a multiple of {QUAD} columns, padded by {TILE}, found {size} in rows of {stride}")
    return size, stride


def compensate(
    values: Floats, start: Groups, rule: GroupRule | FloatRule | BlockRule, factor: MomentsFactor
) -> tuple[Groups, Tiles]:
    """Round rows of weights [rows, K] with compensation.

    start: their groups as `rule.quantize` returns them, where the search for scales and offsets of integers begins; as
        blocks, weighed by the importance of the factor, whose scales are kept

    Returns their groups, with the squared errors of the codes, and W - Q in the order of the factor.
    """
    if isinstance(rule, BlockRule) and rule.kind in FLOATS:
        groups, left = compensate(values, start, FLOATS[rule.kind], factor)
        return blocks_of_floats(rule, groups), left
    weights, part, limits, kind = Tiles.of(values[:, factor.order]), rule.group_size, (0, 0), INTEGERS
    if isinstance(rule, GroupRule):
        numbers, limits = fit_by_importance(weights, start, rule, factor.diagonal, factor.order), rule.limits
    else:
        if isinstance(rule, FloatRule):
            start = rule.quantize_weighted(values.reshape(-1), factor.importance)
            scales, kind = rule.factors(start), rule.bits
            offsets = np.zeros_like(scales)
        else:
            scales, offsets = steps(rule.kind, start.codes)
            scales = np.where(scales == 0, np.float32(LARGEST_BF16), scales)  # any code is as good
            part, limits, kind = PART, (0, 2**rule.bits - 1), IQ4 if rule.kind.startswith("IQ4") else INTEGERS
        numbers = (Tiles.of(scales.reshape(weights.rows, -1), 1.0), Tiles.of(offsets.reshape(weights.rows, -1)))
    errors, codes = round_tiles(
        weights.values,
        (numbers[0].values, numbers[1].values),
        factor.order // part,
        factor,
        codes=limits,
        kind=kind,
    )
    left, found = Tiles(errors, weights.rows), _in_order_of_weights(Tiles(codes, weights.rows), factor)
    if isinstance(rule, GroupRule):
        return rule.measured(values, found, numbers, start.energies), left
    if isinstance(rule, FloatRule):
        return rule.measured(values, found, start), left
    size = rule.group_size
    blocks = with_codes(rule.kind, start.codes, found.reshape(-1, size))
    squares = sums_of_squares(_in_order_of_weights(left, factor).reshape(-1, size))
    return replace(start, codes=blocks, errors=squares), left


def _in_order_of_weights(tiles: Tiles, factor: MomentsFactor) -> npt.NDArray[Any]:
    """Return the rows [rows, K] of tiles in the order of the factor."""
    ordered = tiles.rows_of()
    result = np.empty_like(ordered)
    result[:, factor.order] = ordered
    return result


def errors_of(values: Floats, groups: Groups, rule: GroupRule | FloatRule | BlockRule, factor: MomentsFactor) -> Tiles:
    """Return W - Q of groups, in the order of the factor. values: [rows, K]"""
    return Tiles.of((values - rule.decode(groups).reshape(values.shape))[:, factor.order])


def round_tiles(
    weights: Floats,
    numbers: tuple[Floats, Floats],
    group_of: npt.NDArray[np.int64],
    factor: MomentsFactor,
    *,
    codes: tuple[int, int],
    kind: int = INTEGERS,
    repeats: int = REPEATS,
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Round tiles of weights; return the errors and the codes counted from 0, both [tiles, K, 64].

    weights: [tiles, K, 64], in the order of the factor
    numbers: the scales and the offsets, [tiles, groups, 64] each
    group_of: the group of each column
    codes: the lowest and the highest code; more than 256 codes do not fit what is returned
    kind: what codes are instead: E2M1 or E4M3, which are returned with their signs, or IQ4
    repeats: how often all columns are looked at again

    Raises ValueError for arrays that do not fit together.
    """
    size, stride = _checked_shape(factor.matrix)
    tiles, groups = len(weights), numbers[0].shape[1]
    if group_of.min(initial=0) < 0 or group_of.max(initial=0) >= groups:
        raise ValueError(f"expected columns of {groups} groups, found group {group_of.min()} to {group_of.max()}")
    errors, found = np.zeros_like(weights), np.empty(weights.shape, dtype=np.uint8)
    panel = np.empty(PANEL * stride, dtype=np.float32)
    arrays = (
        native.array(factor.matrix, np.float32, size * stride),
        native.array(factor.diagonal, np.float32, size),
        native.array(weights, np.float32, tiles * size * TILE),
        *(native.array(each, np.float32, tiles * groups * TILE) for each in numbers),
        native.array(group_of, np.int64, size),
        native.array(errors, np.float32, errors.size, written=True),
        native.array(found, np.uint8, found.size, written=True),
        native.array(panel, np.float32, panel.size, written=True),
    )
    for again in (False, *(True,) * repeats):
        native.call("compensate", *arrays, size, stride, tiles, groups, again, *codes, kind)
    return errors, found


def output_errors(errors: Tiles, inputs: Floats) -> npt.NDArray[np.float64]:
    """Return the sum over the inputs x of (e x)^2 for each row e of the errors: f64 [rows].

    inputs: [count, K], of which as many count as make whole quads
    """
    tiles, size, _ = errors.values.shape
    count = len(inputs) // QUAD * QUAD
    totals = np.empty((tiles, TILE), dtype=np.float64)
    native.call(
        "output_errors",
        native.array(errors.values, np.float32, tiles * size * TILE),
        native.array(inputs[:count], np.float32, count * size),
        native.array(totals, np.float64, tiles * TILE, written=True),
        size,
        tiles,
        count,
    )
    return totals.reshape(-1)[: errors.rows]


@functools.lru_cache(maxsize=1)
def trial_weights(size: int) -> Floats:
    """Return weights on which dampings are compared: one tile [1, K, 64] of numbers that look random, in [-100, 100).

    They are rounded to whole numbers, as groups of scale 1 would be.
    """
    numbers = np.arange(size * TILE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(29)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    unit = (numbers >> np.uint64(40)).astype(np.float64) / 2**24
    return (unit * 200 - 100).astype(np.float32).reshape(1, size, TILE)


def trial_error(factor: MomentsFactor, inputs: Floats) -> float:
    """Return the error of the outputs that rounding weights that look random gives.

    inputs: [count, K], in the order of the factor
    """
    size = len(factor.order)
    ones, zeros = np.ones((1, 1, TILE), dtype=np.float32), np.zeros((1, 1, TILE), dtype=np.float32)
    group_of = np.zeros(size, dtype=np.int64)
    errors, _ = round_tiles(trial_weights(size), (ones, zeros), group_of, factor, codes=(-(2**20), 2**20))
    return float(np.add.accumulate(output_errors(Tiles(errors, TILE), inputs))[-1])
