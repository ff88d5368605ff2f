"""Factors on the rows and columns of a weight, and sums of squares along them; docs/folding.md says what for.

Both work on float32 products and sums in a fixed order, so that every processor finds the same.
The backend is imported where it is used: commands that only read manifests do without it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def multiply(values: npt.NDArray[np.uint8], dtype: str, *, columns: Floats, rows: Floats, out: Floats) -> None:
    """Write value * column factor * row factor to `out`.

    values: [rows * columns] as raw bytes, which may be those of `out`
    dtype: BF16 or F32
    columns, rows: one factor for each
    """
    from pqweights.kernels import cpu

    count, bf16 = len(rows) * len(columns), dtype == "BF16"
    cpu.run(
        "multiply",
        cpu.address(values, np.uint8, count * (2 if bf16 else 4)),
        cpu.address(columns, np.float32, len(columns)),
        cpu.address(rows, np.float32, len(rows)),
        cpu.address(out, np.float32, count, written=True),
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
    from pqweights.kernels import cpu

    columns, bf16 = len(weights), dtype == "BF16"
    room = np.empty(columns, dtype=np.uint32)
    of_columns, of_rows = np.zeros(columns, dtype=np.float32), np.empty(rows, dtype=np.float32)
    cpu.run(
        "squares",
        cpu.address(values, np.uint8, rows * columns * (2 if bf16 else 4)),
        cpu.address(weights, np.float32, columns),
        cpu.address(of_columns, np.float32, columns, written=True),
        cpu.address(of_rows, np.float32, rows, written=True),
        cpu.address(room, np.uint32, columns, written=True),
        rows,
        columns,
        bf16,
        along_rows,
    )
    return of_columns, of_rows
