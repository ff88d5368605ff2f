"""What distinguishes the block formats of GGUF without offsets, and where the search for their scales begins.

Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, and dequantize_row_* in ggml/src/ggml-quants.c).
"""

from __future__ import annotations

from dataclasses import dataclass

# Where in the settings each of a format's tables begins; the starts end them.
VALUES, LIMITS, MULTIPLIERS, STARTS = 0, 16, 32, 48
MOST_STARTS = 96

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, kw_only=True)
class SymmetricFormat:
    """One block format: a weight is d * (the factor of its part) * (the value of its code).

    parts: how many parts a block has; with one, the factor is always 1
    part_size: weights of a part, 16 or 32
    lowest, highest: the values of the first and of the last code, between which values are whole numbers
    values: the values of the codes if they are not those, else ()
    least_factor, most_factor: the range of factors
    starts: where the weight of largest magnitude of a part is put, in units of codes; a multiple of 4, at most 48
    multipliers: candidates of d in units of the largest scale of a part
    factors_tried: how many factors are tried for each of them; a multiple of 4
    """

    parts: int
    part_size: int
    lowest: float
    highest: float
    starts: tuple[float, ...]
    values: tuple[float, ...] = ()
    least_factor: float = 1
    most_factor: float = 1
    multipliers: tuple[float, ...] = ()
    factors_tried: int = 0

    @property
    def block_size(self) -> int:
        """Weights of a block."""
        return self.parts * self.part_size

    @property
    def all_starts(self) -> tuple[float, ...]:
        """The starts, and those of parts whose largest weights may hardly count: scales down to a tenth."""
        steps = [round(self.highest * 10 ** ((k + 0.5) / 16) * 64) / 64 for k in range(16)]
        return (*self.starts, *(sign * step for step in steps for sign in (1, -1)))

    @property
    def inner_starts(self) -> int:
        """How many of the starts, from the first on, cannot lead to codes out of range; a multiple of 4."""
        inner = [not self.values and abs(start) <= self.highest + 0.25 for start in self.starts]
        return [*inner, False].index(False) // 4 * 4

    @property
    def limits(self) -> tuple[float, ...]:
        """For codes with a table of values: before each but the first, the middle between it and the one before."""
        pairs = zip(self.values, self.values[1:], strict=False)
        return (0.0, *((low + high) / 2 for low, high in pairs)) if self.values else ()

    def settings(self, *, weighted: bool) -> tuple[float, ...]:
        """What the kernels read: the tables, each where VALUES, LIMITS, MULTIPLIERS and STARTS say.

        weighted: unequal importance needs more starts; kernels know how many there are.
        """
        tables = (self.values, self.limits, self.multipliers)
        padded = [number for table in tables for number in (*table, *[0.0] * (STARTS // 3 - len(table)))]
        return (*padded, *(self.all_starts if weighted else self.starts))


def _between(first: float, last: float, count: int) -> tuple[float, ...]:
    """`count` numbers at equal distances, rounded to 64ths."""
    return tuple(round((first + (last - first) * k / (count - 1)) * 64) / 64 for k in range(count))


# Those whose codes cannot be out of range come first: trying them costs less. At the end the scales for parts whose
# largest weights hardly count.
_Q8_0_STARTS = (*_between(-121, -127.25, 14), *_between(112.5, 120.5, 14), -127.75, -128.5, 150, 200)
_Q5_0_STARTS = (
    *_between(14, 15.25, 5),
    -14.5,
    -14.75,
    -15,
    *_between(-15.5, -18, 8),
    *_between(15.5, 17.5, 5),
    21,
    -24,
    30,
)
_Q4_0_STARTS = (
    *_between(6, 7.25, 5),
    -6.75,
    -7,
    -7.25,
    *_between(-7.75, -10.5, 8),
    *_between(7.75, 9.5, 5),
    12,
    -14,
    18,
)
_Q6_K_STARTS = (*_between(29, 31.25, 6), -30, -31, *_between(-31.5, -35, 7), 32.25, 33.5, -40, 42, -52)
_Q3_K_STARTS = (2.75, 3, -3, 3.25, *_between(-3.5, -6, 8), *_between(3.5, 5, 5), 6, -7.5, 10)
_IQ4_NL_STARTS = (*_between(-118, -170, 14), *_between(105, 152, 14), -190, -240, 175, 220)
_IQ4_XS_STARTS = (*_between(-118, -170, 8), *_between(105, 150, 8), -200, -260, 190, 250)

FORMATS: dict[str, SymmetricFormat] = {
    "Q8_0": SymmetricFormat(parts=1, part_size=32, lowest=-128, highest=127, starts=_Q8_0_STARTS),
    "Q5_0": SymmetricFormat(parts=1, part_size=32, lowest=-16, highest=15, starts=_Q5_0_STARTS),
    "Q4_0": SymmetricFormat(parts=1, part_size=32, lowest=-8, highest=7, starts=_Q4_0_STARTS),
    "IQ4_NL": SymmetricFormat(
        parts=1, part_size=32, lowest=-127, highest=113, values=IQ4_VALUES, starts=_IQ4_NL_STARTS
    ),
    "Q6_K": SymmetricFormat(
        parts=16,
        part_size=16,
        lowest=-32,
        highest=31,
        least_factor=-128,
        most_factor=127,
        starts=_Q6_K_STARTS,
        multipliers=(-1 / 128, -1 / 120),
        factors_tried=24,
    ),
    "Q3_K": SymmetricFormat(
        parts=16,
        part_size=16,
        lowest=-4,
        highest=3,
        least_factor=-32,
        most_factor=31,
        starts=_Q3_K_STARTS,
        multipliers=(-1 / 32, -1 / 31, -1 / 30, -1 / 29),
        factors_tried=4,
    ),
    "IQ4_XS": SymmetricFormat(
        parts=8,
        part_size=32,
        lowest=-127,
        highest=113,
        values=IQ4_VALUES,
        least_factor=-32,
        most_factor=31,
        starts=_IQ4_XS_STARTS,
        multipliers=(-1 / 32, -1 / 31, -1 / 30, -1 / 29),
        factors_tried=4,
    ),
}
