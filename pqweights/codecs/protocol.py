"""What every codec is: widths, sizes, promised error, and the two directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pqweights.kernels import EncodeStats
from pqweights.kernels.codebook import Codebook

# The rotations, as files name them.
HADAMARD = "hadamard"
SIGNED_HADAMARD = "signed-hadamard"
UNROTATED = "none"


@dataclass(frozen=True, eq=False)
class EncodedBlocks:
    """Some consecutive blocks of one weight.

    codes: [blocks, code bytes] u8. norms: [blocks] float16 bit patterns as u16.
    energies, errors: [blocks] f64, sums of squares of the weights and of their errors after decoding.
    """

    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.uint16]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    stats: EncodeStats


class Codec(Protocol):
    """A block quantizer of several widths."""

    @property
    def name(self) -> str:
        """The key in CODECS."""
        ...

    @property
    def widths(self) -> range:
        """Bits per code that it offers."""
        ...

    @property
    def rotations(self) -> tuple[str, ...]:
        """The default rotation, then those that a rescue tries."""
        ...

    def code_bytes_per_block(self, bits: int) -> int:
        """Bytes of packed codes for one block of 128 weights; the norm adds two."""
        ...

    def distortion(self, bits: int) -> float:
        """The relative mean squared error that theory promises for Gaussian coordinates."""
        ...

    def codebook(self, bits: int) -> Codebook:
        """The levels that a checkpoint of this width must carry."""
        ...

    def encode(
        self,
        values: npt.NDArray[np.uint8],
        dtype: str,
        bits: int,
        rotation: str,
        norm_exponent: int,
        codes: npt.NDArray[np.uint8],
    ) -> EncodedBlocks:
        """Encode whole blocks given as raw bytes of dtype BF16, F16 or F32; codes: out, [blocks, code bytes]."""
        ...

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
        """Decode whole blocks into raw bytes of `dtype`.

        rotation: one of `rotations`; None leaves the blocks in the basis in which they are coded.
        """
        ...
