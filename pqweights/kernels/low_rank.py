"""Low-rank matrices that are added to weights; native/low_rank.cpp is the kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native

Floats = npt.NDArray[np.float32]


def add_low_rank(values: Floats, left: Floats, right: Floats, scale: float) -> None:
    """Add scale * (left @ right) to `values`, in float32; products are summed in the order of the rank, unfused.

    values: [rows, columns]
    left, right: [rows, rank] and [rank, columns]

    Raises ValueError for arrays that do not fit together.
    """
    (rows, rank), columns = left.shape, right.shape[-1]
    native.call(
        "add_low_rank",
        native.array(left, np.float32, rows * rank),
        native.array(right, np.float32, rank * columns),
        native.array(values, np.float32, rows * columns, written=True),
        *(rows, rank, columns),
        float(scale),
    )
