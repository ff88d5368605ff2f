"""Levels and thresholds of codes of all widths, in the order in which cpu_restoring.py and cpu_nearest.py read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.kernels.attention_task import LEVELS_OF_WIDTH, STEP_STARTS, THRESHOLDS_OF_WIDTH

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class CodeTables:
    """The tables, by the bits of a code.

    levels: [9, 256] f32
    thresholds: [9, 304] f32, for each bit of a code those that come into question once the higher bits are known
    """

    levels: Floats
    thresholds: Floats


def code_tables(books: Mapping[int, tuple[Floats, Floats]]) -> CodeTables:
    """Return the tables of some widths.

    books: bits, 1 to 8 -> ascending levels, [2**bits], and the thresholds between them, [2**bits - 1]
    """
    made = CodeTables(np.zeros((9, LEVELS_OF_WIDTH), np.float32), np.zeros((9, THRESHOLDS_OF_WIDTH), np.float32))
    for bits, (levels, thresholds) in books.items():
        made.levels[bits, : 1 << bits] = levels
        for step, start in enumerate(STEP_STARTS[:bits]):
            apart = 1 << (bits - step)
            made.thresholds[bits, start : start + (1 << step)] = thresholds[apart // 2 - 1 :: apart]
    return made
