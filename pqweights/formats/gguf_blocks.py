"""The blocks of GGUF: how they are stored, and blocks of integers that are put together from codes and scales.

How weights become blocks is in kernels/gguf_encoding.py. Blocks of sources are read in checkpoint/gguf.
"""

from __future__ import annotations

from pqweights.common.dtypes import from_float32
from pqweights.formats.packing import BLOCKS, Bytes, Floats, PackedFormat, StoredPart
from pqweights.kernels.gguf_encoding import BLOCK_TYPES

# One block after the other.
LAYOUT = (StoredPart(BLOCKS, "{weight}", "U8"),)


def block_format(name: str, reason: str | None = None) -> PackedFormat:
    """Return the format of a type. reason: why a tensor has it"""
    return PackedFormat(BLOCK_TYPES[name], LAYOUT, label=name, reason=reason)


def half_floats(numbers: Floats) -> Bytes:
    """Return scales as they lie in blocks: [blocks, 2] u8."""
    return from_float32(numbers, "F16").reshape(-1, 2)
