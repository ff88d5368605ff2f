"""What distinguishes GGUF's block formats of scales and offsets, and where the search of their encoders begins.

Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, block_q2_K, block_q4_K, block_q5_K, block_q4_1
and block_q5_1).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_BLOCK = 256
CHAINS = 3
# Where in the settings are: how many times the least-squares step chains go, passes, groups of chains, pairs of d and
# dmin, steps from each pair, rounds, and from there on where chains start, followed by the factors of the pairs.
RELAX, PASSES, STARTS, PAIRS, STEPS, ROUNDS, FIRST_START = range(7)


@dataclass(frozen=True, kw_only=True)
class AffineFormat:
    """One block format: a weight is d * (the integer of its part's scale) * code - dmin * (that of its part's offset).

    Where a block has one part, both integers are 1, and offsets may be negative.

    block_size: weights of a block
    part_size: weights of a part
    last_code: the largest code
    last_level: the largest integer of scales and offsets
    ranges: for each group of three chains, the share of the range that it begins with, and how many steps of the codes
        the chains of the group cut off: at the lower end, at the upper end, or half at each
    weighted_ranges: the same where importance counts
    factors: pairs of d and dmin to try, in units of those that lead to the largest scale and offset; () with one part
    rounds: how often codes are made anew from what is stored
    """

    block_size: int
    part_size: int
    last_code: int
    last_level: int
    ranges: tuple[tuple[float, float], ...]
    weighted_ranges: tuple[tuple[float, float], ...]
    factors: tuple[tuple[float, float], ...]
    rounds: int

    @property
    def parts(self) -> int:
        """Parts of a block."""
        return self.block_size // self.part_size

    def settings(self, *, weighted: bool) -> tuple[float, ...]:
        """What the kernel reads, in the order of RELAX to FIRST_START."""
        ranges = self.weighted_ranges if weighted else self.ranges
        starts: list[float] = []
        for share, cut in ranges:
            shorter = share * (1 - cut / self.last_code)
            starts += [share, shorter, shorter, share, (share + shorter) / 2, (share + shorter) / 2]
        counts = {RELAX: 3, PASSES: 4, STARTS: len(ranges), PAIRS: len(self.factors), STEPS: 2, ROUNDS: self.rounds}
        return (*(counts[place] for place in range(FIRST_START)), *starts, *(f for pair in self.factors for f in pair))


def _square(factors: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Each with each."""
    return tuple((scale, offset) for scale in factors for offset in factors)


# The numbers are the best that a search found on the weights of two models and on normal and heavy-tailed ones, within
# the time that it was allowed; the optimum is flat.
_SIX_BITS = _square(tuple(63 / (63 + more) for more in (-6, -3, -1, 0, 1.5)))
_FOUR_BITS = _square(tuple(15 / (15 + more) for more in (-0.75, 0, 0.5)))
# For blocks of which one part is far larger than the others.
_SMALLER = ((0.4, 0.4), (0.6, 0.6), (0.8, 0.8), (0.6, 1), (1, 0.6), (0.8, 1), (1, 0.8))
_RANGES, _WEIGHTED_RANGES = ((1.03, 1.2), (0.99, 3.0)), ((1.03, 1.2), (0.99, 2.4), (0.86, 2.4))

FORMATS = {
    "Q5_K": AffineFormat(
        block_size=256,
        part_size=32,
        last_code=31,
        last_level=63,
        ranges=_RANGES,
        weighted_ranges=_WEIGHTED_RANGES,
        factors=_SIX_BITS,
        rounds=2,
    ),
    "Q4_K": AffineFormat(
        block_size=256,
        part_size=32,
        last_code=15,
        last_level=63,
        ranges=_RANGES,
        weighted_ranges=_WEIGHTED_RANGES,
        factors=_SIX_BITS,
        rounds=2,
    ),
    "Q2_K": AffineFormat(
        block_size=256,
        part_size=16,
        last_code=3,
        last_level=15,
        ranges=((1.0, 1.2),),
        weighted_ranges=((1.0, 1.2),),
        factors=(*_FOUR_BITS, *_SMALLER),
        rounds=3,
    ),
    "Q5_1": AffineFormat(
        block_size=32,
        part_size=32,
        last_code=31,
        last_level=1,
        ranges=((1.03, 1.2),),
        weighted_ranges=((1.03, 1.2),),
        factors=(),
        rounds=2,
    ),
    "Q4_1": AffineFormat(
        block_size=32,
        part_size=32,
        last_code=15,
        last_level=1,
        ranges=((1.03, 1.2),),
        weighted_ranges=((1.03, 1.2),),
        factors=(),
        rounds=2,
    ),
}
