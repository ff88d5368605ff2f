"""The arithmetic of the codec `polar`: the recursive polar transform of 16 coordinates, and its codes in bytes.

Han et al., arXiv:2502.02617, Algorithm 1. Angles are never computed: a code follows from comparisons with the tangents
of the boundaries, and decoding needs the cosines and sines of the centroids alone. All of these are correctly rounded
to float32, so that every machine finds the same codes and values (docs/format.md, section 9).

In all functions a block is a column, so that each step is an operation on rows with an element for each block. At level
l = 1 to 4 a block of 128 coordinates has 128 / 2**l angles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pqweights.codecs.polar_codebook import ANGLE_BITS, GROUP, LEVELS, angle_boundaries
from pqweights.codecs.protocol import Bytes, Floats
from pqweights.kernels import BLOCK_SIZE

# Groups of a block: each has a radius.
GROUPS = BLOCK_SIZE // GROUP
# The bytes of the angle codes of a block: 46 bits for each group.
ANGLE_BYTES = sum(bits * (BLOCK_SIZE >> level) for level, bits in enumerate(ANGLE_BITS, start=1)) // 8

Codes = npt.NDArray[np.uint8]


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


def angle_codes(x: Floats) -> tuple[tuple[Codes, ...], Floats]:
    """Return the angle codes and the radii of blocks; those of a group of zeros mean nothing but a radius of 0.

    x: coordinates whose squares neither overflow nor vanish beside the largest, [128, blocks]

    Returns the codes of levels 1 to 4, [128 / 2**level, blocks] each, and the radii, [8, blocks].
    """
    codes = []
    for level in range(1, len(ANGLE_BITS) + 1):
        x, y = x[0::2], x[1::2]
        codes.append(_codes(level, x, y))
        x = np.sqrt(x * x + y * y)
    return tuple(codes), x


def _codes(level: int, x: Floats, y: Floats) -> Codes:
    """Return the codes of the angles of the vectors (x, y); above level 1 neither is negative."""
    along, across = (np.abs(x), np.abs(y)) if level == 1 else (x, y)
    code = np.zeros(x.shape, dtype=np.uint8)
    for tangent in tangents(level):
        code += across >= tangent * along
    if level == 1:  # the second quadrant mirrors the first, and the lower half the upper one
        code ^= np.where(x < 0, np.uint8(7), np.uint8(0))
        code ^= np.where(y < 0, np.uint8(15), np.uint8(0))
    return code


def directions(codes: Sequence[Codes]) -> Floats:
    """Return the unit vectors that angle codes stand for, [128, blocks]; a group is one vector."""
    x: Floats = np.ones((GROUPS, codes[0].shape[1]), dtype=np.float32)
    for level in range(len(ANGLE_BITS), 0, -1):
        cosines, sines = unit_vectors(level)
        result = np.empty((2 * len(x), x.shape[1]), dtype=np.float32)
        np.multiply(x, cosines.take(codes[level - 1]), out=result[0::2])
        np.multiply(x, sines.take(codes[level - 1]), out=result[1::2])
        x = result
    return x


def pack(codes: Sequence[Codes]) -> Bytes:
    """Return the packed bytes of the codes of all levels, [46, blocks]: level 1 first."""
    packed = np.zeros((ANGLE_BYTES, codes[0].shape[1]), dtype=np.uint8)
    for level, place in _fields():
        bits, field = ANGLE_BITS[level - 1], packed[place]
        for number, part in enumerate(codes[level - 1].reshape(8 // bits, *field.shape)):
            field |= part << np.uint8(bits * number)
    return packed


def unpack(packed: Bytes) -> tuple[Codes, ...]:
    """Return the codes of all levels from packed bytes [46, blocks]."""
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
