"""The one seam to the arithmetic: whole blocks in, codes, norms and errors out, the same bytes from every backend.

`reference` (torch) defines what the bytes mean; `cpu` (C++) is what runs.
docs/format.md has the arithmetic, operation by operation. All arrays are C-contiguous numpy arrays.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
import warnings
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from pqweights.errors import PqweightsWarning

Doubles = npt.NDArray[np.float64]

BLOCK_SIZE = 128

# The first 128 bits of the fraction of pi, most significant first. A one flips the sign of its coordinate.
SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
SIGNS: npt.NDArray[np.float32] = np.array(
    [-1.0 if SIGN_BITS >> (BLOCK_SIZE - 1 - j) & 1 else 1.0 for j in range(BLOCK_SIZE)], dtype=np.float32
)

# dtype name -> the number that stands for it in the kernels
VALUE_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}

# 1 / sqrt(128), the factor with which the rotation keeps lengths.
ORTHONORMAL = 0.08838834764831845

# bits -> the widths of the fields into which a code is cut, low bits first: the binary digits of its width.
FIELD_WIDTHS = {bits: tuple(w for w in (8, 4, 2, 1) if bits & w) for bits in range(1, 9)}


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


class Measures(NamedTuple):
    """What encoding measured of some consecutive blocks.

    energies: sums of squares of the weights, [blocks] f64
    errors: sums of squared errors after decoding, [blocks] f64
    first_bad_block: index of the first block that holds a NaN or an infinity, or -1. What is written and measured of
        such a block is meaningless
    smallest_norm, largest_norm: the extremes of the non-zero least-squares norms, before `norm_exponent` is applied and
        before rounding to float16; inf and 0.0 if there is no such norm
    """

    energies: Doubles
    errors: Doubles
    first_bad_block: int
    smallest_norm: float = math.inf
    largest_norm: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCoding:
    """How blocks become codes and norms, and back.

    codebook: the levels and thresholds.
    signed: flip coordinates by SIGNS before the rotation.
    norm_exponent: a norm is stored as float16(norm * 2**-norm_exponent).
    gain: the norm is that of least squares times this; it has no part in decoding.
    """

    codebook: Codebook
    signed: bool = False
    norm_exponent: int = 0
    gain: float = 1.0


# [blocks, 16 * bits] codes, and [blocks] norms as float16 bit patterns
Encoded = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]


class Backend(Protocol):
    """Something that encodes and decodes whole blocks, from any thread."""

    def encode(
        self,
        values: npt.NDArray[np.uint8],  # [blocks * 128 * itemsize] raw bytes of the weights
        dtype: str,  # BF16, F16 or F32
        coding: BlockCoding,
        encoded: Encoded,  # out
    ) -> Measures:
        """Encode whole blocks, with norms of least squared error."""
        ...

    def decode(
        self,
        encoded: Encoded,
        coding: BlockCoding,
        dtype: str,  # BF16, F16 or F32
        values: npt.NDArray[np.uint8],  # out: [blocks * 128 * itemsize] raw bytes, rounded to nearest even, saturated
    ) -> None:
        """Decode whole blocks into `values`."""
        ...

    def add_in_order(self, totals: Doubles, *summands: Doubles) -> None:
        """Add the elements of one to three arrays [n] to their totals [arrays], one after the other.

        So a sum does not depend on how it is cut into calls.
        """
        ...


_said = threading.Lock()  # held from the first time on that the reference stands in: threads ask at once


@functools.cache
def load_backend() -> Backend:
    """Return the kernels of the CPU, or where none were compiled for this processor, the reference, which is said once.

    Each is imported on first use: torch is slow to import.
    """
    from pqweights.kernels import native

    if native.level() is not None:
        return cast(Backend, importlib.import_module("pqweights.kernels.cpu"))
    if _said.acquire(blocking=False):
        warnings.warn(
            "no compiled kernels for this processor: the reference computes, slowly (docs/kernels.md)",
            PqweightsWarning,
            stacklevel=2,
        )
    return cast(Backend, importlib.import_module("pqweights.kernels.reference"))
