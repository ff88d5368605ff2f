"""Factors on the rows and columns of a weight, and sums of squares along them, in numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

MULTIPLY = types.void(*[types.voidptr] * 4, *[types.int64] * 3)
SQUARES = types.void(*[types.voidptr] * 5, *[types.int64] * 4)


def _multiply(
    values_at: Any,  # [rows, columns]: u16 of BF16, or f32
    columns_at: Any,  # f32 [columns]
    rows_at: Any,  # f32 [rows]
    out_at: Any,  # f32 [rows, columns], which may be the values
    rows: Any,
    columns: Any,
    bf16: Any,  # whether the values are BF16
) -> None:
    words = carray(values_at, rows * columns, np.uint16)
    floats = carray(values_at, rows * columns, np.float32)
    by_column, by_row = carray(columns_at, columns, np.float32), carray(rows_at, rows, np.float32)
    out, bits = carray(out_at, rows * columns, np.float32), carray(out_at, rows * columns, np.uint32)
    for i in range(rows):
        first, factor = i * columns, by_row[i]
        if bf16:
            for j in range(columns):
                bits[first + j] = np.uint32(words[first + j]) << np.uint32(16)
            for j in range(columns):
                out[first + j] = out[first + j] * by_column[j] * factor
        else:
            for j in range(columns):
                out[first + j] = floats[first + j] * by_column[j] * factor


def _squares(
    values_at: Any,  # [rows, columns]: u16 of BF16, or f32
    weights_at: Any,  # f32 [columns], by which squares are multiplied before they are added up along rows
    of_columns_at: Any,  # in and out: f32 [columns], to which the squares are added
    of_rows_at: Any,  # out: f32 [rows]
    room_at: Any,  # u32 [columns]
    rows: Any,
    columns: Any,
    bf16: Any,
    along_rows: Any,  # whether of_rows is written
) -> None:
    words = carray(values_at, rows * columns, np.uint16)
    floats = carray(values_at, rows * columns, np.float32)
    weights = carray(weights_at, columns, np.float32)
    of_columns, of_rows = carray(of_columns_at, columns, np.float32), carray(of_rows_at, rows, np.float32)
    bits, row = carray(room_at, columns, np.uint32), carray(room_at, columns, np.float32)
    for i in range(rows):
        first = i * columns
        if bf16:
            for j in range(columns):
                bits[j] = np.uint32(words[first + j]) << np.uint32(16)
        else:
            for j in range(columns):
                row[j] = floats[first + j]
        for j in range(columns):
            row[j] = row[j] * row[j]
        for j in range(columns):
            of_columns[j] = of_columns[j] + row[j]
        if not along_rows:
            continue
        for j in range(columns):
            row[j] = row[j] * weights[j]
        left = columns
        while left > 1:  # the upper half is added to the lower one
            half = left // 2
            upper = row[left - half : left]
            for j in range(half):
                row[j] = row[j] + upper[j]
            left = left - half
        of_rows[i] = row[0]


KERNELS = {"multiply": (_multiply, MULTIPLY), "squares": (_squares, SQUARES)}
