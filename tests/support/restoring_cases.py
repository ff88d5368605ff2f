"""What levels of transform codes and nearest levels are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attention_cases import Bytes, Floats, unpacked

from pqweights.formats.lloyd_max import codebook
from pqweights.kernels.transform_codes import CodeTables, code_tables

# How many coefficients a run has, and their bits.
Runs = Sequence[tuple[int, int]]


@functools.cache
def books() -> dict[int, tuple[Floats, Floats]]:
    """Levels and thresholds of all widths."""
    found = {1: (np.array([-0.8, 0.8], np.float32), np.zeros(1, np.float32))}
    for bits in range(2, 9):
        book = codebook(bits)
        found[bits] = book.levels, book.thresholds.astype(np.float32)
    return found


@functools.cache
def code_tables_of_all() -> CodeTables:
    """The same, as kernels read them."""
    return code_tables(books())


def expected_levels(codes: Bytes, factors: npt.NDArray[np.float16], runs: Runs) -> Floats:
    """Return levels of codes [..., bytes], times factors [...]."""
    found, at = [], 0
    for count, bits in runs:
        size = count * bits // 8
        found.append(books()[bits][0][unpacked(codes[..., at : at + size], bits, count)])
        at += size
    levels: Floats = np.concatenate(found, axis=-1) * factors.astype(np.float32)[..., None]
    return levels


def expected_codes(values: Floats, runs: Runs) -> tuple[Bytes, Floats]:
    """Return codes and levels of numbers, [..., size]."""
    codes, levels, begin = [], [], 0
    for count, bits in runs:
        code = np.searchsorted(books()[bits][1], values[..., begin : begin + count], side="right")
        codes.append(code.astype(np.uint8))
        levels.append(books()[bits][0][code])
        begin += count
    return np.concatenate(codes, axis=-1), np.concatenate(levels, axis=-1)
