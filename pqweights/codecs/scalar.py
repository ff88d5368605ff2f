"""What all codecs have in common: packed codes and a norm per block, decoded by one formula (docs/format.md, section 4).

A codec chooses the levels, the rotations and how a block becomes codes and a norm; what these mean it does not choose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import SIGNED_HADAMARD, UNROTATED
from pqweights.kernels import BLOCK_SIZE, backend
from pqweights.kernels.codebook import Codebook


class PackedCodec:
    """Base of the codecs: the sizes and the decoding of Codec."""

    def code_bytes_per_block(self, bits: int) -> int:
        """16 bytes per bit of width."""
        return BLOCK_SIZE * bits // 8

    def decode(
        self,
        codes: npt.NDArray[np.uint8],
        norms: npt.NDArray[np.uint16],
        dtype: str,
        codebook: Codebook,
        rotation: str | None,
        norm_exponent: int,
        values: npt.NDArray[np.uint8],
    ) -> None:
        """See Codec.decode."""
        signed, rotate = rotation == SIGNED_HADAMARD, rotation not in (None, UNROTATED)
        backend().decode(codes, norms, dtype, codebook, signed, norm_exponent, values, rotate)
