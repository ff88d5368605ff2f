"""Hadamard rotation and Lloyd-Max levels with a least-squares norm per block: the codec of the master.

From Vicentino, arXiv:2603.29078 v1: block norms, Walsh-Hadamard rotation, Lloyd-Max levels. The least-squares norm and
the fixed signs of the rescue rotation are additions of pqweights. docs/format.md gives the order of operations, and
docs/method.md the reasons.
"""

from __future__ import annotations

from pqweights.codecs import lloyd_max
from pqweights.codecs.protocol import Bytes
from pqweights.codecs.scalar import ROTATIONS, ScalarCodec
from pqweights.kernels import BlockCoding, EncodedArrays, EncodeStats, load_backend
from pqweights.kernels.codebook import Codebook


class HadamardLloydMax(ScalarCodec):
    """The codec of the master: Hadamard rotation, Lloyd-Max levels, a least-squares norm."""

    name = "hadamard-lloyd-max"
    rotations = ROTATIONS
    orthogonal_error = True  # because the norm is that of least squares
    description = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian, and each coordinate becomes the nearest of the Lloyd-Max levels of the "
        "normal distribution. Beside the codes a block has one float16 norm, the one with the least squared error."
    )

    def distortion(self, bits: int) -> float:
        """Return the distortion of the Lloyd-Max levels on N(0,1)."""
        return lloyd_max.DISTORTION[bits]

    def codebook(self, bits: int) -> Codebook:
        """Return the Lloyd-Max levels."""
        return lloyd_max.codebook(bits)

    def encode_blocks(self, values: Bytes, dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
        """See ScalarCodec."""
        return load_backend("cpu").encode(values, dtype, coding, out)
