"""The CPU backend: the scalar codecs of native/scalar_encoding.cpp and native/scalar_decoding.cpp."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import item_bytes
from pqweights.kernels import BLOCK_SIZE, SIGNS, VALUE_DTYPES, BlockCoding, Doubles, Encoded, Measures, native

# Factors of the polynomial in the search for levels, by bits; scalar_encoding.cpp has the same.
_DEGREES = {2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 4, 8: 4}


@functools.lru_cache(maxsize=32)
def _search_table(levels: tuple[float, ...], thresholds: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """What `Search` of scalar_encoding.cpp reads: the last threshold, a polynomial, thresholds, levels.

    Raises ValueError for levels that are not symmetric around 0, and for those whose number no polynomial tells.
    """
    half, bits = len(levels) // 2, len(levels).bit_length() - 1
    upper, lower = np.array(levels[half:], dtype=np.float32), np.array(levels[:half], dtype=np.float32)
    limits = np.array(thresholds[half - 1 :], dtype=np.float64)
    if not np.array_equal(upper, -lower[::-1]) or limits[0] != 0:
        raise ValueError("expected levels that are symmetric around 0: blocks cannot be encoded with others")
    if bits < 6:  # by code modulo the size of the table; codes count from the middle, and have their upper thresholds
        unused = np.zeros((16 if bits < 5 else 32) - 2 * half)
        tables = [thresholds[half:], [np.inf], unused, thresholds[:half], upper, unused, lower]
    else:
        tables = [limits, upper]
    return np.concatenate([limits[-1:], _counting_polynomial(limits, _DEGREES[bits]), *tables]).astype(np.float32)


def _counting_polynomial(limits: npt.NDArray[np.float64], degree: int) -> npt.NDArray[np.float64]:
    """The coefficients, highest power first, of a polynomial without a constant that is about k at limits[k].

    The largest deviation is what counts, so fits by least squares follow each other, in which limits weigh more if the
    one before missed them (Lawson's algorithm).
    """
    powers = np.arange(degree, 0, -1)
    matrix, wanted = (limits[:, None] / limits[-1]) ** powers, np.arange(len(limits), dtype=np.float64)
    weights, best = np.ones(len(limits)), (np.inf, np.zeros(degree))
    for _ in range(40):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(matrix * root[:, None], wanted * root, rcond=None)[0]
        missed = np.abs(matrix @ solution - wanted)
        best = min(best, (missed.max(), solution), key=lambda pair: pair[0])
        weights *= missed + 1e-9
        weights /= weights.max()
    scaled = best[1]
    steps = np.diff((np.linspace(0, 1, 1000)[:, None] ** powers) @ scaled)
    if not (best[0] < 0.45 and steps.min() > 0):
        raise ValueError("expected levels whose distances change slowly: blocks cannot be encoded with others")
    return np.asarray(scaled / limits[-1] ** powers)


def encode(values: npt.NDArray[np.uint8], dtype: str, coding: BlockCoding, encoded: Encoded) -> Measures:
    """Encode whole blocks, with norms of least squared error."""
    codes, norms = encoded
    book, blocks, stats = coding.codebook, len(codes), np.empty(3)
    energies, errors = np.empty((2, blocks), dtype=np.float64)
    search = _search_table(tuple(book.levels.tolist()), tuple(book.thresholds.tolist()))
    native.call(
        "encode",
        native.array(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype)),
        VALUE_DTYPES[dtype],
        native.array(search, np.float32, len(search)),
        _signs(coding),
        native.array(codes, np.uint8, blocks * 16 * book.bits, written=True),
        native.array(norms, np.uint16, blocks, written=True),
        native.array(energies, np.float64, blocks, written=True),
        native.array(errors, np.float64, blocks, written=True),
        native.array(stats, np.float64, 3, written=True),
        blocks,
        book.bits,
        math.ldexp(1, coding.norm_exponent),
        coding.gain,
    )
    return Measures(energies, errors, int(stats[2]), float(stats[0]), float(stats[1]))


def decode(
    encoded: Encoded,
    coding: BlockCoding,
    dtype: str,
    values: npt.NDArray[np.uint8],
) -> None:
    """Decode whole blocks into `values`."""
    codes, norms = encoded
    book, blocks = coding.codebook, len(codes)
    levels = np.zeros(max(16, 2**book.bits), dtype=np.float32)  # a vector at least
    levels[: len(book.levels)] = book.levels
    native.call(
        "decode",
        native.array(codes, np.uint8, blocks * 16 * book.bits),
        native.array(norms, np.uint16, blocks),
        native.array(levels, np.float32, len(levels)),
        _signs(coding),
        native.array(values, np.uint8, blocks * BLOCK_SIZE * item_bytes(dtype), written=True),
        VALUE_DTYPES[dtype],
        blocks,
        book.bits,
        math.ldexp(1, coding.norm_exponent - 7),
    )


def add_in_order(totals: Doubles, *summands: Doubles) -> None:
    """Add the elements of one to three arrays [n] to their totals [arrays], one after the other."""
    count = len(summands[0])
    native.call(
        "add_in_order",
        *(native.array(values, np.float64, count) for values in summands),
        *[None] * (3 - len(summands)),
        native.array(totals, np.float64, len(summands), written=True),
        count,
    )


def _signs(coding: BlockCoding) -> native.Array | None:
    return native.array(SIGNS, np.float32, BLOCK_SIZE) if coding.signed else None
