"""The codecs that the source paper compares its method with: none of its steps, one of them, or both.

Vicentino, arXiv:2603.29078 v1: block absmax with uniform levels, the rotation alone, the Lloyd-Max levels alone, and
both as published, with the L2 norm of the block where hadamard-lloyd-max has the least-squares norm. They are written
in numpy, and store codes and norms as all scalar codecs do (docs/format.md, section 4). `add` makes them codecs of this
process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pqweights.common.dtypes import FINITE_RANGES, from_float32, item_bytes, to_float32
from pqweights.formats import CODECS, lloyd_max
from pqweights.formats.lloyd_max import FIRST_INVALID_HALF, LloydMax
from pqweights.formats.master import Bytes, Doubles, Floats
from pqweights.kernels import BLOCK_SIZE, FIELD_WIDTHS, ORTHONORMAL, SIGNS, Measures
from pqweights.kernels.codebook import Codebook, codebook_from_levels
from pqweights.kernels.reference import unpack

UNROTATED = "none"
ROOT_OF_BLOCK_SIZE = np.float32(math.sqrt(BLOCK_SIZE))

# Relative MSE of the uniform levels for blocks of 128 values of N(0,1): the expectation, over the largest of the 128
# magnitudes, of the mean squared error of the 127 others. tests/test_ablation.py integrates it again.
ABSMAX_DISTORTION: dict[int, float] = {
    2: 0.587699466,
    3: 0.0749269812,
    4: 0.0137518757,
    5: 0.00299441748,
    6: 0.000701064165,
    7: 0.000169744952,
    8: 0.0000417705079,
}


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


@dataclass(frozen=True, kw_only=True)
class ComparisonFormat(LloydMax):
    """A format for comparison. No norm here is that of least squares.

    uniform: whether levels are uniform up to the largest magnitude, which is then the stored norm; otherwise they are
        the Lloyd-Max levels, and the norm is the L2 norm
    """

    uniform: ClassVar[bool]
    gained: ClassVar[Sequence[int]] = ()
    description: ClassVar[str] = ""
    papers: ClassVar[Sequence[str]] = ()
    orthogonal_error = False

    @property
    def rotated(self) -> bool:
        """Whether blocks are rotated by the Hadamard matrix."""
        return self.rotation != UNROTATED

    @property
    def distortion(self) -> float:
        """The distortion of the levels on N(0,1): the weights, or the rotated weights, are taken as Gaussian."""
        return (ABSMAX_DISTORTION if self.uniform else lloyd_max.DISTORTION)[self.bits]

    @property
    def codebook(self) -> Codebook:
        """The levels."""
        return uniform_codebook(self.bits) if self.uniform else lloyd_max.codebook(self.bits)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str) -> Measures:
        """Encode whole blocks into codes and norms."""
        codes, norms = parts[0], parts[1].reshape(-1).view(np.uint16)
        energies, errors = np.empty((2, len(codes)))
        blocks, block_bytes = len(codes), BLOCK_SIZE * item_bytes(dtype)
        smallest, largest, first_bad = math.inf, 0.0, -1
        for first in range(0, blocks, PIECE_BLOCKS):
            here = slice(first, min(first + PIECE_BLOCKS, blocks))
            raw = values[here.start * block_bytes : here.stop * block_bytes]
            x = to_float32(raw, dtype).reshape(-1, BLOCK_SIZE).T.copy()
            bad = np.flatnonzero(~np.isfinite(x).all(axis=0))
            if len(bad):
                x[:, bad] = 0
                first_bad = first + int(bad[0]) if first_bad < 0 else first_bad
            found = self._encode(x)
            codes[here] = pack(found.codes, self.bits).T
            norms[here] = np.minimum(found.norms.view(np.uint16), FIRST_INVALID_HALF - 1)
            energies[here] = found.energies
            errors[here] = found.errors
            used = found.exact_norms[found.exact_norms > 0]
            smallest = min(smallest, float(used.min(initial=math.inf)))
            largest = max(largest, float(used.max(initial=0.0)))
        return Measures(energies, errors, first_bad, smallest, largest)

    def _encode(self, x: Floats) -> _EncodedPiece:
        """Encode blocks of finite values, [128, blocks]."""
        book = self.codebook
        if self.rescued:
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
        with np.errstate(over="ignore"):  # the statistics show if the exponent does not fit
            norms = np.ldexp(exact, -self.norm_exponent).astype(np.float32).astype(np.float16)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            short = 1 - np.ldexp(norms.astype(np.float64), self.norm_exponent) / exact
            per_block = residual.astype(np.float64) + 2 * short * (projection.astype(np.float64) - level_energy)
            per_block = np.maximum(per_block + short * short * level_energy, 0)
            errors = np.where(exact > 0, exact * exact / BLOCK_SIZE * per_block, 0)
        energies = np.ldexp(squares.astype(np.float64), 2 * k)
        return _EncodedPiece(codes, norms, energies, errors, exact)

    def _divisors(self, x: Floats, squares: Floats) -> tuple[Floats, np.float32, Floats]:
        """Return the divisor of each block, the factor from the quotient to z, and the norm in units of 2**k."""
        if self.uniform:
            largest = np.abs(x).max(axis=0)
            return largest, ROOT_OF_BLOCK_SIZE, largest * np.float32(ORTHONORMAL) if self.rotated else largest
        norm = np.sqrt(squares)
        return norm, np.float32(1) if self.rotated else ROOT_OF_BLOCK_SIZE, norm


class UnrotatedFormat(ComparisonFormat):
    """One whose codes are those of the weights themselves; then there is no rescue, either."""

    settings: ClassVar[Mapping[str, Any]] = {"rotation": UNROTATED, "norm_exponent": 0}
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {"rotation": (UNROTATED,)}

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str) -> None:
        """Decode whole blocks to raw bytes of `dtype`: BF16, F16 or F32."""
        decoded = self.decode_torch([torch.from_numpy(part) for part in parts]).numpy()
        values[:] = from_float32(decoded.reshape(-1).clip(*FINITE_RANGES[dtype]), dtype)

    def decode_torch(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32."""
        codes, norms = parts[0], parts[1].reshape(-1).view(torch.float16)
        levels = torch.from_numpy(self.codebook.levels).to(codes.device)
        scale = (norms.double() * (2.0**self.norm_exponent * ORTHONORMAL)).float()
        return levels[unpack(codes, self.bits).long()] * scale[:, None]


