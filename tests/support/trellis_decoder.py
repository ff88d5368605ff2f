"""A decoder of the codec hadamard-trellis, written from docs/format.md (section 8) alone: Python, numpy and mpmath.

It shares no code with the package, and derives the frequency tables in another way: from the normal distribution with
50 digits instead of integers of 96 bits.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import mpmath
import numpy as np
from independent_reader import BLOCK, SIGNS, hadamard

LANES = 16
LEAST = 1 << 16
# bits of a state -> what the parity and the bit above it flip
TRELLISES = {2: (2, 1), 3: (5, 2), 4: (9, 2), 5: (18, 4), 6: (33, 10), 7: (78, 43), 8: (166, 121)}
EXPONENTS = range(-6, 33)
NOISE = 0.2588


class Damaged(ValueError):
    """A superblock that a decoder must refuse."""


# --- how a weight is cut ---


class Cut(NamedTuple):
    """The superblocks of a weight, the blocks of each, and its bytes."""

    superblocks: int
    blocks: int
    size: int


def cut(weights: int, rate: float) -> Cut:
    """How a weight is cut at a rate."""
    blocks = max(1, math.ceil(weights / BLOCK)) if weights < 2**50 else -(-weights // BLOCK)
    if blocks <= 768:
        extra = (8 + 3 * min(16, blocks)) * max(0, 512 - blocks) // 512
        return Cut(1, blocks, math.floor(rate * blocks * 16) + extra)
    best = None
    for size in range(384, 769):
        empty = -blocks % size
        key = (empty, abs(size - 512), -size)
        if best is None or key < best[0]:
            best = (key, size)
    superblocks = math.ceil(blocks / best[1]) if blocks < 2**50 else -(-blocks // best[1])
    return Cut(superblocks, best[1], math.floor(rate * blocks * 16 / superblocks))


# --- tables ---


class Bucket(NamedTuple):
    """A run of values k: the first, and how many low bits of k follow."""

    first: int
    low_bits: int


class Table(NamedTuple):
    """The buckets of a table, their frequencies, and the frequencies before each."""

    buckets: list[Bucket]
    frequencies: list[int]
    starts: list[int]


def buckets_of(exponent: int, parity: int) -> tuple[list[Bucket], int]:
    """The buckets of an exponent and a parity, in order, and the k behind the last."""
    core_bits = max(0, math.ceil((exponent - 16) / 4))
    narrow = exponent - 4 * core_bits - 4
    deviation = mpmath.mpf(2) ** (mpmath.mpf(narrow) / 4)
    if narrow <= 4:
        reach, tails, wider = max(3, int(mpmath.floor(5 * deviation)) + 2), 0, 0
    else:
        wider = min(2, 4 - core_bits)
        reach = int(mpmath.floor(3 * deviation)) + 1
        tails = (int(mpmath.floor(9 * deviation / 4)) >> wider) + 1
    end = reach if core_bits or parity else reach + 1
    unit, wide = 1 << core_bits, 1 << core_bits + wider
    found = [Bucket(-reach * unit - (tails - i) * wide, core_bits + wider) for i in range(tails)]
    found += [Bucket(i * unit, core_bits) for i in range(-reach, end)]
    found += [Bucket(end * unit + i * wide, core_bits + wider) for i in range(tails)]
    return found, end * unit + tails * wide


@functools.cache
def table_of(exponent: int, parity: int) -> Table:
    """The table of an exponent and a parity."""
    with mpmath.workdps(50):
        buckets, last = buckets_of(exponent, parity)
        deviation = mpmath.mpf(2) ** (mpmath.mpf(exponent) / 4)
        borders = [2 * k + parity - 1 for k in [*(bucket.first for bucket in buckets), last]]
        below = [mpmath.erf(border / deviation / mpmath.sqrt(2)) for border in borders]
        masses = [high - low for low, high in itertools.pairwise(below)]
        frequencies = shares(masses, 4096)
    return Table(buckets, frequencies, [sum(frequencies[:i]) for i in range(len(frequencies))])


def shares(masses: list, seats: int) -> list[int]:
    """Whole shares of `seats` in proportion to masses, each at least 1."""
    total = sum(masses)
    found = [max(1, int(mpmath.floor(seats * mass / total + 0.5))) for mass in masses]
    while sum(found) > seats:
        quotients = [
            mass / (2 * share - 1) if share > 1 else mpmath.inf for mass, share in zip(masses, found, strict=True)
        ]
        found[_first_nearest(quotients, min(quotients))] -= 1
    while sum(found) < seats:
        quotients = [mass / (2 * share + 1) for mass, share in zip(masses, found, strict=True)]
        found[_first_nearest(quotients, max(quotients))] += 1
    return found


def _first_nearest(quotients: list, best: object) -> int:
    """The first of those that equal the best up to rounding: bilateral tables have equal masses."""
    return next(i for i, q in enumerate(quotients) if mpmath.almosteq(q, best, rel_eps=mpmath.mpf(10) ** -30))


class Kind(NamedTuple):
    """What a class means: its exponent (None for zeros), and its factor in float64."""

    exponent: int | None
    gain: float


@functools.cache
def kind_of(number: int, step_power: float = 0) -> Kind:
    """The kind of a class, where steps are in proportion to a power of the norm."""
    if number == 0:
        return Kind(None, 0.0)
    doublings, exponent = 0, number - 7
    if number > 39:
        exponent, doublings = 29 + (number - 40) % 4, 1 + (number - 40) // 4
    variance = 2.0 ** (exponent // 2) * (math.sqrt(2.0) if exponent % 2 else 1.0)
    gain = math.sqrt(variance / (variance + NOISE))
    if step_power == 0.5:
        return Kind(exponent, gain * ((math.sqrt(variance) if number <= 39 else 256.0) * 2.0**doublings))
    assert step_power == 0
    return Kind(exponent, gain * 2.0**doublings)


# --- a superblock ---


@dataclass
class Stream:
    """The words of a superblock and the next to read."""

    words: list[int]
    place: int = 0

    def next(self) -> int:
        """The next word."""
        if self.place == len(self.words):
            raise Damaged("the words are used up")
        self.place += 1
        return self.words[self.place - 1]


@dataclass
class Header:
    """What precedes the words: the step, the trellis, the classes with their frequencies, the states."""

    step: np.float32
    flips: tuple[int, int]
    first: int
    frequencies: list[int]
    states: list[int]


def read_header(row: bytes, blocks: int) -> tuple[Header, Stream] | None:
    """The header and the words of a superblock; None if all weights are zero."""
    (step,) = struct.unpack("<f", row[:4])
    state_bits, first, count = row[4:7]
    if count == 0:
        if step != 0 or state_bits != 0 or first != 0:
            raise Damaged("not the header of zeros")
        return None
    if not 0 <= step < math.inf or state_bits not in TRELLISES:
        raise Damaged("no such step or trellis")
    at = 7 + (count if count > 1 else 0)
    frequencies = list(row[7:at]) if count > 1 else [256]
    end = at + 4 * min(LANES, blocks)
    if end > len(row) or sum(frequencies) != 256 or first + count > 256:
        raise Damaged("no such classes")
    states = list(struct.unpack(f"<{min(LANES, blocks)}I", row[at:end]))
    if any(state < LEAST for state in states):
        raise Damaged("a state is too small")
    if (len(row) - end) % 2 and row[-1]:
        raise Damaged("half a word")
    words = struct.unpack(f"<{(len(row) - end) // 2}H", row[end : end + (len(row) - end) // 2 * 2])
    header = Header(np.float32(step), TRELLISES[state_bits], first, frequencies, states)
    return header, Stream(list(words))


def read_class(header: Header, lane: int) -> int:
    """The class of the lane's next block."""
    slot = header.states[lane] & 255
    starts = list(itertools.accumulate(header.frequencies, initial=0))
    place = next(i for i in range(len(header.frequencies)) if slot < starts[i + 1])
    header.states[lane] = header.frequencies[place] * (header.states[lane] >> 8) + slot - starts[place]
    return header.first + place


