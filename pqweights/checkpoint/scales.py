"""One scale for each input channel of a weight: activation-aware scaling (AWQ: Lin et al., arXiv:2306.00978).

A weight [..., N, K] multiplies inputs of K channels and has scales [..., K]. The encoder multiplies by the stored float16
scale, the decoder divides by it; both in float32. (Where channels are stored before outputs, [..., K, N], a block lies
within one channel, and its norm takes up whatever factor the channel has: no scale could change what is coded.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Scales lie among the normal numbers of float16.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-14, 2.0**15


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a weight's scales: [..., K]."""
    return (*shape[:-2], shape[-1])


def multiply(values: Floats, start: int, shape: tuple[int, ...], scales: Floats) -> None:
    """Scale elements [start, start + len(values)) of a row-major weight in place. scales: of all its matrices, in order."""
    for part, of_part in _parts(values, start, shape, scales):
        part *= of_part


def divide(values: Floats, start: int, shape: tuple[int, ...], scales: Floats) -> None:
    """The inverse of multiply."""
    for part, of_part in _parts(values, start, shape, scales):
        part /= of_part


def _parts(values: Floats, start: int, shape: tuple[int, ...], scales: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Views of the values with what broadcasts over each: a row begun, whole rows of a matrix, a row that ends early."""
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