class Absmax(UnrotatedFormat):
    """Uniform levels up to the largest magnitude of a block."""

    codec: ClassVar[str] = "absmax"
    uniform: ClassVar[bool] = True


class HadamardAbsmax(ComparisonFormat):
    """The same of rotated blocks."""

    codec: ClassVar[str] = "hadamard-absmax"
    uniform: ClassVar[bool] = True


class PlainLloydMax(UnrotatedFormat):
    """Lloyd-Max levels alone."""

    codec: ClassVar[str] = "lloyd-max"
    uniform: ClassVar[bool] = False


class HadamardLloydMaxL2(ComparisonFormat):
    """The method as published."""

    codec: ClassVar[str] = "hadamard-lloyd-max-l2"
    uniform: ClassVar[bool] = False


class _EncodedPiece(NamedTuple):
    """The encoding of some blocks.

    codes: not yet packed, [128, blocks]
    norms: as they are stored, [blocks]
    energies: sums of squares, [blocks]
    errors: sums of squared errors, [blocks]
    exact_norms: the norms before rounding, [blocks]
    """

    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.float16]
    energies: Doubles
    errors: Doubles
    exact_norms: Doubles


@functools.cache
def uniform_codebook(bits: int) -> Codebook:
    """Return uniform levels: multiples of 1 / (2**(bits - 1) - 1) of the norm.

    They are given times sqrt(128), because decoding divides by it. The lowest level is never used, because the levels
    have to be symmetric around zero.
    """
    steps = np.arange(2**bits) - 2 ** (bits - 1)
    levels = math.sqrt(BLOCK_SIZE) * steps / (2 ** (bits - 1) - 1)
    return codebook_from_levels(bits, levels.astype(np.float32))


@dataclass(frozen=True, kw_only=True, eq=False)
class LevelSearch:
    """A table for finding how many thresholds a value reaches.

    Values and thresholds are assigned to cells by the same rounded operations, which preserve order. So a value is
    above all thresholds in lower cells, and because no two thresholds share a cell, one comparison settles the rest.

    lowest: the lowest threshold
    cells_per_unit: how many cells a distance of 1 has
    below: how many thresholds are in lower cells, [cells]
    limits: the first threshold that is not in a lower cell, [cells]
    """

    lowest: np.float32
    cells_per_unit: np.float32
    below: npt.NDArray[np.uint8]
    limits: Floats

    def codes(self, z: Floats) -> npt.NDArray[np.uint8]:
        """Return the number of thresholds t with z >= t for each element."""
        cell = _cells(z, lowest=self.lowest, cells_per_unit=self.cells_per_unit, cells=len(self.below))
        result: npt.NDArray[np.uint8] = self.below.take(cell)
        result += z >= self.limits.take(cell)
        return result


@functools.cache
def level_search(uniform: bool, bits: int) -> LevelSearch:
    """Return the table of a bit width, with as many cells as it takes to separate the thresholds."""
    thresholds = (uniform_codebook(bits) if uniform else lloyd_max.codebook(bits)).thresholds
    lowest, span = thresholds[0], thresholds[-1] - thresholds[0]
    cells = 2**bits
    while True:
        cells_per_unit = np.float32((cells - 2) / span)
        found = _cells(thresholds, lowest=lowest, cells_per_unit=cells_per_unit, cells=cells)
        if (np.diff(found) > 0).all():
            break
        cells *= 2
    below = np.searchsorted(found, np.arange(cells), side="left")
    return LevelSearch(
        lowest=lowest,
        cells_per_unit=cells_per_unit,
        below=below.astype(np.uint8),
        limits=np.append(thresholds, np.float32(np.inf))[below],
    )


def _cells(z: Floats, *, lowest: np.float32, cells_per_unit: np.float32, cells: int) -> npt.NDArray[np.int32]:
    """Return the cell of each element; the first cell also holds all lower values, and the last one all higher ones."""
    scaled = z - lowest
    scaled *= cells_per_unit
    np.clip(scaled, 0, cells - 1, out=scaled)
    return scaled.astype(np.int32)


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:  # [128, blocks] -> [16 * bits, blocks]
    """Return the packed bytes of each column, in the order of docs/format.md, section 4."""
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


def add() -> None:
    """Make them codecs of this process."""
    CODECS.update({format.codec: format for format in (Absmax, HadamardAbsmax, PlainLloydMax, HadamardLloydMaxL2)})
