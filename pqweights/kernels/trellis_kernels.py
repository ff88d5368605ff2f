"""The kernels of the trellis codec in numba: superblocks to bytes of a given number, and back.

The vector code is in trellis_search.py and trellis_entropy.py; docs/format.md describes the bytes. The decoder is held to
it to the bit. The encoder is free to choose; it is written so that every machine chooses alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from pqweights.kernels import trellis_search as search
from pqweights.kernels.conversions import load_values, store_values
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.trellis_entropy import decode_classes, decode_numbers, encode_classes, encode_numbers
from pqweights.kernels.vector import stack

LANES = 16
_TILE = LANES * 128
# Bytes before the states of the coder if there are no weights of classes.
HEADER = 7
_STATE_BYTES = 4 * LANES
# The least state between steps, with which the encoder begins and the decoder ends.
_LEAST = 1 << 16
# What the states take from the stream less what they hold, on average, in bits.
_STATE_BITS = 378.0
_ORTHONORMAL = 0.08838834764831845
# Larger than what any path costs, so that blocks of class 0 have only numbers 0 and 1.
_FORBIDDEN = np.float32(1e6)
# Magnitudes outside these are brought to 1 by a power of two, so that sums of squares stay in the range of float32.
_SMALLEST, _LARGEST = np.uint32((127 - 40) << 23), np.uint32((127 + 40) << 23)
_INFINITE = np.uint32(0x7F800000)
_ATTEMPTS = 12
# Bytes of the arrays on the stack.
_TILE_BYTES, _LANE_BYTES, _CLASS_BYTES, _BLOCK_BYTES = 4 * _TILE, 4 * LANES, 4 * 256, 4 * 1024
_TWO_LANES, _THREE_LANES, _METRIC_BYTES, _PLANE_BYTES = 8 * LANES, 12 * LANES, 2 * 4 * LANES * 256, 32


class _Room(NamedTuple):
    """The memory in which a superblock is encoded; [blocks] ends with lanes that have no block.

    x: sixteen blocks of weights (f32 [16, 128]), and the same memory as `bits` (u32)
    work: the rotated weights, f32 [tiles, 128, 16]
    squares, largest, products, lengths, errors: f32 [blocks]; see trellis_search
    classes: i32 [blocks]
    counts: how many blocks each class has, i32 [256]
    shares: its frequency of 256, i32 [256]
    starts: i32 [256]: the frequencies of the classes before it, added
    metrics, decisions, planes, residues, numbers: see trellis_search
    states: u32 [16]
    stream: u16
    factors, penalties: f32 [16]
    zeros: i32 [2, 16]
    entries: u32 [16]
    """

    x: Any
    bits: Any
    work: Any
    squares: Any
    largest: Any
    products: Any
    lengths: Any
    errors: Any
    classes: Any
    counts: Any
    shares: Any
    starts: Any
    metrics: Any
    decisions: Any
    planes: Any
    residues: Any
    numbers: Any
    states: Any
    stream: Any
    factors: Any
    penalties: Any
    zeros: Any
    entries: Any


class _Model(NamedTuple):
    """What the encoder knows of the classes, by number; see codecs.trellis_classes.

    limits: f64 [257]: the least mean square, in squares of the step, from which on a block has this class
    bits, slopes: f64 [256]: a weight of a block with mean square w takes bits + slopes * w
    down, up: f64 [256]: weights are multiplied by `down` / step before the search, numbers by `up` * step
    reach: i32 [256]: the largest magnitude of a number
    zero: i32 [256, 2]: see EncodeTable
    logarithms: f64 [257]: -log2(i / 256)
    entries: see EncodeTable
    """

    limits: Any
    bits: Any
    slopes: Any
    down: Any
    up: Any
    reach: Any
    zero: Any
    logarithms: Any
    entries: Any


# --- loading ---


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
def _power_of_two(exponent: Any) -> Any:
    """2**exponent in f64, exactly."""
    result = 1.0
    for _ in range(abs(exponent)):
        result = result * (2.0 if exponent > 0 else 0.5)
    return result


@jit
def _load(room: Any, words16: Any, words32: Any, dtype: Any, signed: Any, signs: Any, table: Any) -> Any:
    """Rotate a superblock into the work, divided by a power of two; return its exponent, or -1000 for NaN or infinity."""
    weights = len(words16)
    largest = np.uint32(0)
    for first in range(0, weights, _TILE):
        end = min(first + _TILE, weights)
        _load_tile(room, words16[first:end], words32[first:end], dtype)
        largest = max(largest, _magnitudes(room.bits))
    if largest >= _INFINITE:
        return np.int64(-1000)
    exponent = np.int64(0)
    if largest != 0 and (largest < _SMALLEST or largest > _LARGEST):
        exponent = np.int64(largest >> np.uint32(23)) - 127
    half = exponent // 2
    once, twice = np.float32(_power_of_two(-half)), np.float32(_power_of_two(half - exponent))
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
        search.rotate_tile(room.x, table, room.work, first // _TILE, room.squares, room.largest)
    return exponent


# --- choosing the step ---


@jit
def _exp2(x: Any) -> Any:
    """About 2**x, for |x| <= 1."""
    y = x * 0.6931471805599453
    return 1.0 + y * (1.0 + y * (0.5 + y * (0.16666666666666666 + y * 0.041666666666666664)))


@jit
def _classify(room: Any, model: Any, blocks: Any, step: Any) -> Any:
    """Choose the classes of all blocks, count them, and return how many bits the numbers are expected to take."""
    room.counts[:] = 0
    inverse = 1.0 / step
    per_square = inverse * inverse / (128.0 * 128.0)
    total = 0.0
    for i in range(blocks):
        w = np.float64(room.squares[i]) * per_square
        c = room.classes[i]
        while c > 0 and w < model.limits[c]:
            c -= 1
        while w >= model.limits[c + 1]:
            c += 1
        if c > 0:
            # A number may end up two from its weight.
            top = np.float64(room.largest[i]) * inverse * _ORTHONORMAL
            while c < 255 and top * model.down[c] + 2.0 > model.reach[c]:
                c += 1
            total += 128.0 * (model.bits[c] + model.slopes[c] * w)
        room.classes[i] = c
        room.counts[c] += 1
    return total


@jit
def _share(room: Any, blocks: Any) -> Any:
    """Turn counts of classes into frequencies of 256; return the first class, and the one behind the last."""
    first, end, given = 0, 0, 0
    for c in range(255, -1, -1):
        room.shares[c] = 0
        if room.counts[c]:
            first = c
            if end == 0:
                end = c + 1
            room.shares[c] = max(1, (2 * 256 * room.counts[c] + blocks) // (2 * blocks))
            given += room.shares[c]
    while given != 256:
        best = -1
        for c in range(first, end):
            if given > 256 and room.shares[c] > 1 and (best < 0 or room.shares[c] > room.shares[best]):
                best = c
            if given < 256 and room.counts[c]:
                if best < 0 or room.counts[c] * room.shares[best] > room.counts[best] * room.shares[c]:
                    best = c
        change = 1 if given < 256 else -1
        room.shares[best] += change
        given += change
    start = 0
    for c in range(256):
        room.starts[c] = start
        start += room.shares[c]
    return first, end


@jit
def _expected_bits(room: Any, model: Any, blocks: Any, step: Any) -> Any:
    """How many bits a superblock is expected to take with a step."""
    total = _classify(room, model, blocks, step)
    first, end = _share(room, blocks)
    for c in range(first, end):
        if room.counts[c]:
            total += room.counts[c] * model.logarithms[room.shares[c]]
    return total + _STATE_BITS + 8.0 * (HEADER + (end - first if end - first > 1 else 0))


@jit
def _find_step(room: Any, model: Any, blocks: Any, wanted: Any, step: Any, least: Any) -> Any:
    """A step with which a superblock is expected to take `wanted` bits, from a first guess; at least `least`."""
    room.classes[:blocks] = 8
    for _ in range(24):
        step = max(step, least)
        excess = _expected_bits(room, model, blocks, step) - wanted
        if abs(excess) < 4.0:
            break
        coded = 128.0 * max(1, blocks - room.counts[0])
        step = step * _exp2(max(-1.0, min(1.0, excess / coded)))
    return max(step, least)


# --- coding with a step ---


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
    return np.float32(product / length * _ORTHONORMAL * _power_of_two(exponent))


@jit
def _measure(room: Any, model: Any, tiles: Any, blocks: Any, step: Any, exponent: Any) -> Any:
    """The sum of squared errors, in the scale of the work, with a step in the scale of the weights."""
    unit = _power_of_two(-exponent) * 128.0
    for tile in range(tiles):
        for lane in range(LANES):
            block = tile * LANES + lane
            c = room.classes[block] if block < blocks else 0
            scale = np.float32(np.float64(step) * (model.up[c] * _ORTHONORMAL))  # as the decoder computes it
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
    room.states[:] = np.uint32(_LEAST)
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
def _write(room: Any, row: Any, blocks: Any, step: Any, state_bits: Any, position: Any) -> Any:
    """Write a superblock if it fits into the row; return the bytes that it takes."""
    first, end = _share(room, blocks)
    count = end - first
    shares = count if count > 1 else 0
    words = len(room.stream) - position
    lanes = min(LANES, blocks)
    size = HEADER + shares + 4 * lanes + 2 * words
    if size > len(row):
        return size
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
    return size


ENCODE = types.void(*[types.voidptr] * 18, *[types.int64] * 6)
DECODE = types.void(*[types.voidptr] * 11, *[types.int64] * 6)


def _make_encode(state_bits: int, start: Any, extend: Any, finish: Any, trace: Any) -> Any:
    states = 1 << state_bits

    @jit
    def quantize(room: Any, model: Any, tiles: Any, blocks: Any, step: Any) -> None:
        """Find the numbers of a superblock for a step, with their sums."""
        inverse = _ORTHONORMAL / step
        start(room.metrics)
        for tile in range(tiles):
            _prepare_tile(room, model, tile, blocks, inverse)
            extend(room.work, tile, room.factors, room.penalties, room.metrics, room.decisions)
        finish(room.metrics, room.planes)
        for tile in range(tiles - 1, -1, -1):
            trace(room.decisions, tile, room.planes, room.residues)
        for tile in range(tiles):
            _prepare_tile(room, model, tile, blocks, inverse)
            search.find_numbers(
                room.work, tile, room.factors, room.residues, room.numbers, room.products, room.lengths
            )

    @jit
    def encode_row(room: Any, model: Any, row: Any, blocks: Any, exponent: Any) -> Any:
        """Encode a superblock that is in the work; return its energy and its error, in the scale of the weights."""
        tiles = (blocks + LANES - 1) // LANES
        row[:] = 0
        energy, most = 0.0, np.float32(0)
        for i in range(blocks):
            energy = energy + np.float64(room.squares[i]) / 128.0
            most = max(most, room.squares[i])
        unit = _power_of_two(exponent)
        unit = unit * unit
        if energy == 0.0:
            return 0.0, 0.0
        best, bits = energy, 8.0 * len(row)
        # Blocks that are so much smaller than the largest become zeros, whatever the rate.
        least = np.sqrt(np.float64(most)) / 128.0 * 2.0**-45
        step = np.sqrt(energy / (128.0 * blocks)) * 2.0
        for _ in range(30):
            if bits <= 0:
                break
            bits -= 256.0 * blocks
            step = step * 0.25
        margin = 24.0 + 0.0005 * 8.0 * len(row)
        wanted = 8.0 * len(row) - margin
        for attempt in range(_ATTEMPTS):
            step = _find_step(room, model, blocks, wanted, step, least)
            if room.counts[0] == blocks:
                break
            quantize(room, model, tiles, blocks, step)
            fitted = _fitted_step(room, model, blocks, exponent)
            position = _encode_stream(room, model, tiles, blocks)
            size = _write(room, row, blocks, fitted, state_bits, position)
            spare = 8.0 * (len(row) - size)
            if spare >= 0:
                best = _measure(room, model, tiles, blocks, fitted, exponent)
                if spare <= 8.0 + 0.0025 * 8.0 * len(row) or attempt > 0:
                    break
                wanted += spare - margin
            else:
                wanted += spare - margin * (1 + attempt)
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
        model = _Model(
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
        room = _Room(
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
            if exponent == -1000:
                energies[i], errors[i] = 0.0, 0.0
                if stats[0] < 0:
                    stats[0] = i
            else:
                energies[i], errors[i] = encode_row(room, model, rows[i], blocks, exponent)

    return encode


# What is wrong with a superblock.
SOUND, BAD_HEADER, BAD_STREAM = 0, 1, 2
# The words that a tile reads at most.
_MOST_WORDS = (128 + 1) * LANES


@jit
def _read_shares(row: Any, table: Any) -> Any:
    """Fill the table of classes (see decode_classes); return whether the shares add up to 256."""
    first, count = np.int64(row[5]), np.int64(row[6])
    start = 0
    for i in range(count):
        share = np.int64(row[HEADER + i]) if count > 1 else 256
        if start + share > 256 or first + i > 255:
            return False
        for j in range(share):
            table[start + j] = np.uint32(j | (share - 1) << 12 | (first + i) << 24)
        start += share
    return start == 256


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
    tables, scales = carray(stack(_THREE_LANES), 3 * LANES, np.int32), carray(stack(_LANE_BYTES), LANES, np.float32)
    status[0], status[1] = -1, SOUND
    for number in range(superblocks):
        row = rows[number]
        wrong, tiles = SOUND, (blocks + LANES - 1) // LANES
        bits[0] = np.uint32(row[0]) | np.uint32(row[1]) << 8 | np.uint32(row[2]) << 16 | np.uint32(row[3]) << 24
        step, count = np.float64(x[0]), np.int64(row[6])
        at = HEADER + (count if count > 1 else 0) + 4 * lanes
        state_bits = np.int64(row[4]) & 15
        if count == 0:  # all zeros
            if step != 0.0 or row[4] != 0 or row[5] != 0:
                wrong = BAD_HEADER
        elif at > stride or not (step >= 0.0 and step < np.inf):
            wrong = BAD_HEADER
        elif row[4] > 15 or trellises[2 * state_bits] == 0 or not _read_shares(row, class_table):
            wrong = BAD_HEADER
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
        position = 0
        for tile in range(tiles):
            for lane in range(LANES):
                present[lane] = np.int32(tile * LANES + lane < blocks)
            position = decode_classes(class_table, present, states, stream, position, classes)
            for lane in range(LANES):
                kind = kinds[classes[lane]]
                tables[lane] = kind << 13
                tables[LANES + lane], tables[2 * LANES + lane] = widths[2 * kind], widths[2 * kind + 1]
                scales[lane] = np.float32(step * gains[classes[lane]])
            flips = trellises[2 * state_bits : 2 * state_bits + 2]
            position = decode_numbers(table, tables, flips, scales, states, paths, stream, position, work)
            if position > words:
                wrong = BAD_STREAM
                position = 0
            if rotate:
                search.unrotate_tile(work, minus_one, x)
            else:
                search.transpose_tile(work, x)
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
        if wrong != SOUND and status[0] < 0:
            status[0], status[1] = number, wrong


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
    "decode_trellis": (_decode, DECODE),
}
