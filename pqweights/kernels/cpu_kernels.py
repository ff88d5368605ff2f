"""The CPU kernels in numba: one fused pass over groups of blocks that stay in L1, for every width and dtype at once.

Rotation, level search, their sums and packing are vector code of our own (vector.py). What is one number per block is
computed for a group at a time, in loops that LLVM vectorises: a block's own square root and division would stall it.
Nothing is fused or reassociated, so the bytes equal the reference's. Pointers in, nothing allocated, nothing raised: the
machine code needs no numba to run (compiler.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import carray, types

from pqweights.kernels.vector import (
    look_up_5,
    look_up_6,
    look_up_7,
    look_up_8,
    pack_1,
    pack_2,
    pack_4,
    pack_8,
    quantize_5,
    quantize_6,
    quantize_7,
    quantize_8,
    stack,
    sum_of_squares,
    unpack_1,
    unpack_2,
    unpack_4,
    unpack_8,
)

# Blocks whose floats, codes and sums the L1 cache holds together.
GROUP = 16


def jit(function: Callable[..., Any]) -> Any:
    """Compile into whatever calls it."""
    return numba.njit(error_model="numpy")(function)


@jit
def _half_from_float(u, x):  # type: ignore[no-untyped-def]  # f32, non-negative and finite, and its bits -> u16
    """The float16 bit pattern nearest to x, ties to even."""
    rounded = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    normal = (rounded >> np.uint32(13)) - np.uint32((127 - 15) << 10)
    tiny = np.uint32(np.int32(np.rint(min(x, np.float32(1)) * np.float32(2.0**24))))
    half = tiny if x < np.float32(2.0**-14) else normal
    return np.uint16(0x7C00) if x >= np.float32(65520.0) else np.uint16(half)


@jit
def _bits_from_half(h):  # type: ignore[no-untyped-def]  # u16 -> the bits of the same value in f32, but for subnormals
    """Subnormals come out as 0; infinity and NaN stay what they are."""
    h = np.uint32(h)
    magnitude = (h & np.uint32(0x7FFF)) << np.uint32(13)
    exponent = magnitude & np.uint32(0x0F800000)
    up = np.uint32(224 << 23) if exponent == np.uint32(0x0F800000) else np.uint32(112 << 23)
    rebiased = np.uint32(0) if exponent == np.uint32(0) else magnitude + up
    return rebiased | ((h & np.uint32(0x8000)) << np.uint32(16))


@jit
def _floats_from_halves(halves, bits, x):  # type: ignore[no-untyped-def]
    """float16 patterns as float32 in x, which shares memory with `bits`."""
    for i in range(len(halves)):
        bits[i] = _bits_from_half(halves[i])
    for i in range(len(halves)):
        h = np.int32(halves[i])
        if h & np.int32(0x7C00) == 0:  # zero and subnormals: the mantissa counts 2**-24
            tiny = np.float32(h & np.int32(0x3FF)) * np.float32(2.0**-24)
            x[i] = -tiny if h & np.int32(0x8000) else tiny


@jit
def _load(words16, words32, dtype, bits, x):  # type: ignore[no-untyped-def]
    """The values (in words16, or in words32 where they are float32) as float32 in x, which shares memory with `bits`."""
    if dtype == 0:
        for j in range(len(words16)):
            bits[j] = np.uint32(words16[j]) << np.uint32(16)
    elif dtype == 1:
        _floats_from_halves(words16, bits, x)
    else:
        for j in range(len(words32)):
            bits[j] = words32[j]


@jit
def _store(bits, x, dtype, words16, words32):  # type: ignore[no-untyped-def]
    """Saturate the values of x, round them to nearest even and write them; x shares memory with bits."""
    if dtype == 0:
        limit = np.float32(3.3895313892515355e38)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            u = bits[j]
            words16[j] = np.uint16((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    elif dtype == 1:
        limit = np.float32(65504.0)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            u = bits[j]
            sign = (u >> np.uint32(16)) & np.uint32(0x8000)
            magnitude = u & np.uint32(0x7FFFFFFF)
            rounded = magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
            half = (rounded >> np.uint32(13)) - np.uint32(112 << 10)
            if magnitude < np.uint32(113 << 23):  # below 2**-14: count steps of 2**-24
                half = np.uint32(np.int32(np.rint(abs(x[j]) * np.float32(2.0**24))))
            words16[j] = np.uint16(half | sign)
    else:
        limit = np.float32(3.4028234663852886e38)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            words32[j] = bits[j]


@jit
def _power_of_two(k):  # type: ignore[no-untyped-def]  # -> f64, exactly
    result = 1.0
    for _ in range(abs(k)):
        result = result * (2.0 if k > 0 else 0.5)
    return result


@jit
def _prescale(x):  # type: ignore[no-untyped-def]
    """Multiply x by 2**-k, k the exponent of its largest magnitude; k, or -1000 where a value is not finite."""
    largest = np.float32(0)
    finite = True
    for j in range(128):
        if not np.isfinite(x[j]):
            finite = False
        largest = max(largest, abs(x[j]))
    if not finite:
        return np.int64(-1000)
    if largest == 0:
        return np.int64(0)
    k = np.int64(0)
    wide = np.float64(largest)
    while wide >= 2.0:
        wide *= 0.5
        k += 1
    while wide < 1.0:
        wide *= 2.0
        k -= 1
    half = np.int64(abs(k) // 2)
    if k < 0:
        half = -half
    first = np.float32(_power_of_two(-half))
    second = np.float32(_power_of_two(half - k))
    for j in range(128):
        x[j] = x[j] * first * second
    return k


@jit
def _pack(q, block, bits, row):  # type: ignore[no-untyped-def]
    """Fold the 128 codes of a block into the 16 * bits bytes of row, one field per binary digit of the width.

    The codes come as vector.quantize leaves them; what it subtracted is added here.
    """
    added = np.uint8(1 << (bits - 1))
    lowest = np.uint8(1)
    at = 0
    if bits & 8:
        pack_8(q, block, added, lowest, row, at)
    if bits & 4:
        pack_4(q, block, added, lowest, row, at)
        at, lowest = 64, np.uint8(16)
    if bits & 2:
        pack_2(q, block, added, lowest, row, at)
        at, lowest = at + 32, np.uint8(lowest << np.uint8(2))
    if bits & 1:
        pack_1(q, block, added, lowest, row, at)


@jit
def _unpack(row, bits, q, block):  # type: ignore[no-untyped-def]
    """The inverse of _pack, with nothing subtracted."""
    lowest = np.uint8(1)
    at = 0
    if bits & 8:
        unpack_8(row, at, lowest, q, block)
    elif bits & 4:
        unpack_4(row, at, lowest, q, block)
        at, lowest = 64, np.uint8(16)
    else:
        q[block * 128 : (block + 1) * 128] = 0
    if bits & 2:
        unpack_2(row, at, lowest, q, block)
        at, lowest = at + 32, np.uint8(lowest << np.uint8(2))
    if bits & 1:
        unpack_1(row, at, lowest, q, block)


# Bytes of the arrays on the stack: a group's weights or blocks, in elements of 1, 4 or 8 bytes.
_WEIGHTS_OF_1, _WEIGHTS_OF_4 = GROUP * 128, GROUP * 128 * 4
_BLOCKS_OF_4, _BLOCKS_OF_8 = GROUP * 4, GROUP * 8
_FOUR_SUMS = GROUP * 4 * 4


@jit
def _floats_and_bits(address, count):  # type: ignore[no-untyped-def]
    """The same memory as float32 and as bit patterns."""
    return carray(address, count, np.float32), carray(address, count, np.uint32)


# Arguments: pointers, then numbers; what each points to is said where the function begins.
ENCODE = types.void(*[types.voidptr] * 8, *[types.int64] * 4, *[types.float64] * 2, *[types.float32] * 2)
DECODE = types.void(*[types.voidptr] * 5, *[types.int64] * 5, types.float64)


def _encode(  # type: ignore[no-untyped-def]
    values_at, table_at, signs_at, codes_at, norms_at, energies_at, errors_at, stats_at,
    blocks, dtype, bits, signed, to_stored, from_stored, cells_per_unit, most,
):  # fmt: skip
    words16 = carray(values_at, blocks * 128, np.uint16)  # those of the two that fits the dtype counts
    words32 = carray(values_at, blocks * 128, np.uint32)
    table = carray(table_at, 1, np.float32)
    signs = carray(signs_at, 128, np.float32)
    codes = carray(codes_at, (blocks, 16 * bits), np.uint8)
    norms = carray(norms_at, blocks, np.uint16)
    energies = carray(energies_at, blocks, np.float64)
    errors = carray(errors_at, blocks, np.float64)
    stats = carray(stats_at, 3, np.float64)  # smallest and largest norm, first bad block

    x, raw = _floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    q = carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8)
    sums = carray(stack(_FOUR_SUMS), GROUP * 4, np.float32)
    squares = carray(stack(_BLOCKS_OF_4), GROUP, np.float32)
    radius = carray(stack(_BLOCKS_OF_4), GROUP, np.float32)
    inverse = carray(stack(_BLOCKS_OF_4), GROUP, np.float32)
    two_to_k = carray(stack(_BLOCKS_OF_8), GROUP, np.float64)
    exact = carray(stack(_BLOCKS_OF_8), GROUP, np.float64)
    norm, norm_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)
    stored_norm, stored_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)

    smallest, largest = np.inf, 0.0
    first_bad = -1
    for first in range(0, blocks, GROUP):
        count = min(GROUP, blocks - first)
        begin, end = first * 128, (first + count) * 128
        _load(words16[begin:end], words32[begin:end], dtype, raw, x)
        if signed:
            for i in range(count):
                for j in range(128):
                    x[i * 128 + j] = x[i * 128 + j] * signs[j]
        for i in range(count):
            squares[i] = sum_of_squares(x, i)
        safe = True
        for i in range(count):
            two_to_k[i] = 1.0
            safe = safe and (squares[i] >= np.float32(2.0**-60) and squares[i] <= np.float32(2.0**60))
        if not safe:
            for i in range(count):
                if not (squares[i] >= np.float32(2.0**-60) and squares[i] <= np.float32(2.0**60)):
                    k = _prescale(x[i * 128 : (i + 1) * 128])
                    squares[i] = sum_of_squares(x, i)
                    if k == -1000:
                        squares[i] = np.float32(0)
                        if first_bad < 0:
                            first_bad = first + i
                    else:
                        two_to_k[i] = _power_of_two(k)
        for i in range(count):
            radius[i] = np.sqrt(squares[i])
            inverse[i] = np.float32(1) / radius[i] if radius[i] > 0 else np.float32(0)

        for i in range(count):
            if bits <= 5:
                quantize_5(x, i, inverse[i], cells_per_unit, most, table, q, sums)
            elif bits == 6:
                quantize_6(x, i, inverse[i], cells_per_unit, most, table, q, sums)
            elif bits == 7:
                quantize_7(x, i, inverse[i], cells_per_unit, most, table, q, sums)
            else:
                quantize_8(x, i, inverse[i], cells_per_unit, most, table, q, sums)

        for i in range(count):
            exact[i] = np.float64(radius[i] * (sums[4 * i] / sums[4 * i + 1])) * two_to_k[i]
            norm[i] = np.float32(exact[i] * to_stored)
        for i in range(count):
            norms[first + i] = _half_from_float(norm_bits[i], norm[i])
            smallest = min(smallest, exact[i] if exact[i] > 0 else np.inf)
            largest = max(largest, exact[i])
        _floats_from_halves(norms[first : first + count], stored_bits, stored_norm)
        for i in range(count):
            energy = np.float64(squares[i]) * two_to_k[i] * two_to_k[i]
            length = np.float64(radius[i]) * two_to_k[i]
            gain = np.float64(stored_norm[i]) * from_stored / (length if length > 0 else 1.0)
            short = 1.0 - gain
            projection, level_energy = np.float64(sums[4 * i]), np.float64(sums[4 * i + 1])
            per_block = np.float64(sums[4 * i + 2]) + 2.0 * short * (projection - level_energy)
            per_block = per_block + short * short * level_energy
            energies[first + i] = energy
            errors[first + i] = energy / 128.0 * max(per_block, 0.0)
        for i in range(count):
            _pack(q, i, bits, codes[first + i])
    stats[0], stats[1], stats[2] = smallest, largest, first_bad


def _decode(  # type: ignore[no-untyped-def]
    codes_at, norms_at, levels_at, signs_at, values_at, blocks, dtype, bits, signed, rotate, from_stored,
):  # fmt: skip
    codes = carray(codes_at, (blocks, 16 * bits), np.uint8)
    norms = carray(norms_at, blocks, np.uint16)
    levels = carray(levels_at, 1, np.float32)
    signs = carray(signs_at, 128, np.float32)
    words16 = carray(values_at, blocks * 128, np.uint16)  # those of the two that fits the dtype counts
    words32 = carray(values_at, blocks * 128, np.uint32)

    y, raw = _floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    q = carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8)
    norm, norm_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)

    for first in range(0, blocks, GROUP):
        count = min(GROUP, blocks - first)
        _floats_from_halves(norms[first : first + count], norm_bits, norm)
        for i in range(count):
            norm[i] = np.float32(np.float64(norm[i]) * from_stored)
        for i in range(count):
            _unpack(codes[first + i], bits, q, i)
        for i in range(count if not rotate else 0):
            for j in range(128):
                y[i * 128 + j] = levels[q[i * 128 + j]] * norm[i]
        for i in range(count if rotate else 0):
            if bits <= 5:
                look_up_5(q, levels, i, norm[i], y)
            elif bits == 6:
                look_up_6(q, levels, i, norm[i], y)
            elif bits == 7:
                look_up_7(q, levels, i, norm[i], y)
            else:
                look_up_8(q, levels, i, norm[i], y)
        if signed:
            for i in range(count):
                for j in range(128):
                    y[i * 128 + j] = y[i * 128 + j] * signs[j]
        begin, end = first * 128, (first + count) * 128
        _store(raw[: count * 128], y[: count * 128], dtype, words16[begin:end], words32[begin:end])


KERNELS = {"encode": (_encode, ENCODE), "decode": (_decode, DECODE)}
