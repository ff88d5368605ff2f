"""The CPU kernels that encode GGUF's blocks without offsets (Q8_0, Q5_0, Q4_0, IQ4_NL, Q6_K, Q3_K, IQ4_XS), in numba.

gguf_symmetric_lanes.py says how; here are the loops over blocks, and how each format packs a block's codes, factors and
F16 number. ctypes calls the kernels, so their parameters are plain pointers and numbers: those of gguf_encoding.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from pqweights.kernels.emit import LANES
from pqweights.kernels.gguf_symmetric_formats import FORMATS, MOST_STARTS, STARTS
from pqweights.kernels.gguf_symmetric_lanes import AT_ONCE, make_fit
from pqweights.kernels.gguf_symmetric_tiles import FACTORS, MOST_PARTS
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.jit import inlined
from pqweights.kernels.vector import stack

# Pointers: values, importance, settings, data, energies, errors; then blocks, blocks of a row, weighted.
ENCODE_BLOCKS = types.void(*[types.voidptr] * 6, *[types.int64] * 3)
_MOST_BLOCK, _SETTINGS, _PARTS = 256, STARTS + MOST_STARTS, 4 * MOST_PARTS * LANES
_WEIGHTS = _MOST_BLOCK * LANES
_WEIGHTS_OF_4, _PARTS_OF_4, _BLOCK_OF_4 = _WEIGHTS * 4, _PARTS * 4, _MOST_BLOCK * 4
_LANES_OF_4, _LANES_OF_8, _PAIRS_OF_8 = LANES * 4, LANES * 8, 2 * LANES * 8


# --- how formats pack a block; codes: u8 [weights], factors: f32 [parts, stride 16], half: the bits of d ---


@inlined
def _write_half(half: Any, out: Any) -> None:
    """Write an F16 number."""
    out[0], out[1] = np.uint8(half & 255), np.uint8((half >> 8) & 255)


@inlined
def _pack_q8_0(codes: Any, factors: Any, half: Any, out: Any) -> None:
    _write_half(half, out)
    for j in range(32):
        out[2 + j] = codes[j] ^ np.uint8(128)  # counted from 0, not from the lowest


@inlined
def _pack_nibbles(codes: Any, out: Any) -> None:
    """Write 32 codes of 4 bits, of which 16 are the low halves of bytes."""
    for j in range(16):
        out[j] = (codes[j] & np.uint8(15)) | ((codes[16 + j] & np.uint8(15)) << np.uint8(4))


@inlined
def _pack_q4_0(codes: Any, factors: Any, half: Any, out: Any) -> None:
    _write_half(half, out)
    _pack_nibbles(codes, out[2:])


@inlined
def _pack_q5_0(codes: Any, factors: Any, half: Any, out: Any) -> None:
    _write_half(half, out)
    high = np.uint32(0)
    for j in range(32):
        high |= np.uint32(codes[j] >> np.uint8(4)) << np.uint32(j)
    for k in range(4):
        out[2 + k] = np.uint8((high >> np.uint32(8 * k)) & np.uint32(255))
    _pack_nibbles(codes, out[6:])


@inlined
def _pack_q6_k(codes: Any, factors: Any, half: Any, out: Any) -> None:
    for side in range(2):
        for j in range(64):
            at = 128 * side + j
            low = (codes[at] & np.uint8(15)) | ((codes[at + 64] & np.uint8(15)) << np.uint8(4))
            out[64 * side + j] = low
        for j in range(32):
            at = 128 * side + j
            low = (codes[at] >> np.uint8(4)) | ((codes[at + 32] >> np.uint8(4)) << np.uint8(2))
            high = (codes[at + 64] >> np.uint8(4)) | ((codes[at + 96] >> np.uint8(4)) << np.uint8(2))
            out[128 + 32 * side + j] = low | (high << np.uint8(4))
    for part in range(16):
        out[192 + part] = np.uint8(np.int32(factors[part * LANES]) & 255)
    _write_half(half, out[208:])


@inlined
def _pack_q3_k(codes: Any, factors: Any, half: Any, out: Any) -> None:
    for j in range(32):
        high = np.uint8(0)
        for k in range(8):
            high |= (codes[32 * k + j] >> np.uint8(2)) << np.uint8(k)
        out[j] = high
        for side in range(2):
            low = np.uint8(0)
            for k in range(4):
                low |= (codes[128 * side + 32 * k + j] & np.uint8(3)) << np.uint8(2 * k)
            out[32 + 32 * side + j] = low
    for k in range(8):
        first, second = np.int32(factors[k * LANES]) + 32, np.int32(factors[(k + 8) * LANES]) + 32
        out[96 + k] = np.uint8((first & 15) | ((second & 15) << 4))
    for k in range(4):
        rest = np.int32(0)
        for part in range(k, 16, 4):
            rest |= ((np.int32(factors[part * LANES]) + 32) >> 4) << (part // 4 * 2)
        out[104 + k] = np.uint8(rest)
    _write_half(half, out[108:])


@inlined
def _pack_iq4_xs(codes: Any, factors: Any, half: Any, out: Any) -> None:
    _write_half(half, out)
    high = np.int32(0)
    for k in range(4):
        first, second = np.int32(factors[2 * k * LANES]) + 32, np.int32(factors[(2 * k + 1) * LANES]) + 32
        high |= ((first >> 4) | ((second >> 4) << 2)) << (4 * k)
        out[4 + k] = np.uint8((first & 15) | ((second & 15) << 4))
    out[2], out[3] = np.uint8(high & 255), np.uint8(high >> 8)
    for k in range(8):
        _pack_nibbles(codes[32 * k :], out[8 + 16 * k :])


# --- the loops ---


def _encoder(name: str, pack: Any) -> Any:
    """The kernel of a format."""
    form, block_bytes = FORMATS[name], BLOCK_TYPES[name].block_bytes
    size, fit = form.block_size, make_fit(form)
    turns, weighted_turns = ((len(starts) - form.inner_starts) // AT_ONCE for starts in (form.starts, form.all_starts))

    def encode(
        values_at: Any,  # f32 [rows, row_blocks, size]
        importance_at: Any,  # f32 [row_blocks, size], above 0; unused unless weighted
        settings_at: Any,
        data_at: Any,  # out: u8 [rows, row_blocks, block_bytes]
        energies_at: Any,  # out: f64 [rows, row_blocks]
        errors_at: Any,  # out: f64 [rows, row_blocks]
        blocks: Any,
        row_blocks: Any,
        weighted: Any,
    ) -> None:
        values = carray(values_at, blocks * size, np.float32)
        importance = carray(importance_at, row_blocks * size, np.float32)
        settings = carray(settings_at, _SETTINGS, np.float32)
        data = carray(data_at, blocks * block_bytes, np.uint8)
        energies, errors = carray(energies_at, blocks, np.float64), carray(errors_at, blocks, np.float64)
        work = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
        parts = carray(stack(_PARTS_OF_4), _PARTS, np.float32)
        codes = carray(stack(_WEIGHTS), _WEIGHTS, np.uint8)
        ones = carray(stack(_BLOCK_OF_4), size, np.float32)
        halves = carray(stack(_LANES_OF_4), LANES, np.int32)
        places = carray(stack(_LANES_OF_8), LANES, np.int64)
        sums = carray(stack(_PAIRS_OF_8), 2 * LANES, np.float64)
        rows = blocks // row_blocks
        outer_turns = weighted_turns if weighted else turns
        for j in range(size):
            ones[j] = np.float32(1)
        for first in range(0, rows, LANES):
            for block in range(row_blocks):
                for lane in range(LANES):  # beyond the last row, that row again
                    places[lane] = (min(first + lane, rows - 1) * row_blocks + block) * size
                factors = importance[block * size : (block + 1) * size] if weighted else ones
                fit(values, places, factors, work, outer_turns, settings, parts, codes, halves, sums)
                for lane in range(min(LANES, rows - first)):
                    at = (first + lane) * row_blocks + block
                    out = data[at * block_bytes : (at + 1) * block_bytes]
                    pack(codes[lane * size : (lane + 1) * size], parts[FACTORS + lane :], halves[lane], out)
                    energies[at], errors[at] = sums[lane], sums[LANES + lane]

    return encode


_PACKING = {
    "Q8_0": _pack_q8_0,
    "Q5_0": _pack_q5_0,
    "Q4_0": _pack_q4_0,
    "IQ4_NL": _pack_q4_0,
    "Q6_K": _pack_q6_k,
    "Q3_K": _pack_q3_k,
    "IQ4_XS": _pack_iq4_xs,
}
KERNELS = {f"encode_gguf_{name.lower()}": (_encoder(name, pack), ENCODE_BLOCKS) for name, pack in _PACKING.items()}
