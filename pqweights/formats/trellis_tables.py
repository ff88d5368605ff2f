"""The classes of the trellis codec and their frequency tables, derived in integer arithmetic (docs/format.md).

A block of weights belongs to a class, which says how its numbers n are distributed: like a normal variable of standard
deviation 2**(exponent / 4), rounded to the integers of a given parity. Of two parities each class has a table: n is
2 * k + parity, k falls into a bucket, and a bucket has a frequency of 4096. A bucket of the tail, or of a wide class,
holds several k, whose low bits are coded as they are.

The frequencies are part of the format, so nothing here may depend on how a machine rounds: probabilities are integers,
from the power series of the normal distribution function.

The encoder's model of the rate says how many bits the numbers of a block are expected to take: for each class a linear
function of the block's mean square, since the code length of a normal variable is a quadratic. The encoder chooses the
step with it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.kernels.trellis import DecodeTables, EncodeModel

# Frequencies of a table add up to 2**TABLE_BITS.
TABLE_BITS = 12
# The exponents of the classes with a table of their own: standard deviations 2**(exponent / 4).
EXPONENTS = range(-6, 33)
# Class 0 holds blocks of which every weight decodes to zero; class c, up to TABLES, has exponent c - 1 + EXPONENTS[0].
TABLES = len(EXPONENTS)
# Beyond TABLES, classes use the four last tables in turn, with steps of 2, 4, 8, ... times the size.
CLASSES = 256
# The mean squared error of the search with 8 states, in squares of the step.
NOISE = 0.2588
# Bits of the fractions with which probabilities are computed.
_FRACTION = 96


class Class(NamedTuple):
    """What a class, by its number, means for the decoder.

    table: the number of its tables, from 1; 0 for the class of zeros
    doublings: how often its step is doubled
    """

    table: int
    doublings: int

    @staticmethod
    def of(number: int) -> Class:
        """Return the class of a number below CLASSES."""
        beyond = number - TABLES - 1
        return Class(number, 0) if beyond < 0 else Class(TABLES - 3 + beyond % 4, 1 + beyond // 4)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How the values of k are grouped.

    core_bits: the buckets of the core hold 2**core_bits values each
    tail_bits: those of the tails hold 2**tail_bits
    edges: the first k of each bucket, and the one after the last; in units of 2**core_bits
    core: the index of the first bucket of the core, and of the first one behind it
    """

    core_bits: int
    tail_bits: int
    edges: tuple[int, ...]
    core: tuple[int, int]

    def bits_of(self, bucket: int) -> int:
        """The low bits of k that a bucket leaves to be coded as they are."""
        return self.core_bits if self.core[0] <= bucket < self.core[1] else self.tail_bits


