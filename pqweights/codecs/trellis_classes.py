"""What the trellis codec's kernels know of each class: the decoder's tables, and the encoder's model of the rate.

The model says how many bits the numbers of a block are expected to take: for each class a linear function of the
block's mean square, since the code length of a normal variable is a quadratic. The encoder chooses the step with it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from pqweights.codecs.trellis_tables import (
    CLASSES,
    EXPONENTS,
    NOISE,
    TABLE_BITS,
    TABLES,
    Class,
    buckets,
    decode_table,
    encode_table,
    frequencies,
    gain,
    sqrt2_power,
)
from pqweights.kernels.trellis import DecodeTables, EncodeModel

# By how many bits, in the classes from the first on, weights take less than expected_length says, which assumes both
# parities equally likely. Measured with 8 states on N(0,1) in blocks of equal length (benchmarks/trellis_model.py).
SAVED = (
    *(0.5162, 0.5247, 0.3346, 0.1112, 0.0650, 0.0501, 0.0401, 0.0301, 0.0225, 0.0167),
    *(0.0121, 0.0087, 0.0061, 0.0044, 0.0030, 0.0023, 0.0016, 0.0012, 0.0010, 0.0005),
)
# What is computed with logarithms and exponentials, whose last bits differ between machines, is rounded to this.
_EXACT = 2.0**20


@functools.cache
def decode_tables() -> DecodeTables:
    """Return what the decoder looks up."""
    pairs = [buckets(exponent, 0) for exponent in EXPONENTS]
    widths = np.array([(0, 0), *((pair.core_bits, pair.tail_bits) for pair in pairs)], dtype=np.int32)
    return DecodeTables(
        entries=decode_table(),
        tables=np.array([Class.of(number).table for number in range(CLASSES)], dtype=np.int32),
        widths=widths,
        gains=np.array([gain(number) for number in range(CLASSES)]),
    )


@functools.cache
def encode_model() -> EncodeModel:
    """Return what the encoder knows."""
    kinds = [Class.of(number) for number in range(CLASSES)]
    tables = np.array([kind.table for kind in kinds])
    doubled = np.ldexp(1.0, [kind.doublings for kind in kinds])
    gains = np.array([gain(table) for table in range(1 + TABLES)])[tables]
    limits = np.array([-math.inf, *(sqrt2_power(2 * e - 1, 4) + NOISE for e in EXPONENTS)])[tables] * doubled**2
    lengths = np.array([(0.0, 0.0), *(_code_length(exponent) for exponent in EXPONENTS)])[tables]
    shares = np.arange(1, 257) / 256
    encoder = encode_table()
    return EncodeModel(
        limits=np.append(limits, math.inf),
        bits=_rounded(lengths[:, 0]),
        slopes=_rounded(lengths[:, 1] * _EXACT) / _EXACT * gains**2 / doubled**2,
        down=gains / doubled,
        up=gains * doubled,
        reach=encoder.reach[tables],
        zero=encoder.zero[tables],
        logarithms=np.append(0.0, _rounded(-np.log2(shares))),
        entries=encoder.entries,
    )


def _rounded(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.rint(numbers * _EXACT) / _EXACT


def _code_length(exponent: int) -> tuple[float, float]:
    """Return the expected bits of a weight in a class: a constant, and a factor of the searched mean square."""
    near, far = 2.0 ** ((exponent - 0.5) / 2), 2.0 ** ((exponent + 0.5) / 2)
    at_near, at_far = (expected_length(exponent, math.sqrt(square)) for square in (near, far))
    slope = (at_far - at_near) / (far - near)
    place = exponent - EXPONENTS[0]
    return at_near - slope * near - (SAVED[place] if place < len(SAVED) else 0.0), slope


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