def read_number(header: Header, lane: int, exponent: int | None, parity: int) -> int:
    """The lane's next number n."""
    if exponent is None:
        return parity
    table, state = table_of(exponent, parity), header.states[lane]
    slot = state & 4095
    place = next(i for i in reversed(range(len(table.starts))) if table.starts[i] <= slot)
    state = table.frequencies[place] * (state >> 12) + slot - table.starts[place]
    bucket = table.buckets[place]
    low = state & ((1 << bucket.low_bits) - 1)
    header.states[lane] = state >> bucket.low_bits
    return 2 * (bucket.first + low) + parity


def refill(header: Header, stream: Stream, lanes: range) -> None:
    """Give each state that became small a word."""
    for lane in lanes:
        if header.states[lane] < LEAST:
            header.states[lane] = header.states[lane] << 16 | stream.next()


def decode_superblock(row: bytes, blocks: int, *, signed: bool, step_power: float = 0) -> np.ndarray:
    """The weights of a superblock, [blocks, 128] f32, before they are rounded to an output dtype."""
    found = read_header(row, blocks)
    values = np.zeros((blocks, BLOCK), dtype=np.float32)
    if found is None:
        return values
    header, stream = found
    paths, large = [0] * LANES, []
    for first in range(0, blocks, LANES):
        lanes = range(min(LANES, blocks - first))
        kinds = [kind_of(read_class(header, lane), step_power) for lane in lanes]
        refill(header, stream, lanes)
        numbers = np.zeros((len(lanes), BLOCK), dtype=np.float32)
        for t in range(BLOCK):
            for lane in lanes:
                parity = paths[lane] & 1
                n = read_number(header, lane, kinds[lane].exponent, parity)
                numbers[lane, t] = n
                flips = (header.flips[0] if parity else 0) ^ (header.flips[1] if n >> 1 & 1 else 0)
                paths[lane] = paths[lane] >> 1 ^ flips
            refill(header, stream, lanes)
        with np.errstate(under="ignore"):
            for lane in lanes:
                scale = float(header.step) * (kinds[lane].gain * 0.08838834764831845)
                raised = scale >= 2.0**100
                values[first + lane] = numbers[lane] * np.float32(scale * 2.0**-96 if raised else scale)
                if raised:
                    large.append(first + lane)
    if any(state != LEAST for state in header.states) or any(stream.words[stream.place :]):
        raise Damaged("the stream does not end as it should")
    values = hadamard(values)
    with np.errstate(over="ignore"):
        values[large] *= np.float32(2.0**96)
    return np.where(SIGNS, -values, values) if signed else values


def decode(rows: np.ndarray, blocks: int, *, signed: bool, step_power: float = 0) -> np.ndarray:
    """The float32 weights of superblocks, [superblocks, blocks * 128], from their bytes, u8 [superblocks, bytes]."""
    limit = np.finfo(np.float32).max
    decoded = [decode_superblock(row.tobytes(), blocks, signed=signed, step_power=step_power) for row in rows]
    return np.clip(np.stack(decoded).reshape(len(rows), -1), -limit, limit)
