"""The grids of GGUF's types of vectors, as their encoder searches them: native/gguf_grids.cpp.

Which points a grid has is a fact of the format, and taken from the gguf package.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# What coordinates are multiplied by, so that a scale is an odd number times the F16 factor of the block.
UNITS = {"IQ3_S": 1.0, "IQ3_XXS": 1 / 4, "IQ2_S": 1 / 8, "IQ2_XS": 1 / 8, "IQ2_XXS": 1 / 8, "IQ1_M": 1.0, "IQ1_S": 1.0}
LANES = 16


class Grid(NamedTuple):
    """A grid. A point has four or eight digits, of three or two bits, which say what its coordinates are.

    levels: f32 [16], the coordinates that a digit stands for, again and again
    points: u8 [points, 2], the digits of both halves of each point, the first in the lowest bits; sorted
    numbers: u16, the numbers of points by their digits, those of the first half above those of the second
    """

    levels: npt.NDArray[np.float32]
    points: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]


@functools.cache
def grid_of(type_name: str) -> Grid:
    """Return the grid of a type, a key of UNITS."""
    import gguf

    quants = getattr(gguf.quants, type_name)
    quants.init_grid()
    coordinates = quants.grid.reshape(quants.grid_shape)
    known = np.unique(coordinates)
    half, bits = {8: (4, 2), 4: (2, 3)}[coordinates.shape[1]]
    digits = np.searchsorted(known, coordinates).reshape(-1, 2, half)
    points = (digits << bits * np.arange(half)).sum(axis=2)
    joined = points[:, 0] << bits * half | points[:, 1]
    numbers = np.zeros(1 << 2 * bits * half, dtype=np.uint16)
    numbers[joined] = np.arange(len(joined))
    levels = np.pad(known * np.float32(UNITS[type_name]), (0, (1 << bits) - len(known)), mode="edge")
    return Grid(np.resize(levels, LANES), points[np.argsort(joined)].astype(np.uint8), numbers)
