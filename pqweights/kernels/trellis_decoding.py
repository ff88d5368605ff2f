"""The kernel that decodes superblocks of the trellis codec, in numba, whatever their bytes are.

The vector code is in trellis_tiles.py and trellis_entropy.py; docs/format.md describes the bytes and the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from pqweights.kernels.conversions import store_values
from pqweights.kernels.jit import jit
from pqweights.kernels.trellis_entropy import decode_classes, decode_numbers
from pqweights.kernels.trellis_step import HEADER, LANES
from pqweights.kernels.trellis_tiles import transpose_tile, unrotate_tile
from pqweights.kernels.vector import stack

_TILE = LANES * 128
# The state with which the encoder begins and the decoder ends.
_LEAST = 1 << 16
# Blocks of this scale or more are multiplied by _RAISED after the butterflies, whose sums could be infinite otherwise.
_LARGE, _LOWERED, _RAISED = 2.0**100, 2.0**-96, np.float32(2.0**96)
# Bytes of the arrays on the stack.
_TILE_BYTES, _LANE_BYTES, _THREE_LANES, _CLASS_BYTES = 4 * _TILE, 4 * LANES, 12 * LANES, 4 * 256

# What is wrong with a superblock.
SOUND, BAD_HEADER, BAD_STREAM = 0, 1, 2
# The words that a tile reads at most.
_MOST_WORDS = (128 + 1) * LANES


@jit
def _read_shares(row: Any, table: Any) -> Any:
    """Fill the table of classes (see decode_classes); return whether the frequencies add up to 256."""
    first, count = np.int64(row[5]), np.int64(row[6])
    start = np.int64(0)
    for i in range(count):
        share = np.int64(row[HEADER + i]) if count > 1 else np.int64(256)
        if start + share > 256 or first + i > 255:
            return False
        for j in range(share):
            table[start + j] = np.uint32(j | (share - 1) << 12 | (first + i) << 24)
        start += share
    return start == 256


@jit
def _is_header(row: Any, step: Any, trellises: Any, states_at: Any, table: Any) -> Any:
    """Whether an encoder writes such a header, before states that begin at a place of the row; read its frequencies."""
    if row[6] == 0:  # all weights are zero
        return step == 0.0 and row[4] == 0 and row[5] == 0
    if not (step >= 0.0 and step < np.inf) or row[4] > 15 or states_at > len(row):
        return False
    return trellises[2 * row[4]] != 0 and _read_shares(row, table)


@jit
def _scale_tile(step: Any, gains: Any, classes: Any, scales: Any, raised: Any) -> Any:
    """Set the scales of sixteen blocks, and what they are multiplied by afterwards; whether that is not 1 for all."""
    large = False
    for lane in range(LANES):
        scale, raised[lane] = step * gains[classes[lane]], np.float32(1)
        if scale >= _LARGE:
            scale, raised[lane], large = scale * _LOWERED, _RAISED, True
        scales[lane] = np.float32(scale)
    return large


DECODE = types.void(*[types.voidptr] * 11, *[types.int64] * 6)


def _decode(
    rows_at: Any,
    table_at: Any,
    minus_one_at: Any,
    signs_at: Any,
    classes_at: Any,  # i32 [256]: the table of each class
    widths_at: Any,  # i32 [tables, 2]: core bits and tail bits
    gains_at: Any,  # f64 [256]: what the step is multiplied by
    trellises_at: Any,  # i32 [16, 2], by state bits: what flips in the next state; 0 where there is no such trellis
    values_at: Any,  # out
    room_at: Any,  # u16: the stream of a superblock and 2 * _MOST_WORDS words more
    status_at: Any,  # out: i64 [2]: the first superblock that is not sound, or -1, and what is wrong with it
    superblocks: Any,
    blocks: Any,
    stride: Any,
    dtype: Any,
    signed: Any,
    rotate: Any,
) -> None:
    rows = carray(rows_at, (superblocks, stride), np.uint8)
    table, minus_one = carray(table_at, 1, np.uint32), carray(minus_one_at, 1, np.float32)
    signs, gains = carray(signs_at, 128, np.float32), carray(gains_at, 256, np.float64)
    kinds, widths = carray(classes_at, 256, np.int32), carray(widths_at, 512, np.int32)
    trellises = carray(trellises_at, 32, np.int32)
    weights, lanes = blocks * 128, min(LANES, blocks)
    words16 = carray(values_at, superblocks * weights, np.uint16)
    words32 = carray(values_at, superblocks * weights, np.uint32)
    stream = carray(room_at, stride // 2 + 2 * _MOST_WORDS, np.uint16)
    status = carray(status_at, 2, np.int64)
    x_at = stack(_TILE_BYTES)
    x, bits = carray(x_at, _TILE, np.float32), carray(x_at, _TILE, np.uint32)
    work = carray(stack(_TILE_BYTES), _TILE, np.float32)
    class_table = carray(stack(_CLASS_BYTES), 256, np.uint32)
    states, paths = carray(stack(_LANE_BYTES), LANES, np.uint32), carray(stack(_LANE_BYTES), LANES, np.uint32)
    present, classes = carray(stack(_LANE_BYTES), LANES, np.int32), carray(stack(_LANE_BYTES), LANES, np.int32)
    tables, raised = carray(stack(_THREE_LANES), 3 * LANES, np.int32), carray(stack(_LANE_BYTES), LANES, np.float32)
    scales = carray(stack(_LANE_BYTES), LANES, np.float32)
    status[0], status[1] = -1, SOUND
    for number in range(superblocks):
        row = rows[number]
        bits[0] = np.uint32(row[0]) | np.uint32(row[1]) << 8 | np.uint32(row[2]) << 16 | np.uint32(row[3]) << 24
        step, count, state_bits = np.float64(x[0]), np.int64(row[6]), np.int64(row[4])
        at = HEADER + (count if count > 1 else 0) + 4 * lanes
        wrong = SOUND if _is_header(row, step, trellises, at, class_table) else BAD_HEADER
        tiles = (blocks + LANES - 1) // LANES
        if wrong != SOUND or count == 0:
            tiles = 0
            begin, end = number * weights, (number + 1) * weights
            if dtype == 2:
                words32[begin:end] = 0
            else:
                words16[begin:end] = 0
        words = (stride - at) // 2 if tiles else 0
        for i in range(words):
            stream[i] = np.uint16(row[at + 2 * i]) | np.uint16(row[at + 2 * i + 1]) << np.uint16(8)
        if tiles:
            stream[words : words + 2 * _MOST_WORDS] = 0
        for lane in range(LANES):
            states[lane], paths[lane] = np.uint32(_LEAST), np.uint32(0)
            if tiles and lane < lanes:
                p = at - 4 * lanes + 4 * lane
                word = np.uint32(row[p]) | np.uint32(row[p + 1]) << 8 | np.uint32(row[p + 2]) << 16
                states[lane] = word | np.uint32(row[p + 3]) << 24
                if states[lane] < _LEAST:
                    wrong = BAD_HEADER
        position = 0
        for tile in range(tiles):
            for lane in range(LANES):
                present[lane] = np.int32(tile * LANES + lane < blocks)
            position = decode_classes(class_table, present, states, stream, position, classes)
            for lane in range(LANES):
                kind = kinds[classes[lane]]
                tables[lane] = kind << 13
                tables[LANES + lane], tables[2 * LANES + lane] = widths[2 * kind], widths[2 * kind + 1]
            large = _scale_tile(step, gains, classes, scales, raised)
            flips = trellises[2 * state_bits : 2 * state_bits + 2]
            position = decode_numbers(table, tables, flips, scales, states, paths, stream, position, work)
            if position > words:
                wrong = BAD_STREAM
                position = 0
            if rotate:
                unrotate_tile(work, minus_one, x)
            else:
                transpose_tile(work, x)
            if large:
                for i in range(LANES):
                    for j in range(128):
                        x[i * 128 + j] = x[i * 128 + j] * raised[i]
            if signed:
                for i in range(LANES):
                    for j in range(128):
                        x[i * 128 + j] = x[i * 128 + j] * signs[j]
            begin = number * weights + tile * _TILE
            end = min(begin + _TILE, (number + 1) * weights)
            size = end - begin
            store_values(bits[:size], x[:size], dtype, words16[begin:end], words32[begin:end])
        if tiles:
            for lane in range(LANES):
                if states[lane] != _LEAST:
                    wrong = BAD_STREAM
            for i in range(position, words):
                if stream[i] != 0:
                    wrong = BAD_STREAM
            if at + 2 * words < stride and row[stride - 1] != 0:  # half a word
                wrong = BAD_STREAM
        if wrong != SOUND and status[0] < 0:
            status[0], status[1] = number, wrong


KERNELS = {"decode_trellis": (_decode, DECODE)}