def buckets(exponent: int, parity: int) -> Buckets:
    """Return the buckets of a class and a parity."""
    core_bits = max(0, -(-(exponent - 16) // 4))
    narrow = exponent - 4 * core_bits - 4  # the standard deviation of k is 2**(narrow / 4) units
    if narrow <= 4:
        core, tails, wider = max(3, _root(5, narrow) + 2), 0, 0
    else:
        wider = min(2, 4 - core_bits)
        core, tails = _root(3, narrow) + 1, (_root(9, narrow - 8) >> wider) + 1
    # Without low bits, the numbers of either parity lie symmetrically around zero, and k = 0 stands for 0 or 1.
    end = core + 1 - parity if core_bits == 0 else core
    lower = [-core - (tails - i << wider) for i in range(tails)]
    upper = [end + (i << wider) for i in range(tails + 1)]
    return Buckets(
        core_bits=core_bits,
        tail_bits=core_bits + wider,
        edges=(*lower, *range(-core, end), *upper),
        core=(tails, tails + core + end),
    )


def _root(factor: int, quarter_powers: int) -> int:
    """Return floor(factor * 2**(quarter_powers / 4)), exactly."""
    return math.isqrt(math.isqrt(factor**4 << (quarter_powers + 40))) >> 10


@functools.cache
def frequencies(exponent: int, parity: int) -> tuple[int, ...]:
    """Return the frequency of each bucket; they add up to 4096, and none is 0."""
    groups = buckets(exponent, parity)
    borders = [2 * (edge << groups.core_bits) + parity - 1 for edge in groups.edges]
    below = [_normal_integral(border, exponent) for border in borders]
    masses = [high - low for low, high in itertools.pairwise(below)]
    return apportioned(masses, 1 << TABLE_BITS)


def apportioned(masses: list[int], seats: int) -> tuple[int, ...]:
    """Return shares of `seats` in proportion to masses, each at least 1.

    They are rounded to nearest, halves up. As long as too many are given out, the one with the smallest mass per
    2 * share - 1 loses one, of those with more than 1; as long as too few, the one with the largest mass per
    2 * share + 1 gets one. Of equals, the first does.
    """
    total = sum(masses)
    shares = [max(1, (2 * seats * mass + total) // (2 * total)) for mass in masses]
    while (extra := sum(shares) - seats) != 0:
        if extra > 0:
            index = _best([i for i, share in enumerate(shares) if share > 1], masses, shares, side=-1)
        else:
            index = _best(range(len(shares)), masses, shares, side=+1)
        shares[index] += 1 if extra < 0 else -1
    return tuple(shares)


def _best(indices: Sequence[int], masses: list[int], shares: list[int], *, side: int) -> int:
    """Return the first place with the largest, or for side -1 the smallest, masses[i] / (2 * shares[i] + side)."""
    best = indices[0]
    for index in indices[1:]:
        excess = masses[index] * (2 * shares[best] + side) - masses[best] * (2 * shares[index] + side)
        if excess * side > 0:
            best = index
    return best


def _normal_integral(border: int, exponent: int) -> int:
    """Return the integral of exp(-x**2 / 2) from 0 to border / 2**(exponent / 4), as a fraction of 2**_FRACTION.

    From its power series, x - x**3 / 6 + x**5 / 40 - ...; every division rounds down.
    """
    scale = math.isqrt(math.isqrt(1 << (exponent + 4 * _FRACTION)))
    x = (abs(border) << (2 * _FRACTION)) // scale
    square = x * x >> _FRACTION
    power, total, n = x, 0, 0
    while power:
        total += (-power if n & 1 else power) // (2 * n + 1)
        n += 1
        power = (power * square >> _FRACTION) // (2 * n)
    return -total if border < 0 else total


def gain(number: int) -> float:
    """Return the factor of a class, by which weights are multiplied before the search, and numbers after decoding.

    It is the square root of s2 / (s2 + NOISE), s2 being the variance of the class in squares of its step: coding with
    this factor on both sides leaves the error of least squares, and the same error in all blocks with the same step.
    """
    table = Class.of(number).table
    if table == 0:
        return 0.0
    variance = sqrt2_power(table - 1 + EXPONENTS[0])
    return math.sqrt(variance / (variance + NOISE))


def width(number: int, step_power: float) -> float:
    """Return the step of a class, in steps of the superblock.

    With a power of 0.5 it is the standard deviation of the class in its own steps: then the step is in proportion to
    the square root of the block's. From class 40 on, blocks have few tables, and the step keeps up with them.
    """
    of_number = Class.of(number)
    if step_power == 0 or of_number.table == 0:
        return math.ldexp(1.0, of_number.doublings)
    table = TABLES if of_number.doublings else of_number.table
    return math.ldexp(math.sqrt(sqrt2_power(table - 1 + EXPONENTS[0])), of_number.doublings)


def sqrt2_power(exponent: int, root: int = 2) -> float:
    """Return 2**(exponent / root) for a root of 2 or 4; pow may round differently from machine to machine."""
    whole, rest = divmod(exponent, root)
    result = 1.0
    for bit in (1, 2) if root == 4 else (1,):
        if rest & bit:
            result *= math.sqrt(math.sqrt(2.0)) if root == 4 and bit == 1 else math.sqrt(2.0)
    return math.ldexp(result, whole)


def _decode_entries() -> npt.NDArray[np.uint32]:
    """Return the table that the decoder looks up: [1 + TABLES, 2, 4096], by table, parity and the low bits of a state.

    An entry has, from its lowest bit on: 12 bits, the low bits of the state less the first of the bucket's; 12 bits,
    the frequency less 1; 1 bit, whether the bucket is of a tail; 7 bits, the first k of the bucket in units of
    2**core_bits, with a sign.
    """
    table = np.zeros((1 + TABLES, 2, 1 << TABLE_BITS), dtype=np.uint32)
    table[0] = np.arange(1 << TABLE_BITS, dtype=np.uint32) | np.uint32((1 << TABLE_BITS) - 1 << TABLE_BITS)
    for index, exponent in enumerate(EXPONENTS):
        for parity in range(2):
            groups = buckets(exponent, parity)
            count = np.array(frequencies(exponent, parity), dtype=np.int64)
            start = np.cumsum(count) - count
            number = np.arange(len(count))
            tail = (number < groups.core[0]) | (number >= groups.core[1])
            base = np.array(groups.edges[:-1]) & 127
            entry = (count - 1 << 12) | tail.astype(np.int64) << 24 | base << 25
            bias = np.arange(1 << TABLE_BITS) - np.repeat(start, count)
            table[1 + index, parity] = np.repeat(entry, count) | bias
    return table


def _encode_entries() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return what the encoder looks up: the entries of all tables, and of each table its zero and its reach.

    entries: u32; from its lowest bit on: 12 bits, the first of the bucket's low bits of a state; 12 bits, the frequency
        less 1; 3 bits, how many low bits of k follow; 4 bits, these
    zero: [1 + TABLES, 2] i32: where in the entries k = 0 of a table and a parity is
    reach: [1 + TABLES] i32: the largest magnitude of n such that a table has all n up to it
    """
    parts = [np.array([(1 << TABLE_BITS) - 1 << TABLE_BITS], dtype=np.uint32)]
    zero = np.zeros((1 + TABLES, 2), dtype=np.int32)
    reach = np.zeros(1 + TABLES, dtype=np.int32)
    length = 1
    for index, exponent in enumerate(EXPONENTS):
        reaches = []
        for parity in range(2):
            groups = buckets(exponent, parity)
            count = np.array(frequencies(exponent, parity), dtype=np.int64)
            start = np.cumsum(count) - count
            low_bits = np.array([groups.bits_of(i) for i in range(len(count))])
            entry = np.repeat(start | count - 1 << 12 | low_bits << 24, 1 << low_bits)
            low = np.concatenate([np.arange(1 << bits) for bits in low_bits])
            parts.append((entry | low << 27).astype(np.uint32))
            first, last = groups.edges[0] << groups.core_bits, (groups.edges[-1] << groups.core_bits) - 1
            zero[1 + index, parity] = length - first
            reaches.append(min(-2 * first - parity, 2 * last + parity))
            length += len(entry)
        reach[1 + index] = min(reaches)
    return np.concatenate(parts), zero, reach


# By how many bits, in the classes from the first on, weights take less than expected_length says, which assumes both
# parities equally likely. Measured with 8 states on N(0,1) in blocks of equal length (benchmarks/trellis_model.py).
SAVED = (
    *(0.5162, 0.5247, 0.3346, 0.1112, 0.0650, 0.0501, 0.0401, 0.0301, 0.0225, 0.0167),
    *(0.0121, 0.0087, 0.0061, 0.0044, 0.0030, 0.0023, 0.0016, 0.0012, 0.0010, 0.0005),
)
# What is computed with logarithms and exponentials, whose last bits differ between machines, is rounded to this.
_EXACT = 2.0**20


@functools.cache
def decode_tables(step_power: float = 0) -> DecodeTables:
    """Return what the decoder looks up, for steps in proportion to a power of the norm (width)."""
    pairs = [buckets(exponent, 0) for exponent in EXPONENTS]
    widths = np.array([(0, 0), *((pair.core_bits, pair.tail_bits) for pair in pairs)], dtype=np.int32)
    return DecodeTables(
        entries=_decode_entries(),
        tables=np.array([Class.of(number).table for number in range(CLASSES)], dtype=np.int32),
        widths=widths,
        gains=np.array([gain(number) * width(number, step_power) for number in range(CLASSES)]),
    )


@functools.cache
def encode_model(step_power: float = 0) -> EncodeModel:
    """Return what the encoder knows, for steps in proportion to a power of the norm (width)."""
    classes = [Class.of(number) for number in range(CLASSES)]
    tables = np.array([of_number.table for of_number in classes])
    widths = np.array([width(number, step_power) for number in range(CLASSES)])
    gains = np.array([gain(number) for number in range(CLASSES)])
    # A class begins half-way, in decibels, between its norm and that of the class before it.
    lowest = np.array([0.0, *(sqrt2_power(2 * e - 1, 4) for e in EXPONENTS)])[tables]
    steeper = np.array([number <= TABLES and step_power > 0 for number in range(CLASSES)])
    limits = (lowest + NOISE) * np.where(steeper, lowest, widths**2)
    limits[0] = -math.inf
    lengths = np.array([(0.0, 0.0), *(_code_length(exponent) for exponent in EXPONENTS)])[tables]
    shares = np.arange(1, 257) / 256
    entries, zero, reach = _encode_entries()
    return EncodeModel(
        limits=np.append(limits, math.inf),
        bits=_rounded(lengths[:, 0]),
        slopes=_rounded(lengths[:, 1] * _EXACT) / _EXACT * gains**2 / widths**2,
        down=gains / widths,
        up=gains * widths,
        reach=reach[tables],
        zero=zero[tables],
        logarithms=np.append(0.0, _rounded(-np.log2(shares))),
        entries=entries,
        pace=2 / (2 - step_power),
    )


def _rounded(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.rint(numbers * _EXACT) / _EXACT


def _code_length(exponent: int) -> tuple[float, float]:
    """Return the expected bits of a weight in a class: a constant, and a factor of the searched mean square."""
    near, far = 2.0 ** ((exponent - 0.5) / 2), 2.0 ** ((exponent + 0.5) / 2)
    at_near, at_far = (expected_length(exponent, math.sqrt(square)) for square in (near, far))
    slope = (at_far - at_near) / (far - near)
    index = exponent - EXPONENTS[0]
    return at_near - slope * near - (SAVED[index] if index < len(SAVED) else 0.0), slope


def expected_length(exponent: int, deviation: float) -> float:
    """Return the expected bits of a weight that is searched with some standard deviation, coded in a class."""
    total = 0.0
    for parity in range(2):
        groups = buckets(exponent, parity)
        borders = [2 * (edge << groups.core_bits) + parity - 1 for edge in groups.edges]
        below = [math.erf(border / deviation / math.sqrt(2.0)) for border in borders]
        for i, frequency in enumerate(frequencies(exponent, parity)):
            length = TABLE_BITS - math.log2(frequency) + groups.bits_of(i)
            total += (below[i + 1] - below[i]) / 4 * length
    return total
