"""The step of a superblock, in numba: the classes that its blocks get, and the bits that they are expected to take.

The encoder is free to choose a step. It does so in float64 with operations that every machine rounds alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pqweights.kernels import ORTHONORMAL
from pqweights.kernels.jit import jit

LANES = 16
# Bytes before the states of the coder if there are no frequencies of classes.
HEADER = 7
# What the state of a lane takes less what it holds, on average, in bits.
_STATE_BITS = 23.625
# The state of the coder with which the encoder begins and the decoder ends; states between steps are not below it.
LEAST = 1 << 16


class Room(NamedTuple):
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


class ClassModel(NamedTuple):
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
            top = np.float64(room.largest[i]) * inverse * ORTHONORMAL
            while c < 255 and top * model.down[c] + 2.0 > model.reach[c]:
                c += 1
            total += 128.0 * (model.bits[c] + model.slopes[c] * w)
        room.classes[i] = c
        room.counts[c] += 1
    return total


@jit
def share_classes(room: Any, blocks: Any) -> Any:
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
        # Of equals the first: the largest frequency gives, or the smallest for its count takes.
        best = -1
        for c in range(first, end):
            if given > 256:
                better = room.shares[c] > 1 and (best < 0 or room.shares[c] > room.shares[best])
            else:
                rarer = best < 0 or room.counts[c] * room.shares[best] > room.counts[best] * room.shares[c]
                better = room.counts[c] > 0 and rarer
            if better:
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
    first, end = share_classes(room, blocks)
    for c in range(first, end):
        if room.counts[c]:
            total += room.counts[c] * model.logarithms[room.shares[c]]
    return total + _STATE_BITS * min(LANES, blocks) + 8.0 * (HEADER + (end - first if end - first > 1 else 0))


@jit
def find_step(room: Any, model: Any, blocks: Any, wanted: Any, step: Any, least: Any) -> Any:
    """A step with which a superblock is expected to take `wanted` bits, from a first guess; at least `least`."""
    room.classes[:blocks] = 8
    for _ in range(24):
        step = max(step, least)
        excess = _expected_bits(room, model, blocks, step) - wanted
        if abs(excess) < 4.0:
            return step
        coded = 128.0 * max(1, blocks - room.counts[0])
        step = step * _exp2(max(-1.0, min(1.0, excess / coded)))
    step = max(step, least)
    _expected_bits(room, model, blocks, step)  # for the classes that belong to this step
    return step
