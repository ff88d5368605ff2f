"""A decoder of the codec hadamard-trellis-columns, written from docs/format.md (sections 10 and 12) alone.

It shares no code with the package; superblocks are those of trellis_decoder.py.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import numpy.typing as npt
from trellis_decoder import Damaged, decode_superblock

STRIP = 128


def factors(scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What scales stand for, from 50 digits."""
    with mpmath.workdps(50):
        table = [np.float32(str(mpmath.mpf(2) ** (mpmath.mpf(u - 128) / 16))) for u in range(256)]
    return np.array(table, dtype=np.float32)[scales]


def cut(shape: tuple[int, int]) -> tuple[int, int, int]:
    """The strips of a weight, the superblocks of a strip, and the columns of each."""
    rows, columns = shape
    width = math.ceil(columns / math.ceil(columns / 768))
    return math.ceil(rows / STRIP), math.ceil(columns / width), width


def bits(shape: tuple[int, ...], total: int, *, transposed: bool = False) -> float:
    """The bits per weight of a weight whose superblocks have so many bytes, as a master states them."""
    *stack, rows, columns = shape
    matrix = (columns, rows) if transposed else (rows, columns)
    strips, superblocks, _ = cut(matrix)
    exact = 8 * (total + math.prod(stack) * (4 * strips * superblocks + sum(matrix))) / math.prod(shape)
    return float(f"{exact:.7g}")


def decode(
    trellis: bytes,
    lengths: npt.NDArray[np.int32],
    row_scales: npt.NDArray[np.uint8],
    column_scales: npt.NDArray[np.uint8],
    *,
    transposed: bool = False,
) -> npt.NDArray[np.float32]:
    """The float32 values of a weight, before they are clamped and rounded to an output dtype."""
    if int(lengths.sum(dtype=np.int64)) != len(trellis):
        raise Damaged("lengths of other superblocks")
    if lengths.ndim == 3:
        ends = np.cumsum(lengths.sum(axis=(1, 2), dtype=np.int64)).tolist()
        experts = zip([0, *ends], ends, lengths, row_scales, column_scales, strict=False)
        return np.stack([
            decode(trellis[begin:end], *of_expert, transposed=transposed) for begin, end, *of_expert in experts
        ])  # fmt: skip
    shape = (len(row_scales), len(column_scales))
    strips, superblocks, width = cut(shape)
    if lengths.shape != ((superblocks, strips) if transposed else (strips, superblocks)):
        raise Damaged("lengths of other superblocks")
    values, at = np.empty((strips * STRIP, shape[1]), dtype=np.float32), 0
    for place, length in np.ndenumerate(lengths):
        strip, number = reversed(place) if transposed else place
        begin, end = number * width, min((number + 1) * width, shape[1])
        if not 7 <= length <= 327 + 4128 * math.ceil((end - begin) / 16):
            raise Damaged("no such length")
        block = decode_superblock(trellis[at : at + length], end - begin, signed=False)
        values[strip * STRIP : (strip + 1) * STRIP, begin:end] = block.T
        at += int(length)
    with np.errstate(over="ignore", under="ignore"):
        matrix = values[: shape[0]] * factors(row_scales)[:, None] * factors(column_scales)
    return matrix.T if transposed else matrix
