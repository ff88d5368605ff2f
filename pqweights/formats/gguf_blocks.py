"""The blocks of GGUF: how weights become them, by least squares, and how they are stored.

The arithmetic is in kernels/gguf_encoding.py. Blocks of sources are read in checkpoint/gguf.

Codes of least squared error are too small: the error is orthogonal to what is decoded, so of the energy E of a block
only E - error is left, and products with the weights shrink by that share. Enlarging a block by E / (E - error) gives
the products their size again. The squared error grows by the same small factor, and models lose less: the divergence of
2-bit types falls by a fifth, that of 4-bit types by one or two percent (docs/gguf.md). Blocks that were encoded by
importances stay as they are: what counts in the products is weighed already, and enlarging them costs divergence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import from_float32
from pqweights.formats.packing import BLOCKS, Bytes, Floats, PackedFormat, StoredPart
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.groups import BEST, LARGEST_GAIN, Groups

# One block after the other.
LAYOUT = (StoredPart(BLOCKS, "{weight}", "U8"),)
# Types that hold integers of which a block is a group: what the codes are, and whether a number is added to products.
INTEGER_TYPES = {"Q4_0": ("INT4", False), "Q4_1": ("INT4", True), "Q8_0": ("INT8", False)}
Doubles = npt.NDArray[np.float64]
# Where the F16 factors of a block lie, by type. Others have none, or lose less than these resolve.
FACTORS = {
    "Q5_K": (0, 2),
    "Q5_1": (0, 2),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q4_K": (0, 2),
    "Q4_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q3_K": (108,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "Q2_K": (80, 82),
    "IQ2_S": (0,),
    "IQ2_XS": (0,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ1_M": (48,),
    "TQ1_0": (52,),
    "IQ1_S": (0,),
    "Q2_0": (0,),
    "Q1_0": (0,),
}
LARGEST_F16 = 65504.0


@dataclass(frozen=True)
class BlockRule:
    """A block format of GGUF (a key of BLOCK_TYPES), whose scales are chosen by least squares.

    `Groups.codes` are the bytes of the blocks.
    """

    kind: str
    bits: int
    group_size: int

    name, rows = BEST, 1

    @staticmethod
    def of(name: str) -> BlockRule:
        """Return the rule of a type."""
        return BlockRule(name, BLOCK_TYPES[name].bits, BLOCK_TYPES[name].block_size)

    @property
    def codes(self) -> str:
        """What codes are."""
        return INTEGER_TYPES.get(self.kind, (self.kind, False))[0]

    def quantize(self, values: Floats) -> Groups:
        """Quantize whole blocks of weights."""
        from pqweights.kernels.gguf_encoding import encode_blocks

        return with_gain(self.kind, encode_blocks(self.kind, values.reshape(-1, self.group_size), None))

    def quantize_weighted(self, values: Floats, importance: Floats) -> Groups:
        """Quantize whole rows, given the mean square of each input: values [rows * K], importance [K]."""
        from pqweights.kernels.gguf_encoding import encode_blocks

        return encode_blocks(self.kind, values.reshape(-1, len(importance)), importance)

    def decode(self, groups: Groups) -> Floats:
        """Return the weights that llama.cpp decodes: [blocks, block size]."""
        return self.numbers(groups.codes)

    def numbers(self, codes: Bytes) -> Floats:
        """Return the weights of blocks."""
        from pqweights.kernels.gguf_encoding import decode_blocks

        return decode_blocks(self.kind, codes)

    def pack(self, codes: Bytes, heads: list[Bytes]) -> Bytes:
        """Return blocks of codes with these scales before them (ggml-common.h).

        codes: [blocks, block size] u8, of which two of 4 bits share a byte that are half a block apart; 8 bits are
            two's complement
        heads: [blocks, bytes] u8 each
        """
        half = self.group_size // 2
        packed = codes ^ np.uint8(0x80) if self.bits == 8 else codes[:, :half] | codes[:, half:] << 4
        return np.concatenate([*heads, packed], axis=1)


def block_format(name: str, reason: str | None = None) -> PackedFormat:
    """Return the format of a type. reason: why a tensor has it"""
    return PackedFormat(BlockRule.of(name), LAYOUT, label=name, reason=reason)


def half_floats(numbers: Floats) -> Bytes:
    """Return scales as they lie in blocks: [blocks, 2] u8."""
    return from_float32(numbers, "F16").reshape(-1, 2)


def with_gain(type_name: str, blocks: Groups) -> Groups:
    """Return blocks of a type enlarged by what the codes have lost, with the errors that they then have.

    The errors follow from those that were measured, up to the rounding of factors to F16. Blocks of types that are not
    in FACTORS, and blocks without finite weights, stay as they are.
    """
    if type_name not in FACTORS:
        return blocks
    energies, left = blocks.energies, blocks.energies - blocks.errors
    held = np.isfinite(energies) & (left > 0)
    gains = np.ones(len(energies))
    np.divide(energies, left, out=gains, where=held)
    np.clip(gains, 1.0, LARGEST_GAIN, out=gains)
    data = blocks.codes.copy()
    for at in FACTORS[type_name]:
        _enlarge(data, at, gains, spread=type_name == "IQ1_M")
    errors = energies - 2 * gains * left + gains * gains * left
    return replace(blocks, codes=data, errors=np.where(held, errors, blocks.errors))


def _enlarge(data: npt.NDArray[np.uint8], at: int, gains: Doubles, *, spread: bool) -> None:
    """Multiply the F16 factors that begin at a byte of each block, and saturate them.

    spread: whether the highest four bits of four words hold one, the lowest bits of it in the first
    """
    places = np.array([0, 4, 8, 12], dtype=np.uint16)
    words = np.ascontiguousarray(data[:, at : at + (8 if spread else 2)]).view("<u2")
    factors = np.bitwise_or.reduce(words >> 12 << places, axis=1, keepdims=True) if spread else words
    products = np.clip(factors.view("<f2").astype(np.float32) * gains[:, None], -LARGEST_F16, LARGEST_F16)
    enlarged = products.astype("<f2").view("<u2")
    data[:, at : at + 2 * words.shape[1]] = (words & 0xFFF | enlarged >> places << 12 if spread else enlarged).view(
        np.uint8
    )
