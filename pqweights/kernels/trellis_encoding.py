"""The kernels that encode superblocks of the trellis codec, in numba, one for each number of states.

The vector code is in trellis_tiles.py, trellis_search.py and trellis_entropy.py; docs/format.md describes the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from pqweights.kernels import ORTHONORMAL
from pqweights.kernels import trellis_search as search
from pqweights.kernels.conversions import load_values
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.prescaling import power_of_two
from pqweights.kernels.trellis_entropy import encode_classes, encode_numbers
from pqweights.kernels.trellis_step import (
    HEADER,
    LANES,
    LEAST,
    ClassModel,
    Room,
    find_step,
    share_classes,
)
from pqweights.kernels.trellis_tiles import rotate_tile
from pqweights.kernels.vector import stack

_TILE = LANES * 128
# Larger than what any path costs, so that blocks of class 0 have only numbers 0 and 1.
_FORBIDDEN = np.float32(1e6)
# Magnitudes outside these are brought to 1 by a power of two, so that sums of squares stay in the range of float32.
_SMALLEST, _LARGEST = np.uint32((127 - 40) << 23), np.uint32((127 + 40) << 23)
_INFINITE = np.uint32(0x7F800000)
# The steps of weights near the largest float32 could be larger.
_LARGEST_STEP = 3.4028234663852886e38
_NOT_FINITE = -1000
_ATTEMPTS = 12
# After so many attempts the best one that fits will do.
_MOST_FITS = 3
# Bytes of the arrays on the stack.
_TILE_BYTES, _LANE_BYTES, _CLASS_BYTES, _BLOCK_BYTES = 4 * _TILE, 4 * LANES, 4 * 256, 4 * 1024
_TWO_LANES, _METRIC_BYTES, _PLANE_BYTES = 8 * LANES, 2 * 4 * LANES * 256, 32


@jit
def _magnitudes(bits: Any) -> Any:
    """The largest bit pattern of a magnitude."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        largest = max(largest, magnitude)
    return largest


@jit
def _load_tile(room: Any, words16: Any, words32: Any, dtype: Any) -> None:
    """Convert up to sixteen blocks to float32; the rest become zeros."""
    count = len(words16)
    load_values(words16, words32, dtype, room.bits[:count], room.x[:count])
    for i in range(count, _TILE):
        room.x[i] = np.float32(0)


