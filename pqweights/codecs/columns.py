"""The first steps of encoding blocks of 128 in numpy (docs/format.md, section 5): prescaling, rotation and sums.

A block is a column, so that each step is an operation on rows with an element for each block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import Floats
from pqweights.kernels import BLOCK_SIZE

# Blocks that are encoded together: few enough for their temporary arrays to stay in the cache, and enough to make the
# cost of the numpy calls small.
PIECE_BLOCKS = 1024

# Sums of squares in this range need no prescaling: their squares neither overflow nor vanish.
SMALLEST_SAFE_SQUARE = 2.0**-60
LARGEST_SAFE_SQUARE = 2.0**60


def prescale(x: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """Scale the blocks whose sums of squares would overflow or vanish (docs/format.md, section 5, step 2).

    x: blocks, [128, blocks]

    Returns the blocks times 2**-k, their sums of squares [blocks], and k [blocks].
    """
    with np.errstate(over="ignore"):
        squares = tree_sum(x * x)
    k = np.zeros(len(squares), dtype=np.int32)
    unsafe = np.flatnonzero(~((squares >= SMALLEST_SAFE_SQUARE) & (squares <= LARGEST_SAFE_SQUARE)))
    if len(unsafe):
        largest = np.abs(x[:, unsafe]).max(axis=0)
        exponent = np.where(largest > 0, np.frexp(largest.astype(np.float64))[1] - 1, 0)
        half = np.trunc(exponent / 2).astype(np.int32)  # in two steps, because 2**149 is not a float32
        one = np.float32(1)
        scaled = x[:, unsafe] * np.ldexp(one, -half) * np.ldexp(one, half - exponent)
        squares[unsafe] = tree_sum(scaled * scaled)
        x = x.copy()
        x[:, unsafe] = scaled
        k[unsafe] = exponent
    return x, squares, k


def hadamard(x: Floats) -> Floats:  # [128, blocks] -> [128, blocks]
    """Return the unnormalised Walsh-Hadamard transform of each column, by butterflies h = 1, 2, 4, ..., 64."""
    h = 1
    while h < BLOCK_SIZE:
        pairs = x.reshape(BLOCK_SIZE // (2 * h), 2, h, -1)
        x = np.empty_like(x)
        result = x.reshape(pairs.shape)
        np.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        h *= 2
    return x


def tree_sum(x: Floats) -> Floats:  # [128, blocks] -> [blocks]
    """Return the sum of each column, added by folding one half of it onto the other."""
    h = BLOCK_SIZE // 2
    while h:
        x = x[:h] + x[h : 2 * h]
        h //= 2
    total: Floats = x[0]
    return total
