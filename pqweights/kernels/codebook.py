"""The levels of a scalar quantizer and the thresholds between them, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Codebook:
    """Reproduction levels and decision thresholds of one width.

    bits: the width of a code.
    levels: [2**bits] float32, ascending.
    thresholds: [2**bits - 1] float32, threshold k lying between levels k and k + 1.

    The code of a value z is the number of thresholds t with z >= t, so a tie goes to the upper level.
    """

    bits: int
    levels: npt.NDArray[np.float32]
    thresholds: npt.NDArray[np.float32]


def codebook_from_levels(bits: int, levels: npt.NDArray[np.float32]) -> Codebook:
    """The codebook with these levels. Thresholds are the midpoints, added in float64 and rounded once to float32."""
    wide = levels.astype(np.float64)
    thresholds = ((wide[:-1] + wide[1:]) / 2).astype(np.float32)
    return Codebook(bits, levels, thresholds)
