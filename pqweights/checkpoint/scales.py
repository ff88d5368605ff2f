"""One scale for each input channel of a weight: activation-aware scaling (AWQ: Lin et al., arXiv:2306.00978).

A weight [..., N, K] multiplies inputs of K channels and has scales [..., K]. The encoder multiplies by the stored
float16 scale, and the decoder divides by it, both in float32. (In a weight that is stored as [..., K, N], a block lies
within one channel, and its norm absorbs any factor of the channel: no scale could change its codes.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Scales are normal numbers of float16.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-14, 2.0**15


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight's scales: [..., K]."""
    return (*shape[:-2], shape[-1])


def multiply(values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]) -> None:
    """Multiply elements of a row-major weight by their scales, in place.

    values: the elements from `start` on
    scales: those of all its matrices, in order
    start: the index of the first element
    shape: that of the weight
    """
    for part, of_part in _parts(values, scales, start=start, shape=shape):
        part *= of_part


def divide(values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]) -> None:
    """Divide elements of a row-major weight by their scales, in place: the inverse of `multiply`."""
    for part, of_part in _parts(values, scales, start=start, shape=shape):
        part /= of_part


def _parts(values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]) -> Iterator[tuple[Floats, Floats]]:
    """Yield views of the values with the scales that broadcast over each.

    The views are the rest of a row, whole rows of one matrix, or the beginning of a row.
    """
    rows, columns = shape[-2], shape[-1]
    by_matrix = scales.reshape(-1, columns)
    done = 0
    while done < len(values):
        row, column = divmod(start + done, columns)
        matrix, row = divmod(row, rows)
        left = len(values) - done
        if column or left < columns:
            count = min(columns - column, left)
            yield values[done : done + count], by_matrix[matrix, column : column + count]
        else:
            whole = min(rows - row, left // columns)
            count = whole * columns
            yield values[done : done + count].reshape(whole, columns), by_matrix[matrix]
        done += count
