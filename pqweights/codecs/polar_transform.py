"""The recursive polar transform of 16 coordinates, of weights in numpy and of keys and values in torch.

Han et al., arXiv:2502.02617, Algorithm 1: coordinates are taken in pairs, each of which becomes a radius and an angle;
the radii again, four times, so that 16 coordinates become one radius and 15 angles. Codes need no angles: they follow
from comparisons with the tangents of the boundaries, and decoding needs the cosines and sines of the centroids alone.
All of these are correctly rounded to float32, so that every machine finds the same codes and values (docs/format.md,
section 9).

The last axis is that of coordinates. At level l = 1 to 4 a vector of n coordinates has n / 2**l angles. In numpy arrays
are best transposed: then each step is an operation on rows in memory, with an element for each vector.

For a vector of independent standard normal coordinates all 15 angles and the radius are independent (Lemma 2):

- level 1: angles are uniform on [0, 2 pi)
- level l >= 2: angles are on [0, pi/2], because radii are not negative, with a density proportional to
  sin^(2^(l-1) - 1)(2 psi)

The centroids, which are part of the format, minimise the mean squared error of the angle (Section 4.1, equation 4):
each is the mean of the angle over its cell, and a cell ends half-way between two centroids. The error of the decoded
vector is not quite that: it is 2 - 2 cos(angle - centroid), whose minimum has centroids up to 0.0003 radians away. The
vectors' error would be lower by less than one part in a million, so the tables are those of the paper.
tests/codecs/test_polar_codebook.py derives them again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import Bytes, Floats
from pqweights.kernels import BLOCK_SIZE

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

# The relative mean squared error of normal vectors that are decoded from their angle codes and their exact radius:
# 2 - 2 gamma, where gamma, the mean cosine between a vector and its decoded direction, is the product over the levels
# of E[cos(angle - centroid)]. It is 1.394 bits above the rate-distortion bound 4^-3.875.
RELATIVE_MSE = 0.0320764954


def angle_boundaries(level: int) -> tuple[float, ...]:
    """Return the ends between the cells of a level, 1 to 4, in radians, half-way between centroids, ascending.

    The code of an angle is the number of boundaries that are not above it; at level 1 the angle is in [0, 2 pi).
    """
    return tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS[level - 1]))


def angle_density(level: int, angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the probability density of angles of a level, 1 to 4, for normal vectors (Lemma 2), per radian.

    angles: any shape, in radians; in [0, 2 pi) at level 1 and in [0, pi/2] at the others
    """
    if level == 1:
        return np.full(np.shape(angles), 1 / (2 * math.pi))
    size = 2 ** (level - 1)  # coordinates in each of the two radii
    factor = math.gamma(size) / (2.0 ** (size - 2) * math.gamma(size / 2) ** 2)
    density: npt.NDArray[np.float64] = factor * np.sin(2 * angles) ** (size - 1)
    return density


# Groups of a block: each has a radius.
GROUPS = BLOCK_SIZE // GROUP
# The bytes of the angle codes of a block: 46 bits for each group.
ANGLE_BYTES = sum(bits * (BLOCK_SIZE >> level) for level, bits in enumerate(ANGLE_BITS, start=1)) // 8

Codes = npt.NDArray[np.uint8]
Array = Any  # of numpy or of torch


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


def transform(x: Array, of_pairs: Callable[[int, Array, Array], Array]) -> tuple[list[Array], Array]:
    """Return what `of_pairs` says of the pairs of each level, [..., n / 2**level], and the radii [..., n / 16].

    x: coordinates whose squares neither overflow nor vanish beside the largest, [..., n] f32
    of_pairs: called with the level, x and y; above level 1 neither is negative
    """
    of_levels = []
    for level in range(1, len(ANGLE_BITS) + 1):
        x, y = x[..., 0::2], x[..., 1::2]
        of_levels.append(of_pairs(level, x, y))
        x = library(x).sqrt(x * x + y * y)
    return of_levels, x


def angle_codes(level: int, x: Array, y: Array) -> Array:
    """Return the codes of the angles of the vectors (x, y), u8; above level 1 neither is negative.

    The code of (0, 0) means nothing.
    """
    of = library(x)
    along, across = (abs(x), abs(y)) if level == 1 else (x, y)
    code = of.zeros_like(along, dtype=of.uint8)
    for tangent in tangents(level):
        code += across >= along * float(tangent)
    if level == 1:  # the second quadrant mirrors the first, and the lower half the upper one
        code = of.where(x < 0, code ^ 7, code)
        code = of.where(y < 0, code ^ 15, code)
    return code


def directions(codes: Sequence[Array], pairs_of: Callable[[int, Array], Array]) -> Array:
    """Return the unit vectors that angle codes stand for, [..., n] f32; each 16 coordinates are one vector.

    codes: of levels 1 to 4, [..., n / 2**level] each
    pairs_of: returns the cosine and the sine of the centroid of each code of a level, [..., 2], as a new array
    """
    result = None
    for level in range(len(ANGLE_BITS), 0, -1):
        pairs = pairs_of(level, codes[level - 1])
        if result is not None:
            pairs *= result[..., None]
        result = pairs.reshape(*pairs.shape[:-2], -1)
    return result


def library(x: Array) -> Any:
    """Return numpy or torch, of which an array is."""
    if isinstance(x, np.ndarray):
        return np
    import torch

    return torch


def pack(codes: Sequence[Codes]) -> Bytes:
    """Return the packed bytes of the codes of all levels [128 / 2**level, blocks], [46, blocks]: level 1 first."""
    packed = np.zeros((ANGLE_BYTES, codes[0].shape[1]), dtype=np.uint8)
    for level, place in _fields():
        bits, field = ANGLE_BITS[level - 1], packed[place]
        for number, part in enumerate(codes[level - 1].reshape(8 // bits, *field.shape)):
            field |= part << np.uint8(bits * number)
    return packed


def unpack(packed: Bytes) -> tuple[Codes, ...]:
    """Undo `pack`."""
    codes = []
    for level, place in _fields():
        bits, field = ANGLE_BITS[level - 1], packed[place]
        parts = [(field >> np.uint8(bits * number)) & np.uint8(2**bits - 1) for number in range(8 // bits)]
        codes.append(np.concatenate(parts))
    return tuple(codes)


def _fields() -> Iterator[tuple[int, slice]]:
    """Yield each level with the place of its bytes."""
    start = 0
    for level, bits in enumerate(ANGLE_BITS, start=1):
        size = bits * (BLOCK_SIZE >> level) // 8
        yield level, slice(start, start + size)
        start += size
