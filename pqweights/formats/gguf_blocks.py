"""The blocks of GGUF: how they are stored, and blocks of integers that are put together from codes and scales.

How weights become blocks is in kernels/gguf_encoding.py. Blocks of sources are read in checkpoint/gguf.
"""

from __future__ import annotations

import numpy as np

from pqweights.common.dtypes import from_float32
from pqweights.formats.packing import BLOCKS, Bytes, Floats, PackedFormat, StoredPart
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, BlockRule

# One block after the other.
LAYOUT = (StoredPart(BLOCKS, "{weight}", "U8"),)


def block_format(name: str, reason: str | None = None) -> PackedFormat:
    """Return the format of a type. reason: why a tensor has it"""
    return PackedFormat(BLOCK_TYPES[name], LAYOUT, label=name, reason=reason)


def pack_blocks(rule: BlockRule, codes: Bytes, heads: list[Bytes]) -> Bytes:
    """Return blocks of codes with these scales before them (ggml-common.h).

    codes: [blocks, block size] u8, of which two of 4 bits share a byte that are half a block apart; 8 bits are two's
        complement
    heads: [blocks, bytes] u8 each
    """
    half = rule.group_size // 2
    packed = codes ^ np.uint8(0x80) if rule.bits == 8 else codes[:, :half] | codes[:, half:] << 4
    return np.concatenate([*heads, packed], axis=1)


def half_floats(numbers: Floats) -> Bytes:
    """Return scales as they lie in blocks: [blocks, 2] u8."""
    return from_float32(numbers, "F16").reshape(-1, 2)
