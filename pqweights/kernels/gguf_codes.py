"""The codes in blocks of GGUF, whose scales stay: where their bits are, and the numbers that they stand for.

Types of the same width have them at different places (ggml-common.h, and dequantize_row_* in ggml-quants.c of
https://github.com/ggml-org/llama.cpp). Types that have one code for several weights are not here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Plane(NamedTuple):
    """Some bits of all codes of a block.

    first: the byte at which they begin
    bits: how many of each code
    run: so many weights after each other have theirs in as many bytes; the next have the next bits of the same bytes
    """

    first: int
    bits: int
    run: int


# The planes of each type, the lowest bits of codes first.
PLANES = {
    "Q1_0": (Plane(2, 1, 1),),
    "Q2_0": (Plane(2, 2, 1),),
    "Q2_K": (Plane(16, 2, 32),),
    "Q3_K": (Plane(32, 2, 32), Plane(0, 1, 32)),
    "Q4_0": (Plane(2, 4, 16),),
    "Q4_1": (Plane(4, 4, 16),),
    "Q4_K": (Plane(16, 4, 32),),
    "Q5_0": (Plane(6, 4, 16), Plane(2, 1, 1)),
    "Q5_1": (Plane(8, 4, 16), Plane(4, 1, 1)),
    "Q5_K": (Plane(48, 4, 32), Plane(16, 1, 32)),
    "Q6_K": (Plane(0, 4, 64), Plane(128, 2, 32)),
    "Q8_0": (Plane(2, 8, 1),),
    "IQ4_NL": (Plane(2, 4, 16),),
    "IQ4_XS": (Plane(8, 4, 16),),
    "MXFP4": (Plane(1, 4, 16),),
    "NVFP4": (Plane(4, 4, 8),),
}


def with_codes(type_name: str, blocks: Bytes, codes: Bytes) -> Bytes:
    """Return blocks with other codes. blocks: [blocks, block bytes]; codes: [blocks, block size], counted from 0"""
    result, (count, size) = blocks.copy(), codes.shape
    for first, bits, run in PLANES[type_name]:
        shifts, width = _shifts(bits), size * bits // 8
        parts = (codes & _mask(bits)).reshape(count, width // run, len(shifts), run) << shifts
        result[:, first : first + width] = np.bitwise_or.reduce(parts, axis=2).reshape(count, width)
        codes = codes >> np.uint8(bits) if bits < 8 else codes
    return result


def codes_of(type_name: str, blocks: Bytes, size: int) -> Bytes:
    """Return the codes of blocks: [blocks, size]."""
    result, known = np.zeros((len(blocks), size), dtype=np.uint8), 0
    for first, bits, run in PLANES[type_name]:
        width = size * bits // 8
        parts = blocks[:, first : first + width].reshape(len(blocks), width // run, 1, run) >> _shifts(bits) & _mask(
            bits
        )
        result |= parts.reshape(result.shape) << np.uint8(known)
        known += bits
    return result


def _shifts(bits: int) -> Bytes:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def _mask(bits: int) -> np.uint8:
    return np.uint8((1 << bits) - 1)
