"""The one seam to the arithmetic: whole blocks in, codes, norms and errors out, the same bytes from every backend.

`reference` (torch) defines the meaning; `cpu` (numba) and `gpu` (Triton) are what runs. The arithmetic itself, operation
by operation, is in docs/format.md. All arrays are C-contiguous numpy arrays.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from pqweights.kernels.codebook import Codebook

BLOCK_SIZE = 128

# The first 128 bits of the fraction of pi, most significant first; a one flips the sign of that coordinate.
SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
SIGNS: npt.NDArray[np.float32] = np.array(
    [-1.0 if SIGN_BITS >> (BLOCK_SIZE - 1 - j) & 1 else 1.0 for j in range(BLOCK_SIZE)], dtype=np.float32
)

# dtype name -> number by which the kernels know it
VALUE_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}

# The rotation runs over this many coordinates.
HADAMARD_SIZE = BLOCK_SIZE
# 1 / sqrt(128): makes the rotation, and what is left in its basis, keep lengths.
ORTHONORMAL = 0.08838834764831845

# The widths of the fields into which a code is cut, low bits first: the binary digits of the width.
FIELD_WIDTHS = {bits: tuple(w for w in (8, 4, 2, 1) if bits & w) for bits in range(1, 9)}


@dataclass(frozen=True)
class EncodeStats:
    """What one call of `encode` saw.

    smallest_norm, largest_norm: of the blocks with a non-zero least-squares norm, before `norm_exponent` and before
    rounding to float16; (inf, 0.0) if there is none. first_bad_block: index of the first block that holds a NaN or an
    infinity, or -1; the outputs of such a block are meaningless.
    """

    smallest_norm: float
    largest_norm: float
    first_bad_block: int


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCoding:
    """How blocks become codes and norms, and what these mean.

    rotate: with the Walsh-Hadamard rotation. signed: flip coordinates by SIGNS before it. norm_exponent: what is stored of a
    norm is float16(norm * 2**-norm_exponent). Decoding without `rotate` gives the coordinates as they are coded, which for
    rotated blocks are those of H b / sqrt(128); `signed` must be False then.
    """

    codebook: Codebook
    rotate: bool = True
    signed: bool = False
    norm_exponent: int = 0


class EncodedArrays(NamedTuple):
    """What `encode` fills, an entry for each block."""

    codes: npt.NDArray[np.uint8]  # [blocks, 16 * bits]
    norms: npt.NDArray[np.uint16]  # [blocks] float16 bit patterns
    energies: npt.NDArray[np.float64]  # [blocks] sum of squares of the weights
    errors: npt.NDArray[np.float64]  # [blocks] sum of squared errors of the decoded weights


class Backend(Protocol):
    """Encode and decode whole blocks, from any thread."""

    def empty(self, byte_count: int) -> npt.NDArray[np.uint8]:
        """Memory from which the kernels read, and into which they write, fastest. Any other memory serves, too."""
        ...

    def encode(
        self,
        values: npt.NDArray[np.uint8],  # [blocks * 128 * itemsize] raw bytes of the weights
        dtype: str,  # BF16, F16 or F32
        coding: BlockCoding,  # with `rotate`
        out: EncodedArrays,
    ) -> EncodeStats:
        """Encode whole blocks into the arrays given, with norms of least squared error."""
        ...

    def decode(
        self,
        encoded: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]],  # codes and norms, as in EncodedArrays
        coding: BlockCoding,
        dtype: str,  # BF16, F16 or F32
        values: npt.NDArray[np.uint8],  # out: [blocks * 128 * itemsize] raw bytes, rounded to nearest even, saturated
    ) -> None:
        """Decode whole blocks into the array given."""
        ...


BACKENDS = {
    "reference": "pqweights.kernels.reference",
    "cpu": "pqweights.kernels.cpu",
    "gpu": "pqweights.kernels.gpu",
}


DEVICES = {"cpu": "cpu", "cuda": "gpu"}  # what users call it -> its backend


def load_backend(name: str) -> Backend:
    """The backend of that name, imported on first use (torch, numba and Triton are slow to import)."""
    return cast(Backend, importlib.import_module(BACKENDS[name]))