@jit
def _load(room: Any, words16: Any, words32: Any, dtype: Any, signed: Any, signs: Any, table: Any) -> Any:
    """Rotate a superblock into the work, divided by a power of two; return its exponent, or _NOT_FINITE."""
    weights = len(words16)
    largest = np.uint32(0)
    for first in range(0, weights, _TILE):
        end = min(first + _TILE, weights)
        _load_tile(room, words16[first:end], words32[first:end], dtype)
        largest = max(largest, _magnitudes(room.bits))
    if largest >= _INFINITE:
        return np.int64(_NOT_FINITE)
    exponent = np.int64(0)
    if largest != 0 and (largest < _SMALLEST or largest > _LARGEST):
        exponent = np.int64(largest >> np.uint32(23)) - 127
    half = exponent // 2
    once, twice = np.float32(power_of_two(-half)), np.float32(power_of_two(half - exponent))
    for first in range(0, weights, _TILE):
        end = min(first + _TILE, weights)
        _load_tile(room, words16[first:end], words32[first:end], dtype)
        if exponent != 0:
            for i in range(_TILE):
                room.x[i] = room.x[i] * once * twice
        if signed:
            for i in range(LANES):
                for j in range(128):
                    room.x[i * 128 + j] = room.x[i * 128 + j] * signs[j]
        rotate_tile(room.x, table, room.work, first // _TILE, room.squares, room.largest)
    return exponent


@inlined
def _prepare_tile(room: Any, model: Any, tile: Any, blocks: Any, inverse: Any) -> None:
    """Set the factors and penalties of a tile."""
    for lane in range(LANES):
        block = tile * LANES + lane
        c = room.classes[block] if block < blocks else 0
        room.factors[lane] = np.float32(model.down[c] * inverse)
        room.penalties[lane] = np.float32(0) if c > 0 else _FORBIDDEN


@jit
def _fitted_step(room: Any, model: Any, blocks: Any, exponent: Any) -> Any:
    """The step, for the weights as they came, with which the numbers decode with the least squared error."""
    product, length = 0.0, 0.0
    for i in range(blocks):
        gain = model.up[room.classes[i]]
        product = product + gain * np.float64(room.products[i])
        length = length + gain * gain * np.float64(room.lengths[i])
    if length == 0.0 or product <= 0.0:
        return np.float32(0)
    return np.float32(min(product / length * ORTHONORMAL * power_of_two(exponent), _LARGEST_STEP))


@jit
def _measure(room: Any, model: Any, tiles: Any, blocks: Any, step: Any, exponent: Any) -> Any:
    """The sum of squared errors, in the scale of the work, with a step in the scale of the weights."""
    unit = power_of_two(-exponent) * 128.0
    for tile in range(tiles):
        for lane in range(LANES):
            block = tile * LANES + lane
            c = room.classes[block] if block < blocks else 0
            scale = np.float32(np.float64(step) * (model.up[c] * ORTHONORMAL))  # as the decoder computes it
            room.factors[lane] = np.float32(np.float64(scale) * unit)
        search.measure_errors(room.work, tile, room.numbers, room.factors, room.errors)
    total = 0.0
    for i in range(blocks):
        total = total + np.float64(room.errors[i])
    return total / 128.0


@jit
def _encode_stream(room: Any, model: Any, tiles: Any, blocks: Any) -> Any:
    """Encode classes and numbers into the end of the stream; return where it begins."""
    position = len(room.stream)
    room.states[:] = np.uint32(LEAST)
    for tile in range(tiles - 1, -1, -1):
        for lane in range(LANES):
            block = tile * LANES + lane
            there = block < blocks
            c = room.classes[block] if there else 0
            room.zeros[lane] = model.zero[2 * c]
            room.zeros[LANES + lane] = model.zero[2 * c + 1]
            share = room.shares[c] - 1 if there else 255
            room.entries[lane] = np.uint32((room.starts[c] if there else 0) | share << 12)
        position = encode_numbers(room.numbers, tile, room.zeros, model.entries, room.states, room.stream, position)
        position = encode_classes(room.entries, room.states, room.stream, position)
    return position


@jit
def _bytes_of_float(x: Any, room: Any) -> Any:
    """The bit pattern of a float32."""
    room.x[0] = x
    return room.bits[0]


@jit
def _write(room: Any, row: Any, blocks: Any, step: Any, state_bits: Any, position: Any, unused: Any) -> Any:
    """Write a superblock if it fits into the row and leaves fewer bytes than `unused`; return those that it leaves."""
    first, end = share_classes(room, blocks)
    count = end - first
    shares = count if count > 1 else 0
    words = len(room.stream) - position
    lanes = min(LANES, blocks)
    size = HEADER + shares + 4 * lanes + 2 * words
    left = len(row) - size
    if left < 0 or left >= unused:
        return left
    word = _bytes_of_float(step, room)
    for i in range(4):
        row[i] = np.uint8(word >> np.uint32(8 * i))
    row[4], row[5], row[6] = np.uint8(state_bits), np.uint8(first), np.uint8(count)
    at = HEADER
    for i in range(shares):
        row[at + i] = np.uint8(room.shares[first + i])
    at += shares
    for lane in range(lanes):
        for i in range(4):
            row[at + 4 * lane + i] = np.uint8(room.states[lane] >> np.uint32(8 * i))
    at += 4 * lanes
    for i in range(words):
        word = np.uint32(room.stream[position + i])
        row[at + 2 * i] = np.uint8(word)
        row[at + 2 * i + 1] = np.uint8(word >> np.uint32(8))
    row[size:] = 0
    return left


@jit
def _first_guess(deviation: Any, byte_count: Any, blocks: Any) -> Any:
    """A step from which find_step starts: it falls by a factor of 4 for every 2 bits per weight."""
    step, bits = deviation * 2.0, 8.0 * byte_count
    for _ in range(30):
        if bits <= 0:
            break
        bits -= 2.0 * 128.0 * blocks
        step = step * 0.25
    return step


ENCODE = types.void(*[types.voidptr] * 18, *[types.int64] * 6)


def _make_encode(state_bits: int, start: Any, extend: Any, finish: Any, trace: Any) -> Any:
    states = 1 << state_bits

    @jit
    def quantize(room: Any, model: Any, tiles: Any, blocks: Any, step: Any) -> None:
        """Find the numbers of a superblock for a step, with their sums."""
        inverse = ORTHONORMAL / step
        start(room.metrics)
        for tile in range(tiles):
            _prepare_tile(room, model, tile, blocks, inverse)
            extend(room.work, tile, room.factors, room.penalties, room.metrics, room.decisions)
        finish(room.metrics, room.planes)
        for tile in range(tiles - 1, -1, -1):
            trace(room.decisions, tile, room.planes, room.residues)
        for tile in range(tiles):
            _prepare_tile(room, model, tile, blocks, inverse)
            search.find_numbers(room.work, tile, room.factors, room.residues, room.numbers, room.products, room.lengths)

    @jit
    def encode_row(room: Any, model: Any, row: Any, blocks: Any, exponent: Any) -> Any:
        """Encode a superblock that is in the work; return its energy and its error, in the scale of the weights."""
        tiles = (blocks + LANES - 1) // LANES
        row[:] = 0
        energy, most = 0.0, np.float32(0)
        for i in range(blocks):
            energy = energy + np.float64(room.squares[i]) / 128.0
            most = max(most, room.squares[i])
        unit = power_of_two(exponent)
        unit = unit * unit
        if energy == 0.0:
            return 0.0, 0.0
        best = energy
        # Blocks that are so much smaller than the largest become zeros, whatever the rate.
        least = np.sqrt(np.float64(most)) / 128.0 * 2.0**-45
        step = _first_guess(np.sqrt(energy / (128.0 * blocks)), len(row), blocks)
        margin = 16.0 + 0.0003 * 8.0 * len(row)
        wanted = 8.0 * len(row) - margin
        unused = len(row) + 1
        for attempt in range(_ATTEMPTS):
            step = find_step(room, model, blocks, wanted, step, least)
            if room.counts[0] == blocks:
                break
            quantize(room, model, tiles, blocks, step)
            fitted = _fitted_step(room, model, blocks, exponent)
            position = _encode_stream(room, model, tiles, blocks)
            left = _write(room, row, blocks, fitted, state_bits, position, unused)
            if 0 <= left < unused:
                best, unused = _measure(room, model, tiles, blocks, fitted, exponent), left
            if left >= 0:
                if left <= 0.0018 * len(row) + 1.0 or attempt >= _MOST_FITS:
                    break
                wanted += 8.0 * left - margin
            else:
                wanted += 8.0 * left - margin * (1 + attempt)
        return energy * unit, best * unit

    def encode(
        values_at: Any,
        table_at: Any,  # f32 [1]: -1
        signs_at: Any,
        limits_at: Any,
        bits_at: Any,
        slopes_at: Any,
        down_at: Any,
        up_at: Any,
        reach_at: Any,
        zero_at: Any,
        logarithms_at: Any,
        entries_at: Any,
        rows_at: Any,  # out: u8 [superblocks, stride]
        energies_at: Any,  # out: f64 [superblocks]
        errors_at: Any,  # out: f64 [superblocks]
        stats_at: Any,  # out: i64: the first superblock with a NaN or an infinity, or -1
        floats_at: Any,  # room: tiles * (2048 + 80) f32, aligned to 64 bytes
        words_at: Any,  # room: tiles * 128 * (states + 36) u16, likewise
        superblocks: Any,
        blocks: Any,  # of a superblock
        stride: Any,  # bytes of a superblock
        entry_count: Any,
        dtype: Any,  # a value of VALUE_DTYPES
        signed: Any,
    ) -> None:
        weights, tiles = blocks * 128, (blocks + LANES - 1) // LANES
        words16 = carray(values_at, superblocks * weights, np.uint16)
        words32 = carray(values_at, superblocks * weights, np.uint32)
        table, signs = carray(table_at, 1, np.float32), carray(signs_at, 128, np.float32)
        model = ClassModel(
            limits=carray(limits_at, 257, np.float64),
            bits=carray(bits_at, 256, np.float64),
            slopes=carray(slopes_at, 256, np.float64),
            down=carray(down_at, 256, np.float64),
            up=carray(up_at, 256, np.float64),
            reach=carray(reach_at, 256, np.int32),
            zero=carray(zero_at, 512, np.int32),
            logarithms=carray(logarithms_at, 257, np.float64),
            entries=carray(entries_at, entry_count, np.uint32),
        )
        rows = carray(rows_at, (superblocks, stride), np.uint8)
        energies, errors = carray(energies_at, superblocks, np.float64), carray(errors_at, superblocks, np.float64)
        stats = carray(stats_at, 1, np.int64)
        x_at = stack(_TILE_BYTES)
        per_block = carray(floats_at, tiles * (_TILE + 5 * LANES), np.float32)
        size, lanes = tiles * _TILE, tiles * LANES
        steps = tiles * 128
        shorts = carray(words_at, steps * (states + 36), np.uint16)
        room = Room(
            x=carray(x_at, _TILE, np.float32),
            bits=carray(x_at, _TILE, np.uint32),
            work=per_block[:size],
            squares=per_block[size : size + lanes],
            largest=per_block[size + lanes : size + 2 * lanes],
            products=per_block[size + 2 * lanes : size + 3 * lanes],
            lengths=per_block[size + 3 * lanes : size + 4 * lanes],
            errors=per_block[size + 4 * lanes : size + 5 * lanes],
            classes=carray(stack(_BLOCK_BYTES), 1024, np.int32),
            counts=carray(stack(_CLASS_BYTES), 256, np.int32),
            shares=carray(stack(_CLASS_BYTES), 256, np.int32),
            starts=carray(stack(_CLASS_BYTES), 256, np.int32),
            metrics=carray(stack(_METRIC_BYTES), 2 * LANES * 256, np.float32),
            decisions=shorts[: steps * states],
            planes=carray(stack(_PLANE_BYTES), 16, np.uint16),
            residues=shorts[steps * states : steps * (states + 2)],
            numbers=shorts[steps * (states + 2) : steps * (states + 18)].view(np.int16),
            states=carray(stack(_LANE_BYTES), LANES, np.uint32),
            stream=shorts[steps * (states + 18) : steps * (states + 36)],
            factors=carray(stack(_LANE_BYTES), LANES, np.float32),
            penalties=carray(stack(_LANE_BYTES), LANES, np.float32),
            zeros=carray(stack(_TWO_LANES), 2 * LANES, np.int32),
            entries=carray(stack(_LANE_BYTES), LANES, np.uint32),
        )
        stats[0] = -1
        for i in range(superblocks):
            begin, end = i * weights, (i + 1) * weights
            exponent = _load(room, words16[begin:end], words32[begin:end], dtype, signed, signs, table)
            if exponent == _NOT_FINITE:
                energies[i], errors[i] = 0.0, 0.0
                if stats[0] < 0:
                    stats[0] = i
            else:
                energies[i], errors[i] = encode_row(room, model, rows[i], blocks, exponent)

    return encode


KERNELS = {
    "encode_trellis_8": (
        _make_encode(3, search.start_8, search.search_8, search.finish_8, search.trace_8),
        ENCODE,
    ),
    "encode_trellis_64": (
        _make_encode(6, search.start_64, search.search_64, search.finish_64, search.trace_64),
        ENCODE,
    ),
    "encode_trellis_256": (
        _make_encode(8, search.start_256, search.search_256, search.finish_256, search.trace_256),
        ENCODE,
    ),
}
