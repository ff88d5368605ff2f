"""The one seam to the arithmetic: whole blocks in, codes, norms and errors out, the same bytes from every backend.

`reference` (torch) defines the meaning; `cpu` (numba) and `gpu` (Triton) are what runs. The arithmetic itself, operation
by operation, is in docs/format.md. All arrays are C-contiguous numpy arrays.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from pqweights import buffers
from pqweights.kernels.codebook import Codebook

BLOCK_SIZE = 128

# The first 128 bits of the fraction of pi, most significant first; a one flips the sign of that coordinate.
SIGN_BITS = 0x243F6A8885A308D313198A2E03707344
SIGNS: npt.NDArray[np.float32] = np.array(
    [-1.0 if SIGN_BITS >> (BLOCK_SIZE - 1 - j) & 1 else 1.0 for j in range(BLOCK_SIZE)], dtype=np.float32
)

# dtype name -> number by which the kernels know it
VALUE_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}

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


class Backend(Protocol):
    """Encode and decode whole blocks, from any thread."""

    def empty(self, byte_count: int) -> npt.NDArray[np.uint8]:
        """Memory from which the kernels read, and into which they write, fastest. Any other memory serves, too."""
        ...

    def encode(
        self,
        values: npt.NDArray[np.uint8],  # [blocks * 128 * itemsize] raw bytes of the weights
        dtype: str,  # BF16, F16 or F32
        codebook: Codebook,
        signed: bool,  # flip coordinates by SIGNS before the rotation
        norm_exponent: int,  # stored norm = float16(norm * 2**-norm_exponent)
        codes: npt.NDArray[np.uint8],  # out: [blocks, 16 * bits]
        norms: npt.NDArray[np.uint16],  # out: [blocks] float16 bit patterns
        energies: npt.NDArray[np.float64],  # out: [blocks] sum of squares of the weights
        errors: npt.NDArray[np.float64],  # out: [blocks] sum of squared errors of the decoded weights
    ) -> EncodeStats:
        """Encode whole blocks into the arrays given."""
        ...

    def decode(
        self,
        codes: npt.NDArray[np.uint8],  # [blocks, 16 * bits]
        norms: npt.NDArray[np.uint16],  # [blocks] float16 bit patterns
        dtype: str,  # BF16, F16 or F32
        codebook: Codebook,
        signed: bool,
        norm_exponent: int,
        values: npt.NDArray[np.uint8],  # out: [blocks * 128 * itemsize] raw bytes, rounded to nearest even, saturated
        rotate: bool = True,  # False: leave blocks in the rotated basis, as H b / sqrt(128); signed must be False then
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


_of_thread = threading.local()


def compute_on(device: str) -> None:
    """The calling thread computes on this device (a key of DEVICES) from now on; a thread that never said so, on the CPU.

    A setting of the thread, not a parameter of everything between: the bytes are the same on every device.
    """
    _of_thread.backend = load_backend(DEVICES[device])
    buffers.allocate_with(_of_thread.backend.empty)


def backend() -> Backend:
    """The one that codecs compute with in this thread."""
    found: Backend = getattr(_of_thread, "backend", None) or load_backend("cpu")
    return found
