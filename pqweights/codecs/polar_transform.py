"""The recursive polar transform of 16 coordinates, of weights in numpy and of keys and values in torch.

Han et al., arXiv:2502.02617, Algorithm 1: coordinates are taken in pairs, each of which becomes a radius and an angle;
the radii again, four times, so that 16 coordinates become one radius and 15 angles. Codes need no angles: they follow
from comparisons with the tangents of the boundaries, and decoding needs the cosines and sines of the centroids alone.
All of these are correctly rounded to float32, so that every machine finds the same codes and values (docs/format.md,
section 9).

The last axis is that of coordinates. At level l = 1 to 4 a vector of n coordinates has n / 2**l angles. In numpy arrays
are best transposed: then each step is an operation on rows in memory, with an element for each vector.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    found = []
    for level in range(1, len(ANGLE_BITS) + 1):
        x, y = x[..., 0::2], x[..., 1::2]
        found.append(of_pairs(level, x, y))
        x = library(x).sqrt(x * x + y * y)
    return found, x


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
