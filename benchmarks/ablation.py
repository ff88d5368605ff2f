"""The quantizers that the source paper compares its method with: none of its steps, one of them, or both.

Vicentino, arXiv:2603.29078 v1: block absmax with uniform levels, the rotation alone, the Lloyd-Max levels alone, and
both as published, with the L2 norm of the block where hadamard-lloyd-max has the least-squares norm. They are written
in numpy; quality.py evaluates what they decode to, as it does with other libraries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from peers import FIXED, Quantizer, same

from pqweights.formats.lloyd_max import codebook
from pqweights.kernels import BLOCK_SIZE

ABSMAX = "absmax"
ROTATED = "+ Hadamard only"
LEVELS = "+ Lloyd-Max only"
BOTH = "+ both"
# Whether blocks are rotated, and whether levels are those of Lloyd and Max, not uniform.
STEPS = {ABSMAX: (False, False), ROTATED: (True, False), LEVELS: (False, True), BOTH: (True, True)}


class Encoded(NamedTuple):
    """Levels f32 [blocks, 128] of unit variance or of at most 1, norms f16 [blocks, 1], and how many weights there are.

    The levels stand for the codes that are their places in the table.
    """

    levels: np.ndarray
    norms: np.ndarray
    weights: int


def quantizers(bits: int) -> list[Quantizer]:
    """Those of a bit width, by the names of STEPS."""
    return [quantizer(name, bits, rotated=rotated, fitted=fitted) for name, (rotated, fitted) in STEPS.items()]


def quantizer(name: str, bits: int, *, rotated: bool, fitted: bool) -> Quantizer:
    """One of them. fitted: whether levels are those of Lloyd and Max, scaled by the L2 norm of a block"""
    book, most = codebook(bits), 2 ** (bits - 1) - 1

    def encode(weight: np.ndarray) -> Encoded:
        blocks = np.zeros((-(-weight.size // BLOCK_SIZE), BLOCK_SIZE), dtype=np.float32)
        blocks.reshape(-1)[: weight.size] = weight.reshape(-1)
        blocks = hadamard(blocks) if rotated else blocks
        norms = np.sqrt(np.square(blocks).mean(1, keepdims=True)) if fitted else np.abs(blocks).max(1, keepdims=True)
        scaled = blocks / np.where(norms > 0, norms, 1)
        levels = book.levels[np.searchsorted(book.thresholds, scaled, "right")] if fitted else rounded(scaled, most)
        return Encoded(levels, norms.astype(np.float16), weight.size)

    def decode(encoded: Encoded) -> np.ndarray:
        blocks = encoded.levels * encoded.norms.astype(np.float32)
        return (hadamard(blocks) if rotated else blocks).reshape(-1)[: encoded.weights]

    return Quantizer(
        name=name,
        counted=f"{bits}-bit codes; F16 norm per {BLOCK_SIZE}",
        threading=FIXED,
        prepare=same,
        encode=encode,
        decode=decode,
        stored_bits=lambda encoded: bits * encoded.levels.size + 8 * encoded.norms.nbytes,
    )


def rounded(values: np.ndarray, most: int) -> np.ndarray:
    """Values from -1 to 1, rounded to multiples of 1 / most; the lowest code is not used, as levels are symmetric."""
    return np.rint(values * most) / np.float32(most)


def hadamard(blocks: np.ndarray) -> np.ndarray:
    """The orthonormal Walsh-Hadamard transform of each row, [blocks, 128], which is its own inverse."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < BLOCK_SIZE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return blocks @ (matrix / np.float32(math.sqrt(BLOCK_SIZE)))
