"""Hadamard rotation and Lloyd-Max levels with a least-squares norm per block: the codec of the master.

Vicentino, arXiv:2603.29078 v1 (block norms, Walsh-Hadamard, Lloyd-Max); the least-squares norm and the fixed signs of
the rescue rotation are ours. Section numbers and operation order: docs/format.md, docs/method.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.codecs import lloyd_max
from pqweights.codecs.protocol import HADAMARD, SIGNED_HADAMARD, EncodedBlocks
from pqweights.codecs.scalar import PackedCodec
from pqweights.kernels import backend
from pqweights.kernels.codebook import Codebook


class HadamardLloydMax(PackedCodec):
    """See the module; it has no state, a class only because codecs are interchangeable."""

    name = "hadamard-lloyd-max"
    widths = range(lloyd_max.MIN_BITS, lloyd_max.MAX_BITS + 1)
    rotations = (HADAMARD, SIGNED_HADAMARD)

    def distortion(self, bits: int) -> float:
        """Of Lloyd-Max levels on N(0,1)."""
        return lloyd_max.DISTORTION[bits]

    def codebook(self, bits: int) -> Codebook:
        """The converged Lloyd-Max levels."""
        return lloyd_max.codebook(bits)

    def encode(
        self,
        values: npt.NDArray[np.uint8],
        dtype: str,
        bits: int,
        rotation: str,
        norm_exponent: int,
        codes: npt.NDArray[np.uint8],
    ) -> EncodedBlocks:
        """See Codec.encode."""
        blocks = len(codes)
        norms = np.empty(blocks, dtype=np.uint16)
        energies = np.empty(blocks, dtype=np.float64)
        errors = np.empty(blocks, dtype=np.float64)
        signed = rotation == SIGNED_HADAMARD
        stats = backend().encode(
            values, dtype, self.codebook(bits), signed, norm_exponent, codes, norms, energies, errors
        )
        return EncodedBlocks(codes, norms, energies, errors, stats)
