"""Where the encoders of GGUF's blocks begin to search: native/gguf_symmetric.cpp, _affine.cpp and _grids.cpp say how.

The numbers are the best that a search found on the weights of two models and on normal and heavy-tailed ones, within
the time that it was allowed; the optimum is flat.
"""

from __future__ import annotations

from dataclasses import dataclass

Numbers = tuple[float, ...]
Points = tuple[Numbers, ...]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for a type.

    kernel: the name of its kernel
    starts: symmetric: where the weight of largest magnitude of a part is put, in units of codes, a multiple of 4;
        affine: shares of a part's range below and above its middle, a multiple of 3; grids: scales of a part in units
        of the root of its mean square, at most 16
    weighted_starts: the same where importance counts
    factors: what is tried as d in units of the largest scale of a part, or as d and dmin, in units of those that lead
        to the largest scale and offset; () with one part
    """

    kernel: str
    starts: Points
    weighted_starts: Points
    factors: Points


def _symmetric(highest: float, starts: Numbers, multipliers: Numbers = ()) -> Search:
    """highest: the value of the last code."""
    # Parts whose largest weights may hardly count need scales down to a tenth.
    steps = [round(highest * 10 ** ((k + 0.5) / 16) * 64) / 64 for k in range(16)]
    weighted = (*starts, *(sign * step for step in steps for sign in (1, -1)))
    return Search(
        kernel="encode_gguf_symmetric",
        starts=tuple((start,) for start in starts),
        weighted_starts=tuple((start,) for start in weighted),
        factors=tuple((multiplier,) for multiplier in multipliers),
    )


def _affine(last_code: int, ranges: Points, weighted_ranges: Points = (), factors: Points = ()) -> Search:
    """The search of an affine type.

    ranges: for three starts each, the share of the range, and how many steps of the codes are cut off: at the upper
        end, at the lower end, or half at each
    """

    def starts(ranges: Points) -> Points:
        numbers: list[Numbers] = []
        for share, cut in ranges:
            shorter = share * (1 - cut / last_code)
            numbers += [(share, shorter), (shorter, share), ((share + shorter) / 2, (share + shorter) / 2)]
        return tuple(numbers)

    weighted_starts = starts(weighted_ranges or ranges)
    return Search(kernel="encode_gguf_affine", starts=starts(ranges), weighted_starts=weighted_starts, factors=factors)


def _of_grid(starts: Numbers, largest_factor: int) -> Search:
    """The search of a type of grid points, whose factors are odd."""
    points = tuple((start,) for start in starts)
    factors = tuple((1 / (largest_factor - 2 * k),) for k in range(4))
    return Search(kernel="encode_gguf_grids", starts=points, weighted_starts=points, factors=factors)


def _growing(first: float, last: float, count: int) -> Numbers:
    """`count` numbers at equal ratios, rounded to 64ths."""
    return tuple(round(first * (last / first) ** (k / (count - 1)) * 64) / 64 for k in range(count))


def _between(first: float, last: float, count: int) -> Numbers:
    """`count` numbers at equal distances, rounded to 64ths."""
    return tuple(round((first + (last - first) * k / (count - 1)) * 64) / 64 for k in range(count))


def _square(factors: Numbers) -> Points:
    """Each with each."""
    return tuple((scale, offset) for scale in factors for offset in factors)


_SIX_BITS = _square(tuple(63 / (63 + more) for more in (-6, -3, -1, 0, 1.5)))
_FOUR_BITS = _square(tuple(15 / (15 + more) for more in (-0.75, 0, 0.5)))
# For blocks of which one part is far larger than the others.
_SMALLER = ((0.4, 0.4), (0.6, 0.6), (0.8, 0.8), (0.6, 1), (1, 0.6), (0.8, 1), (1, 0.8))
_RANGES, _WEIGHTED_RANGES = ((1.03, 1.2), (0.99, 3.0)), ((1.03, 1.2), (0.99, 2.4), (0.86, 2.4))
# Parts with one large weight need scales beyond those of normal weights.
_OF_ONE_BIT, _OF_TWO_BITS = _growing(0.95, 3.2, 5), _growing(0.24, 0.58, 6)
_OF_THREE_BITS = (*_growing(0.11, 0.31, 10), 0.4, 0.55)
_TERNARY = _growing(0.9, 40, 20)
_LARGEST = (-1 / 32, -1 / 31, -1 / 30, -1 / 29)

# Starts whose codes cannot be out of range come first: trying them costs less. At the end of each are the scales for
# parts whose largest weights hardly count.
SEARCHES = {
    "Q8_0": _symmetric(127, (*_between(-121, -127.25, 14), *_between(112.5, 120.5, 14), -127.75, -128.5, 150, 200)),
    "Q6_K": _symmetric(
        31,
        (*_between(29, 31.25, 6), -30, -31, *_between(-31.5, -35, 7), 32.25, 33.5, -40, 42, -52),
        (-1 / 128, -1 / 120),
    ),
    "Q5_K": _affine(31, _RANGES, _WEIGHTED_RANGES, _SIX_BITS),
    "Q5_1": _affine(31, ((1.03, 1.2),)),
    "Q5_0": _symmetric(
        15,
        (*_between(14, 15.25, 5), -14.5, -14.75, -15, *_between(-15.5, -18, 8), *_between(15.5, 17.5, 5), 21, -24, 30),
    ),
    "Q4_1": _affine(15, ((1.03, 1.2),)),
    "Q4_K": _affine(15, _RANGES, _WEIGHTED_RANGES, _SIX_BITS),
    "Q4_0": _symmetric(
        7, (*_between(6, 7.25, 5), -6.75, -7, -7.25, *_between(-7.75, -10.5, 8), *_between(7.75, 9.5, 5), 12, -14, 18)
    ),
    "IQ4_NL": _symmetric(113, (*_between(-108, -155, 14), *_between(96, 140, 14), -180, -230, 160, 200)),
    "IQ4_XS": _symmetric(113, (*_between(-108, -155, 8), *_between(97, 138, 8), -185, -240, 170, 210), _LARGEST),
    "Q3_K": _symmetric(3, (2.75, 3, -3, 3.25, *_between(-3.5, -6, 8), *_between(3.5, 5, 5), 6, -7.5, 10), _LARGEST),
    "IQ3_S": _of_grid(_OF_THREE_BITS, 31),
    "IQ3_XXS": _of_grid(_OF_THREE_BITS, 31),
    "IQ2_S": _of_grid(_OF_TWO_BITS, 31),
    "IQ2_XS": _of_grid(_OF_TWO_BITS, 31),
    "IQ2_XXS": _of_grid(_OF_TWO_BITS, 31),
    "IQ1_M": _of_grid(_OF_ONE_BIT, 15),
    "IQ1_S": _of_grid(_OF_ONE_BIT, 15),
    "TQ2_0": _symmetric(1, _TERNARY),
    "TQ1_0": _symmetric(1, _TERNARY),
    "Q2_0": _symmetric(2, (*_between(1.75, 4.5, 16), *_between(-1, -4, 14), 6, -6)),
    "Q1_0": _symmetric(1, (1, 1, 1, 1)),
    "Q2_K": _affine(3, ((1.0, 1.2),), factors=(*_FOUR_BITS, *_SMALLER)),
}
