"""Factors on the rows and columns of a weight, and sums of squares along them; docs/folding.md says what for.

Both work on float32 products and sums in a fixed order, so that every processor finds the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native

Floats = npt.NDArray[np.float32]


def multiply(values: npt.NDArray[np.uint8], dtype: str, *, columns: Floats, rows: Floats, out: Floats) -> None:
    """Write value * column factor * row factor to `out`.

    values: [rows * columns] as raw bytes, which may be those of `out`
    dtype: BF16 or F32
    columns, rows: one factor for each
    """
    count, bf16 = len(rows) * len(columns), dtype == "BF16"
    native.call(
        "multiply",
        native.array(values, np.uint8, count * (2 if bf16 else 4)),
        native.array(columns, np.float32, len(columns)),
        native.array(rows, np.float32, len(rows)),
        native.array(out, np.float32, count, written=True),
        len(rows),
        len(columns),
        bf16,
    )


def squares(
    values: npt.NDArray[np.uint8], dtype: str, *, rows: int, weights: Floats, along_rows: bool
) -> tuple[Floats, Floats]:
    """Return the sums of squares of the columns, [columns], and of the rows, [rows].

    values: [rows * columns] as raw bytes
    dtype: BF16 or F32
    weights: by what squares are multiplied before they are added up along rows, [columns]
    along_rows: whether the sums of the rows are wanted; else they are undefined
    """
    columns, bf16 = len(weights), dtype == "BF16"
    of_columns, of_rows = np.zeros(columns, dtype=np.float32), np.empty(rows, dtype=np.float32)
    native.call(
        "squares",
        native.array(values, np.uint8, rows * columns * (2 if bf16 else 4)),
        native.array(weights, np.float32, columns),
        native.array(of_columns, np.float32, columns, written=True),
        native.array(of_rows, np.float32, rows, written=True),
        native.array(np.empty(columns, dtype=np.float32), np.float32, columns, written=True),
        rows,
        columns,
        bf16,
        along_rows,
    )
    return of_columns, of_rows
