"""The recursive polar transform of 16 coordinates, of keys and values.

Han et al., arXiv:2502.02617, Algorithm 1: coordinates are taken in pairs, each of which becomes a radius and an angle;
the radii again, four times, so that 16 coordinates become one radius and 15 angles. Codes need no angles: they follow
from comparisons with the tangents of the boundaries, and decoding needs the cosines and sines of the centroids alone.
All of these are correctly rounded to float32, so that every machine finds the same codes and values.

The last axis is that of coordinates. At level l = 1 to 4 a vector of n coordinates has n / 2**l angles.

For a vector of independent standard normal coordinates all 15 angles and the radius are independent (Lemma 2):

- level 1: angles are uniform on [0, 2 pi)
- level l >= 2: angles are on [0, pi/2], because radii are not negative, with a density proportional to
  sin^(2^(l-1) - 1)(2 psi)

The centroids minimise the mean squared error of the angle (Section 4.1, equation 4):
each is the mean of the angle over its cell, and a cell ends half-way between two centroids. The error of the decoded
vector is not quite that: it is 2 - 2 cos(angle - centroid), whose minimum has centroids up to 0.0003 radians away. The
vectors' error would be lower by less than one part in a million, so the tables are those of the paper.
tests/kv/test_polar_codebook.py derives them again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]

# Coordinates with one radius, and the bits of an angle at each level: 8 * 4 + 4 * 2 + 2 * 2 + 1 * 2 = 46 for a group.
GROUP = 16
ANGLE_BITS = (4, 2, 2, 2)

# The centroids of each level in radians, ascending. At level 1 the table goes around the circle.
LEVELS: tuple[tuple[float, ...], ...] = (
    (
        0.19634954084936207, 0.5890486225480862, 0.9817477042468103, 1.3744467859455345, 1.7671458676442586,
        2.159844949342983, 2.552544031041707, 2.9452431127404313, 3.3379421944391554, 3.7306412761378795,
        4.123340357836604, 4.516039439535327, 4.908738521234052, 5.301437602932776, 5.6941366846315, 6.086835766330225,
    ),
    (0.30975611698246786, 0.63398023999134, 0.9368160868035567, 1.2610402098124287),
    (0.4262496930707348, 0.6743849977574456, 0.896411329037451, 1.1445466337241619),
    (0.5242140911034461, 0.7059094056614845, 0.8648869211334121, 1.0465822356914505),
)  # fmt: skip


def angle_boundaries(level: int) -> tuple[float, ...]:
    """Return the ends between the cells of a level, 1 to 4, in radians, half-way between centroids, ascending.

    The code of an angle is the number of boundaries that are not above it; at level 1 the angle is in [0, 2 pi).
    """
    return tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS[level - 1]))


@functools.cache
def tangents(level: int) -> tuple[np.float32, np.float32, np.float32]:
    """Return the tangents of the three boundaries inside of a right angle; at level 1 those of the first quadrant.

    The one in the middle is that of pi / 4.
    """
    low, middle, high = angle_boundaries(level)[:3]
    assert math.isclose(middle, math.pi / 4)
    return np.float32(math.tan(low)), np.float32(1), np.float32(math.tan(high))


@functools.cache
def unit_vectors(level: int) -> tuple[Floats, Floats]:
    """Return the cosines and the sines of the centroids of a level, [centroids] each."""
    centroids = LEVELS[level - 1]
    cosines, sines = ([function(angle) for angle in centroids] for function in (math.cos, math.sin))
    return np.array(cosines, dtype=np.float32), np.array(sines, dtype=np.float32)


def transform(x: Tensor, of_pairs: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return what `of_pairs` says of the pairs of each level, [..., n / 2**level], and the radii [..., n / 16].

    x: coordinates whose squares neither overflow nor vanish beside the largest, [..., n] f32
    of_pairs: called with the level, x and y; above level 1 neither is negative
    """
    of_levels = []
    for level in range(1, len(ANGLE_BITS) + 1):
        x, y = x[..., 0::2], x[..., 1::2]
        of_levels.append(of_pairs(level, x, y))
        x = (x * x + y * y).sqrt()
    return of_levels, x


def angle_codes(level: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the codes of the angles of the vectors (x, y), u8; above level 1 neither is negative.

    The code of (0, 0) means nothing.
    """
    along, across = (abs(x), abs(y)) if level == 1 else (x, y)
    code = torch.zeros_like(along, dtype=torch.uint8)
    for tangent in tangents(level):
        code += across >= along * float(tangent)
    if level == 1:  # the second quadrant mirrors the first, and the lower half the upper one
        code = torch.where(x < 0, code ^ 7, code)
        code = torch.where(y < 0, code ^ 15, code)
    return code


def directions(codes: Sequence[Tensor], pairs_of: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the unit vectors that angle codes stand for, [..., n] f32; each 16 coordinates are one vector.

    codes: of levels 1 to 4, [..., n / 2**level] each
    pairs_of: returns the cosine and the sine of the centroid of each code of a level, [..., 2], as a new array
    """
    result = torch.ones((), device=codes[-1].device)
    for level in range(len(ANGLE_BITS), 0, -1):
        pairs = pairs_of(level, codes[level - 1])
        pairs *= result[..., None]
        result = pairs.reshape(*pairs.shape[:-2], -1)
    return result
