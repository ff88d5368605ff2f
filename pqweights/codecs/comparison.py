"""The codecs that the source paper compares its method with, one step of it left out or all of them in.

Vicentino, arXiv:2603.29078 v1: block absmax with uniform levels, the rotation alone, the Lloyd-Max levels alone, and both
as published, which is with the L2 norm of the block instead of our least-squares norm. They are here to be measured, in
numpy; their files decode like all others. The arithmetic: docs/format.md, section 5, "Codecs for comparison".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.codecs import lloyd_max
from pqweights.codecs.protocol import Bytes
from pqweights.codecs.scalar import HADAMARD, SIGNED_HADAMARD, UNROTATED, ScalarCodec
from pqweights.dtypes import item_bytes, to_float32
from pqweights.kernels import BLOCK_SIZE, FIELD_WIDTHS, ORTHONORMAL, SIGNS, BlockCoding, EncodedArrays, EncodeStats
from pqweights.kernels.codebook import Codebook, codebook_from_levels

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Blocks that are encoded at once: few enough that temporary arrays stay in the cache, many enough to be worth the calls.
PIECE_BLOCKS = 1024

# Sums of squares in this range need no prescaling: their squares neither overflow nor vanish.
SMALLEST_SAFE_SQUARE = 2.0**-60
LARGEST_SAFE_SQUARE = 2.0**60

ROOT_OF_BLOCK_SIZE = np.float32(math.sqrt(BLOCK_SIZE))

# Relative MSE of the uniform levels for blocks of 128 values of N(0,1): the expectation, over the largest of the 128
# magnitudes, of the mean squared error of the 127 others. tests/test_codecs.py integrates it again.
ABSMAX_DISTORTION: dict[int, float] = {
    2: 0.587699466,
    3: 0.0749269812,
    4: 0.0137518757,
    5: 0.00299441748,
    6: 0.000701064165,
    7: 0.000169744952,
    8: 0.0000417705079,
}


@dataclass(frozen=True, kw_only=True)
class ComparisonCodec(ScalarCodec):
    """One of them.

    rotated: with the Hadamard rotation. uniform: with uniform levels up to the largest magnitude, which is the norm that
    is stored; else with Lloyd-Max levels and the L2 norm.
    """

    name: str
    rotated: bool
    uniform: bool
    orthogonal_error = False  # as no norm here is that of least squares

    @property
    def rotations(self) -> tuple[str, ...]:
        """See ScalarCodec; nothing rescues a weight that is not rotated."""
        return (HADAMARD, SIGNED_HADAMARD) if self.rotated else (UNROTATED,)

    def distortion(self, bits: int) -> float:
        """See ScalarCodec; for the weights, or the rotated ones, a Gaussian."""
        return (ABSMAX_DISTORTION if self.uniform else lloyd_max.DISTORTION)[bits]

    def codebook(self, bits: int) -> Codebook:
        """See ScalarCodec."""
        return uniform_codebook(bits) if self.uniform else lloyd_max.codebook(bits)

    def encode_blocks(self, values: Bytes, dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
        """See ScalarCodec."""
        blocks, block_bytes = len(out.codes), BLOCK_SIZE * item_bytes(dtype)
        smallest, largest, first_bad = math.inf, 0.0, -1
        for first in range(0, blocks, PIECE_BLOCKS):
            here = slice(first, min(first + PIECE_BLOCKS, blocks))
            raw = values[here.start * block_bytes : here.stop * block_bytes]
            x = to_float32(raw, dtype).reshape(-1, BLOCK_SIZE).T.copy()
            bad = np.flatnonzero(~np.isfinite(x).all(axis=0))
            if len(bad):
                x[:, bad] = 0
                first_bad = first + int(bad[0]) if first_bad < 0 else first_bad
            found = self._encode(x, coding)
            out.codes[here] = pack(found.codes, coding.codebook.bits).T
            out.norms[here] = found.norms.view(np.uint16)
            out.energies[here] = found.energies
            out.errors[here] = found.errors
            used = found.exact_norms[found.exact_norms > 0]
            smallest = min(smallest, float(used.min(initial=math.inf)))
            largest = max(largest, float(used.max(initial=0.0)))
        return EncodeStats(smallest, largest, first_bad)

    def _encode(self, x: Floats, coding: BlockCoding) -> _EncodedPiece:
        """Blocks [128, blocks], finite."""
        book = coding.codebook
        if coding.signed:
            x = x * SIGNS[:, None]
        x, squares, k = prescale(x)
        if self.rotated:
            x = hadamard(x)
        divisor, factor, norm = self._divisors(x, squares)
        with np.errstate(divide="ignore"):
            z = x * np.where(divisor > 0, factor / divisor, np.float32(0))
        codes = level_search(self.uniform, book.bits).codes(z)
        c = book.levels.take(codes)
        projection, level_energy = tree_sum(z * c), tree_sum(c * c)
        z -= c
        z *= z
        residual = tree_sum(z)

        exact = np.ldexp(norm.astype(np.float64), k)
        with np.errstate(over="ignore"):  # an exponent that does not fit is found out by the statistics
            norms = np.ldexp(exact, -coding.norm_exponent).astype(np.float32).astype(np.float16)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            short = 1 - np.ldexp(norms.astype(np.float64), coding.norm_exponent) / exact
            per_block = residual.astype(np.float64) + 2 * short * (projection.astype(np.float64) - level_energy)
            per_block = np.maximum(per_block + short * short * level_energy, 0)
            errors = np.where(exact > 0, exact * exact / BLOCK_SIZE * per_block, 0)
        energies = np.ldexp(squares.astype(np.float64), 2 * k)
        return _EncodedPiece(codes, norms, energies, errors, exact)

    def _divisors(self, x: Floats, squares: Floats) -> tuple[Floats, np.float32, Floats]:
        """The divisor of each block, what makes z of a quotient, and the norm in units of 2**k."""
        if self.uniform:
            largest = np.abs(x).max(axis=0)
            return largest, ROOT_OF_BLOCK_SIZE, largest * np.float32(ORTHONORMAL) if self.rotated else largest
        norm = np.sqrt(squares)
        return norm, np.float32(1) if self.rotated else ROOT_OF_BLOCK_SIZE, norm


class _EncodedPiece(NamedTuple):
    """codes: [128, blocks] u8. norms: [blocks] f16. energies, errors: [blocks] f64. exact_norms: before rounding, f64."""

    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.float16]
    energies: Doubles
    errors: Doubles
    exact_norms: Doubles


@functools.cache
def uniform_codebook(bits: int) -> Codebook:
    """Multiples of 1 / (2**(bits - 1) - 1) of the norm, in units that the decoding divides by sqrt(128).

    The lowest level is never used, because its mirror image would be one too many.
    """
    steps = np.arange(2**bits) - 2 ** (bits - 1)
    levels = math.sqrt(BLOCK_SIZE) * steps / (2 ** (bits - 1) - 1)
    return codebook_from_levels(bits, levels.astype(np.float32))


@dataclass(frozen=True, eq=False)
class LevelSearch:
    """Counts the thresholds that a value reaches: all of those in lower cells, and perhaps the one in its own cell.

    Values and thresholds are put into cells by the same rounded operations, which never reverse an order; so a value in a
    higher cell than a threshold is above it, and where no two thresholds share a cell, one comparison settles the rest.
    below: [cells] thresholds in lower cells. limits: [cells] the first threshold that is not.
    """

    lowest: np.float32
    cells_per_unit: np.float32
    below: npt.NDArray[np.uint8]
    limits: Floats

    def codes(self, z: Floats) -> npt.NDArray[np.uint8]:
        """The number of thresholds t with z >= t, of every element."""
        cell = _cells(z, self.lowest, self.cells_per_unit, len(self.below))
        result: npt.NDArray[np.uint8] = self.below.take(cell)
        result += z >= self.limits.take(cell)
        return result


@functools.cache
def level_search(uniform: bool, bits: int) -> LevelSearch:
    """With as many cells as it takes to tell the thresholds apart."""
    thresholds = (uniform_codebook(bits) if uniform else lloyd_max.codebook(bits)).thresholds
    lowest, span = thresholds[0], thresholds[-1] - thresholds[0]
    cells = 2**bits
    while True:
        cells_per_unit = np.float32((cells - 2) / span)
        found = _cells(thresholds, lowest, cells_per_unit, cells)
        if (np.diff(found) > 0).all():
            break
        cells *= 2
    below = np.searchsorted(found, np.arange(cells), side="left")
    return LevelSearch(lowest, cells_per_unit, below.astype(np.uint8), np.append(thresholds, np.float32(np.inf))[below])


def _cells(z: Floats, lowest: np.float32, cells_per_unit: np.float32, cells: int) -> npt.NDArray[np.int32]:
    """Cell 0 also holds everything below, the last one everything above."""
    scaled = z - lowest
    scaled *= cells_per_unit
    np.clip(scaled, 0, cells - 1, out=scaled)
    return scaled.astype(np.int32)


# Blocks stand in columns below: each step is then an operation on rows as long as there are blocks.


def prescale(x: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """[128, blocks] -> blocks times 2**-k, their sums of squares [blocks], and k [blocks]; section 5, step 2."""
    with np.errstate(over="ignore"):
        squares = tree_sum(x * x)
    k = np.zeros(len(squares), dtype=np.int32)
    unsafe = np.flatnonzero(~((squares >= SMALLEST_SAFE_SQUARE) & (squares <= LARGEST_SAFE_SQUARE)))
    if len(unsafe):
        largest = np.abs(x[:, unsafe]).max(axis=0)
        exponent = np.where(largest > 0, np.frexp(largest.astype(np.float64))[1] - 1, 0)
        half = np.trunc(exponent / 2).astype(np.int32)  # in two steps, because 2**149 is no float32
        one = np.float32(1)
        scaled = x[:, unsafe] * np.ldexp(one, -half) * np.ldexp(one, half - exponent)
        squares[unsafe] = tree_sum(scaled * scaled)
        x = x.copy()
        x[:, unsafe] = scaled
        k[unsafe] = exponent
    return x, squares, k


def hadamard(x: Floats) -> Floats:  # [128, blocks] -> [128, blocks]
    """The unnormalised Walsh-Hadamard transform of every column, by butterflies h = 1, 2, 4, ..., 64."""
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
    """The sum of every column, by folding the lower half onto the upper one."""
    h = BLOCK_SIZE // 2
    while h:
        x = x[:h] + x[h : 2 * h]
        h //= 2
    total: Floats = x[0]
    return total


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:  # [128, blocks] -> [16 * bits, blocks]
    """The bytes of every column, in the order of section 4."""
    packed = np.empty((16 * bits, codes.shape[1]), dtype=np.uint8)
    shift = 0
    for width in FIELD_WIDTHS[bits]:
        field = (codes >> shift) & ((1 << width) - 1)
        folded = field.reshape(8 // width, 16 * width, -1)
        target = packed[16 * shift : 16 * (shift + width)]
        target[:] = folded[0]
        for m in range(1, 8 // width):
            target |= folded[m] << (width * m)
        shift += width
    return packed
