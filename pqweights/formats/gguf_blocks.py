"""The blocks of GGUF: how weights become them, by least squares, and how they are stored.

The arithmetic is in kernels/gguf_encoding.py. Blocks of sources are read in checkpoint/gguf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pqweights.common.dtypes import from_float32
from pqweights.formats.packing import BLOCKS, Bytes, Floats, PackedFormat, StoredPart
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.groups import BEST, Groups

# One block after the other.
LAYOUT = (StoredPart(BLOCKS, "{weight}", "U8"),)
# Types that hold integers of which a block is a group: what the codes are, and whether a number is added to products.
INTEGER_TYPES = {"Q4_0": ("INT4", False), "Q4_1": ("INT4", True), "Q8_0": ("INT8", False)}


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
        from pqweights.kernels.gguf_gain import with_gain

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
