"""What levels of transform codes and nearest levels are, and the kernels for them, without torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attention_cases import Bytes, Floats, unpacked

from pqweights.codecs.lloyd_max import codebook
from pqweights.kernels import native
from pqweights.kernels.native import array, counter
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


def computed_levels(codes: Bytes, factors: npt.NDArray[np.float16], runs: Runs) -> Floats:
    """Return what the kernel makes of codes [heads, tokens, bytes] and factors [heads, tokens]."""
    (heads, tokens, size), used = codes.shape, sum(count for count, _ in runs)
    out, tables = np.full((heads, tokens, used), np.nan, dtype=np.float32), code_tables_of_all()
    arrays = (
        array(codes, "u1", heads * tokens * size),
        array(factors.view(np.uint16), "u2", heads * tokens),
        array(np.array(runs, dtype=np.int64), "i8", 2 * len(runs)),
        array(tables.levels, "f4", tables.levels.size),
        array(out, "f4", out.size, written=True),
    )
    native.call("restore_levels", counter(), *arrays, heads, tokens, tokens * size, tokens, len(runs), 7)
    return out


def computed_codes(values: Floats, runs: Runs) -> tuple[Bytes, Floats]:
    """Return what the kernel makes of numbers, [rows, size]."""
    codes, levels, tables = np.zeros(values.shape, np.uint8), np.empty_like(values), code_tables_of_all()
    arrays = (
        array(values, "f4", values.size),
        array(np.array(runs, dtype=np.int64), "i8", 2 * len(runs)),
        array(tables.thresholds, "f4", tables.thresholds.size),
        array(tables.levels, "f4", tables.levels.size),
        array(codes, "u1", values.size, written=True),
        array(levels, "f4", values.size, written=True),
    )
    native.call("nearest_levels", counter(), *arrays, *values.shape, len(runs), 3)
    return codes, levels
