"""The kernel that decodes superblocks of the trellis codec, in numba, whatever their bytes are.

The vector code is in trellis_tiles.py and trellis_entropy.py; docs/format.md describes the bytes and the arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from pqweights.kernels.conversions import store_values
from pqweights.kernels.jit import jit
from pqweights.kernels.trellis_entropy import decode_classes, decode_numbers
from pqweights.kernels.trellis_step import HEADER, LANES, LEAST
from pqweights.kernels.trellis_tiles import transpose_tile, unrotate_tile
from pqweights.kernels.vector import stack

_TILE = LANES * 128
# Blocks of this scale or more are multiplied by _RAISED after the butterflies, whose sums could be infinite otherwise.
_LARGE, _LOWERED, _RAISED = 2.0**100, 2.0**-96, np.float32(2.0**96)
# Bytes of the arrays on the stack.
_TILE_BYTES, _TWO_TILES, _TWO_LANES, _SIX_LANES = 4 * _TILE, 8 * _TILE, 8 * LANES, 24 * LANES
_TWO_CLASSES, _NUMBERS = 8 * 256, 16

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


class _SideBySide(NamedTuple):
    """Two superblocks that are decoded together, of which the second may be missing.

    Where arrays have a dimension of 2 they are flat, the first superblock's half first.

    tiles: i64 [2]: tiles of the superblock; 0 if it is all zeros, missing, or its header is bad
    steps: f64 [2]
    words: i64 [2]: the words of its stream
    positions: i64 [2]: the next word
    wrong: i64 [2]: what is wrong with it
    streams: u16 [2, size]
    shares: u32 [2, 256]; see decode_classes
    flips: i32 [2, 2], states, paths: u32 [2, 16], tables: i32 [2, 3, 16], scales: f32 [2, 16]; see decode_numbers
    raised: f32 [2, 16]: what blocks are multiplied by after the rotation
    present: i32 [16]
    classes: i32 [16]
    """

    tiles: Any
    steps: Any
    words: Any
    positions: Any
    wrong: Any
    streams: Any
    shares: Any
    flips: Any
    states: Any
    paths: Any
    tables: Any
    scales: Any
    raised: Any
    present: Any
    classes: Any


@jit
def _read_u32(row: Any, at: Any) -> Any:
    """The little-endian number in four bytes."""
    low = np.uint32(row[at]) | np.uint32(row[at + 1]) << 8
    return low | np.uint32(row[at + 2]) << 16 | np.uint32(row[at + 3]) << 24


@jit
def _open(pair: Any, k: Any, row: Any, step: Any, trellises: Any, blocks: Any) -> None:
    """Read everything of a superblock but its words into half k of the pair, and its words into its stream."""
    size, lanes = len(pair.streams) // 2, min(LANES, blocks)
    count, stream = np.int64(row[6]), pair.streams[k * size : (k + 1) * size]
    at = HEADER + (count if count > 1 else 0) + 4 * lanes
    if not _is_header(row, step, trellises, at, pair.shares[k * 256 : (k + 1) * 256]):
        pair.wrong[k] = BAD_HEADER
        return
    if count == 0:
        return
    for lane in range(lanes):
        state = _read_u32(row, at - 4 * lanes + 4 * lane)
        if state < LEAST:  # not stored: it would take words, although this half has none
            pair.wrong[k] = BAD_HEADER
            return
        pair.states[k * LANES + lane] = state
    words = (len(row) - at) // 2
    for i in range(words):
        stream[i] = np.uint16(row[at + 2 * i]) | np.uint16(row[at + 2 * i + 1]) << np.uint16(8)
    stream[words:] = 0
    for i in range(2):
        pair.flips[2 * k + i] = trellises[2 * row[4] + i]
    pair.tiles[k], pair.steps[k], pair.words[k] = (blocks + LANES - 1) // LANES, step, words


@jit
def _clear(pair: Any) -> None:
    """Make both superblocks missing: sixteen blocks of zeros, which take no words."""
    for k in range(2):
        pair.tiles[k], pair.words[k], pair.positions[k], pair.wrong[k] = 0, 0, 0, SOUND
    for i in range(2 * LANES):
        pair.states[i], pair.paths[i] = np.uint32(LEAST), np.uint32(0)


@jit
def _prepare_tile(pair: Any, k: Any, kinds: Any, widths: Any, gains: Any) -> None:
    """Decode the classes of a tile, and set what they mean for its numbers."""
    size, part = len(pair.streams) // 2, slice(k * LANES, (k + 1) * LANES)
    pair.classes[:] = 0
    if pair.tiles[k]:
        pair.positions[k] = decode_classes(
            pair.shares[k * 256 : (k + 1) * 256],
            pair.present,
            pair.states[part],
            pair.streams[k * size : (k + 1) * size],
            pair.positions[k],
            pair.classes,
        )
    for lane in range(LANES):
        kind, i = kinds[pair.classes[lane]], k * LANES + lane
        scale, pair.raised[i] = pair.steps[k] * gains[pair.classes[lane]], np.float32(1)
        if scale >= _LARGE:
            scale, pair.raised[i] = scale * _LOWERED, _RAISED
        pair.scales[i] = np.float32(scale)
        at = 3 * k * LANES + lane
        pair.tables[at], pair.tables[at + LANES], pair.tables[at + 2 * LANES] = (
            kind << 13,
            widths[2 * kind],
            widths[2 * kind + 1],
        )


@jit
def _finish_blocks(x: Any, raised: Any, signed: Any, signs: Any) -> None:
    """Raise the blocks that were lowered, and undo the signs."""
    large = False
    for i in range(LANES):
        large |= raised[i] != np.float32(1)
    if large:
        for i in range(LANES):
            for j in range(128):
                x[i * 128 + j] = x[i * 128 + j] * raised[i]
    if signed:
        for i in range(LANES):
            for j in range(128):
                x[i * 128 + j] = x[i * 128 + j] * signs[j]


@jit
def _check_end(pair: Any, k: Any, row: Any) -> None:
    """See that the coder ended in the state in which it began, and that only zeros follow its words."""
    size, words = len(pair.streams) // 2, pair.words[k]
    for lane in range(LANES):
        if pair.states[k * LANES + lane] != LEAST:
            pair.wrong[k] = BAD_STREAM
    for i in range(pair.positions[k], words):
        if pair.streams[k * size + i] != 0:
            pair.wrong[k] = BAD_STREAM
    count = np.int64(row[6])
    lanes_and_shares = len(row) - HEADER - (count if count > 1 else 0)
    if lanes_and_shares & 1 and row[len(row) - 1] != 0:  # half a word
        pair.wrong[k] = BAD_STREAM


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
    room_at: Any,  # u16: two streams of a superblock, with 2 * _MOST_WORDS words more each
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
    weights = blocks * 128
    words16 = carray(values_at, superblocks * weights, np.uint16)
    words32 = carray(values_at, superblocks * weights, np.uint32)
    size = stride // 2 + 2 * _MOST_WORDS
    status = carray(status_at, 2, np.int64)
    x_at = stack(_TILE_BYTES)
    x, bits = carray(x_at, _TILE, np.float32), carray(x_at, _TILE, np.uint32)
    work = carray(stack(_TWO_TILES), 2 * _TILE, np.float32)
    pair = _SideBySide(
        tiles=carray(stack(_NUMBERS), 2, np.int64),
        steps=carray(stack(_NUMBERS), 2, np.float64),
        words=carray(stack(_NUMBERS), 2, np.int64),
        positions=carray(stack(_NUMBERS), 2, np.int64),
        wrong=carray(stack(_NUMBERS), 2, np.int64),
        streams=carray(room_at, 2 * size, np.uint16),
        shares=carray(stack(_TWO_CLASSES), 512, np.uint32),
        flips=carray(stack(_NUMBERS), 4, np.int32),
        states=carray(stack(_TWO_LANES), 2 * LANES, np.uint32),
        paths=carray(stack(_TWO_LANES), 2 * LANES, np.uint32),
        tables=carray(stack(_SIX_LANES), 6 * LANES, np.int32),
        scales=carray(stack(_TWO_LANES), 2 * LANES, np.float32),
        raised=carray(stack(_TWO_LANES), 2 * LANES, np.float32),
        present=carray(stack(_TWO_LANES), LANES, np.int32),
        classes=carray(stack(_TWO_LANES), LANES, np.int32),
    )
    pair.flips[:] = 0
    pair.steps[:] = 0
    status[0], status[1] = -1, SOUND
    for first in range(0, superblocks, 2):
        _clear(pair)
        members = min(2, superblocks - first)
        for k in range(members):
            row = rows[first + k]
            bits[0] = _read_u32(row, 0)
            _open(pair, k, row, np.float64(x[0]), trellises, blocks)
            begin, end = (first + k) * weights, (first + k + 1) * weights
            if pair.tiles[k] == 0 and dtype == 2:
                words32[begin:end] = 0
            elif pair.tiles[k] == 0:
                words16[begin:end] = 0
        for tile in range(max(pair.tiles[0], pair.tiles[1])):
            for lane in range(LANES):
                pair.present[lane] = np.int32(tile * LANES + lane < blocks)
            for k in range(2):
                _prepare_tile(pair, k, kinds, widths, gains)
            decode_numbers(
                table,
                pair.tables,
                pair.flips,
                pair.scales,
                pair.states,
                pair.paths,
                pair.streams,
                size,
                pair.positions,
                work,
            )
            for k in range(2):
                if pair.positions[k] > pair.words[k]:
                    pair.wrong[k], pair.positions[k] = BAD_STREAM, 0
                if pair.tiles[k] == 0:
                    continue
                if rotate:
                    unrotate_tile(work[k * _TILE : (k + 1) * _TILE], minus_one, x)
                else:
                    transpose_tile(work[k * _TILE : (k + 1) * _TILE], x)
                _finish_blocks(x, pair.raised[k * LANES : (k + 1) * LANES], signed, signs)
                begin = (first + k) * weights + tile * _TILE
                end = min(begin + _TILE, (first + k + 1) * weights)
                store_values(bits[: end - begin], x[: end - begin], dtype, words16[begin:end], words32[begin:end])
        for k in range(members):
            if pair.tiles[k]:
                _check_end(pair, k, rows[first + k])
            if pair.wrong[k] != SOUND and status[0] < 0:
                status[0], status[1] = first + k, pair.wrong[k]


KERNELS = {"decode_trellis": (_decode, DECODE)}
